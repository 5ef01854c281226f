"""The control pages of this node's ranks.

Each life of a rank gets a fresh file, so that a rank of an old generation looks at one that nobody writes any more.
"""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path

from gemini_ft.agent.replicas.store import PAGE_PREFIX
from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, RankPage

__all__ = ["ControlPages"]


class ControlPages:
    """Pages of the current generation, by rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Path, RankPage]] = {}

    def create(self, rank: int, generation: int) -> Path:
        """Make the page of a rank, in place of an earlier one, and return its path."""
        self.remove(rank)
        path = self._folder / f"{PAGE_PREFIX}{rank}.{generation}.{os.getpid()}-{next(self._numbers)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, CONTROL_PAGE_BYTES)
            mapping = mmap.mmap(descriptor, CONTROL_PAGE_BYTES)
        finally:
            os.close(descriptor)
        self._open[rank] = (path, RankPage(memoryview(mapping)))
        return path

    def get(self, rank: int) -> RankPage | None:
        """Return the page of a rank; None before its hello."""
        entry = self._open.get(rank)
        return entry[1] if entry is not None else None

    def remove(self, rank: int) -> None:
        """Unlink the page of a rank; who has it mapped keeps what it maps."""
        entry = self._open.pop(rank, None)
        if entry is not None:
            entry[0].unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Unlink all pages."""
        for rank in list(self._open):
            self.remove(rank)
