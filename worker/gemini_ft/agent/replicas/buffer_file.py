"""One buffer of the replica store as a file on tmpfs: allocate, map, adopt, replace, see whether a process locks it.

A rank keeps a shared `flock` on its buffers while it lives; the kernel drops it however the rank ends. So an
exclusive lock that cannot be had means that a live process may still write.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

from gemini_ft.contracts.buffer_format import BufferGeometry, BufferHeader, BufferState, ShardBuffer
from gemini_ft.contracts.errors import CapacityError, ProtocolError
from gemini_ft.faults import fault_point

__all__ = ["BufferFile", "allocated_bytes", "create_buffer_file", "is_locked", "open_buffer_file"]

NEW_SUFFIX = ".new"
_TOUCH_BYTES = 16 << 20


class BufferFile:
    """A mapped buffer and what this agent knows about its contents."""

    def __init__(self, path: Path, buffer: ShardBuffer) -> None:
        self.path = path
        self.buffer = buffer
        self._writer: asyncio.Task[Any] | None = None
        self._trusted: BufferHeader | None = None

    def header(self) -> BufferHeader | None:
        """Return the header; None if it cannot be read, because it is damaged or being written right now."""
        try:
            return self.buffer.header()
        except ProtocolError:
            return None

    def trust(self, header: BufferHeader) -> None:
        """Every byte of the sealed copy that `header` describes is known to match its digest."""
        self._trusted = header

    @property
    def copy(self) -> BufferHeader | None:
        """Header of the sealed and verified copy in this buffer. Trust ends by itself when it is filled again."""
        header = self.header()
        return header if header is not None and header == self._trusted and header.state is BufferState.SEALED else None

    def discard(self) -> None:
        """Give up what the buffer holds, in one store."""
        fault_point("store.before_discard")
        self._trusted = None
        self.buffer.discard()
        fault_point("store.after_discard")

    def take_for_writing(self) -> None:
        """Make the running task the only one that writes here.

        An earlier writer is cancelled, which takes effect at once: a receive under way ends without another byte.
        """
        current = asyncio.current_task()
        if self._writer is not None and self._writer is not current and not self._writer.done():
            self._writer.cancel()
        self._writer = current

    def give_back(self) -> None:
        """The running task has ended its writing; nothing if another has taken over."""
        if self._writer is asyncio.current_task():
            self._writer = None

    @property
    def being_received(self) -> bool:
        """True while a transfer writes here."""
        return self._writer is not None and not self._writer.done()


def create_buffer_file(
    path: Path, geometry: BufferGeometry, job_id: str, rank: int, world_size: int, source: ShardBuffer | None = None
) -> BufferFile:
    """Allocate, touch and format a new file, then rename it to `path`. Blocks; meant for a thread.

    A process that has mapped an earlier file of this name goes on with that, apart from ours. A sealed copy in
    `source` is taken over, if its chunks have the same size; it is not verified here.

    Raises:
        CapacityError: the file system is full.
    """
    fault_point("store.before_allocate")
    fresh = path.with_name(path.name + NEW_SUFFIX)
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.posix_fallocate(descriptor, 0, geometry.file_bytes)
            mapping = mmap.mmap(descriptor, geometry.file_bytes)
        finally:
            os.close(descriptor)
        view = memoryview(mapping)
        # Each page once, so that neither a stage nor a receive pays for it; in pieces, so that other threads run.
        for start in range(0, geometry.file_bytes, _TOUCH_BYTES):
            pages = view[start : start + _TOUCH_BYTES : mmap.PAGESIZE]
            pages[:] = bytes(len(pages))
        buffer = ShardBuffer(view, geometry)
        buffer.format(job_id, rank, world_size)
        if source is not None:
            _take_over(source, buffer)
        fault_point("store.before_rename")
        fresh.rename(path)
        fault_point("store.after_rename")
    except OSError as error:
        fresh.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        free = os.statvfs(path.parent)
        have_bytes = free.f_bavail * free.f_frsize
        raise CapacityError(
            f"{path.parent} has {have_bytes} bytes left, a buffer of rank {rank} needs {geometry.file_bytes} bytes; "
            "enlarge the tmpfs (`mount -o remount,size=...`, `--shm-size`) or keep fewer replicas",
            need_bytes=geometry.file_bytes,
            have_bytes=have_bytes,
            knob="tmpfs size",
        ) from None
    return BufferFile(path, buffer)


def open_buffer_file(path: Path, job_id: str, rank: int) -> BufferFile:
    """Map a file that a former life of the agent left.

    Raises:
        ProtocolError: it is not a whole buffer of this rank and job.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if not size_bytes:
            raise ProtocolError(f"{path.name} is empty")
        mapping = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    try:
        buffer = ShardBuffer.open(memoryview(mapping))
    except CapacityError as error:
        raise ProtocolError(f"{path.name} is cut off: {error}") from None
    header = buffer.header()
    if (header.job_id, header.rank) != (job_id, rank):
        raise ProtocolError(f"{path.name} belongs to rank {header.rank} of {header.job_id}")
    return BufferFile(path, buffer)


def is_locked(path: Path) -> bool:
    """True if some live process holds a lock on the file. Blocks for no one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def allocated_bytes(path: Path) -> int:
    """Memory that the file takes on tmpfs; 0 if it is gone."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _take_over(source: ShardBuffer, target: ShardBuffer) -> None:
    header = source.header()
    if header.state is not BufferState.SEALED or header.geometry.chunk_bytes != target.geometry.chunk_bytes:
        return
    target.begin(header.job_id, header.generation, header.rank, header.world_size, header.step, header.data_bytes)
    for index, data in source.chunks(header):
        target.chunk(index, header.data_bytes)[:] = data
        target.set_chunk_digest(index, source.chunk_digest(index))
    target.seal(source.manifest())
