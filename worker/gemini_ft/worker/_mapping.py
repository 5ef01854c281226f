"""Shared files of the agent, mapped into the rank."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from pathlib import Path

from gemini_ft.contracts.errors import UnavailableError

__all__ = ["SharedMapping"]

logger = logging.getLogger(__name__)


class SharedMapping:
    """A file mapped for reading and writing, as long as this object is open.

    With `locked`, a shared lock is held too: the kernel drops it however the process ends, and until then
    nobody takes the file for leaked.
    """

    def __init__(self, path: Path, *, locked: bool = False) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise UnavailableError(f"cannot open {path}, which the agent has just named: {error.strerror}") from error
        try:
            if locked:
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Give up the lock, and unmap as soon as nothing views the memory any more."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            # The traceback of a caught error may hold a view; the map goes when that does.
            logger.debug("a mapping is still viewed and stays until it is not")
        os.close(self._descriptor)
