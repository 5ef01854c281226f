"""The agent's mappings of control pages."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, JobPage, RankPage

__all__ = ["JobPageFile", "RankPageFile", "RankProgress"]


@dataclass(frozen=True, slots=True)
class RankProgress:
    """What a rank's control page said when it was read last."""

    finished_step: int | None = None
    committed_step: int | None = None
    sealed_everywhere_step: int | None = None
    num_skipped: int = 0
    stall_us: int = 0
    held_step: int | None = None


class JobPageFile:
    """The job page: made by one life of an agent and mapped again by the next, as launcher and ranks keep it mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            temporary = path.with_name(f"{path.name}.new")
            # Whoever finds the page under its name finds all of it: a short mapping would be a SIGBUS.
            temporary.write_bytes(bytes(CONTROL_PAGE_BYTES))
            temporary.chmod(0o600)
            temporary.replace(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), CONTROL_PAGE_BYTES)
        self._view = memoryview(self._map)
        self.page = JobPage(self._view)

    def close(self) -> None:
        """Unmap the page and leave the file."""
        self.page.release()
        self._view.release()
        self._map.close()

    def order_generation(self, generation: int) -> None:
        """Show the newest generation; what was asked of the ranks of an older one is void."""
        if generation > self.page.ordered_generation:
            self.page.checkpoint_request = 0
        self.page.ordered_generation = generation

    def remove(self) -> None:
        """Unmap and unlink; processes that have it mapped keep reading what it said last."""
        self.close()
        self.path.unlink(missing_ok=True)


class RankPageFile:
    """A rank's control page, for reading. Raises OSError if the file is gone."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, CONTROL_PAGE_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)
        self._page = RankPage(self._view)

    def read(self) -> RankProgress:
        """Return what the page says now."""
        page = self._page
        # First, because the rank writes it last.
        held_step = page.held_step
        return RankProgress(
            page.finished_step,
            page.committed_step,
            page.sealed_everywhere_step,
            page.num_skipped,
            page.stall_us,
            held_step,
        )

    def close(self) -> None:
        """Unmap the page."""
        self._page.release()
        self._view.release()
        self._map.close()
