"""Watches and kills processes that are mostly not the agent's children: ranks and launchers, by pidfd."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import struct
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

from gemini_ft.agent.records import ProcessIdentity

__all__ = ["ProcessWatch", "identify"]

_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_BYTES = 64
_EXIT_CODE_OFFSET = 60

# Places in /proc/<pid>/stat, counted from the field behind the command.
_STATE, _START_TICKS, _EXIT_CODE = 0, 19, 49

logger = logging.getLogger(__name__)


def identify(pid: int) -> ProcessIdentity:
    """Return the identity of the process that has `pid` now; without a start if there is none."""
    stat = _stat(pid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ProcessIdentity(pid=pid, started=f"{boot}/{stat[_START_TICKS]}" if stat else "")


class ProcessWatch:
    """Tells once of each watched process that it has ended, with its exit code (-n: signal n) if the kernel knows it.

    A pid that another process has by now counts as ended, and is never signalled.
    """

    def __init__(self, on_end: Callable[[ProcessIdentity, int | None], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[ProcessIdentity, int] = {}
        self._waiters: dict[ProcessIdentity, asyncio.Event] = {}

    def watch(self, process: ProcessIdentity) -> None:
        """Begin to watch; harmless when it is watched already."""
        if process in self._pidfds:
            return
        pidfd = _open(process)
        if pidfd is None:
            self._loop.call_soon(self._on_end, process, None)
            return
        self._pidfds[process] = pidfd
        self._waiters[process] = asyncio.Event()
        self._loop.add_reader(pidfd, self._ended, process)

    def is_watched(self, process: ProcessIdentity) -> bool:
        """Whether the process is watched and has not ended."""
        return process in self._pidfds

    def kill(self, process: ProcessIdentity) -> None:
        """SIGKILL a watched process; harmless when it has ended."""
        pidfd = self._pidfds.get(process)
        if pidfd is not None:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("process %d had ended before it was killed", process.pid)

    async def wait_ended(self, processes: Collection[ProcessIdentity], limit: timedelta) -> list[ProcessIdentity]:
        """Wait until all have ended, at most `limit`; return those that have not."""
        waiters = [self._waiters[process] for process in processes if process in self._waiters]
        try:
            async with asyncio.timeout(limit.total_seconds()):
                for waiter in waiters:
                    await waiter.wait()
        except TimeoutError:
            return [process for process in processes if process in self._pidfds]
        return []

    async def end(self, processes: Collection[ProcessIdentity], limit: timedelta) -> list[ProcessIdentity]:
        """SIGKILL all of them, and wait as `wait_ended` does. A stopped process dies as well."""
        for process in processes:
            self.watch(process)
            self.kill(process)
        return await self.wait_ended(processes, limit)

    def close(self) -> None:
        """Stop watching. Nothing is ended."""
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _ended(self, process: ProcessIdentity) -> None:
        pidfd = self._pidfds.pop(process)
        self._loop.remove_reader(pidfd)
        code = _exit_code(process.pid, pidfd)
        os.close(pidfd)
        self._waiters.pop(process).set()
        self._on_end(process, code)


def _open(process: ProcessIdentity) -> int | None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Checked after the descriptor is open: from here on it can mean no other process.
    if not process.started or identify(process.pid) != process:
        os.close(pidfd)
        return None
    return pidfd


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _exit_code(pid: int, pidfd: int) -> int | None:
    stat = _stat(pid)
    if stat is not None and stat[_STATE] == "Z":
        return os.waitstatus_to_exitcode(int(stat[_EXIT_CODE]))
    # Its parent has reaped it already; kernels from 6.15 on still tell the holder of a pidfd.
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError as error:
        logger.debug("this kernel does not tell exit codes: %s", error)
        return None
    (mask,) = struct.unpack_from("<Q", info)
    (status,) = struct.unpack_from("<i", info, _EXIT_CODE_OFFSET)
    return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None
