"""Warm starts: ranks are forked from a server that has imported what they will need, and that learns what that is.

`WarmServer` is one server process, seen from the launcher; `WarmStarter` chooses between servers. A server with more
imports is prepared beside the one in use; new ranks come from it once it is ready and fit, and the old one
ends with its last rank.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from gemini_ft.agent.launcher.entry import RankOrder
from gemini_ft.agent.launcher.learning import read_names, write_names
from gemini_ft.agent.launcher.warm_main import LineSocket
from gemini_ft.contracts.errors import ProtocolError, UnavailableError, WaitTimeoutError

__all__ = ["BASE_PRELOAD", "WarmRank", "WarmServer", "WarmStarter"]

BASE_PRELOAD = ("numpy", "torch", "torch.distributed", "gemini_ft.worker")

_READY_TIMEOUT = timedelta(seconds=180)
_START_TIMEOUT = timedelta(seconds=30)

logger = logging.getLogger(__name__)


class WarmServer:
    """One warm server process; it and its ranks die with this process, whichever way it dies.

    Must be made in the main thread: the kernel ties a child's parent-death signal to the thread that made it.
    """

    def __init__(self, preload: Sequence[str], log_path: Path) -> None:
        self.preload = tuple(preload)
        self.skipped: dict[str, str] = {}
        self.imported: frozenset[str] = frozenset()
        self.unfit: str | None = None
        self.is_ready = False
        self.is_alive = True
        self._ranks: dict[int, WarmRank] = {}
        self._started: list[WarmRank] = []
        ours, theirs = socket.socketpair()
        with theirs, log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gemini_ft.agent.launcher.warm_main",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._line = LineSocket(ours)
        self._send({"preload": list(self.preload)})

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def fileno(self) -> int:
        """The descriptor that becomes readable when there is something to `poll`."""
        return self._line.sock.fileno()

    def wait_ready(self, timeout: timedelta = _READY_TIMEOUT) -> None:
        """Wait until the imports are done.

        Raises:
            WaitTimeoutError, UnavailableError: it did not become ready; its log says why.
        """
        self._wait(lambda: self.is_ready, f"warm server {self.pid} to import {len(self.preload)} modules", timeout)

    def start(self, order: RankOrder) -> WarmRank:
        """Fork a rank.

        Raises:
            WaitTimeoutError, UnavailableError: the server did not fork it.
        """
        self._started.clear()
        self._send({"start": order.to_json()})
        self._wait(lambda: bool(self._started), f"warm server {self.pid} to fork a rank", _START_TIMEOUT)
        return self._started.pop()

    def poll(self, wait_s: float = 0) -> None:
        """Take what the server has sent, waiting at most `wait_s` for the first of it."""
        while self.is_alive and select.select([self._line.sock], [], [], wait_s)[0]:
            wait_s = 0
            try:
                messages = self._line.receive()
            except ConnectionResetError:
                messages = None
            if messages is None:
                self._lost()
            else:
                for message in messages:
                    self._take(message)

    def kill_rank(self, pid: int) -> None:
        """SIGKILL a rank's group. The server does it, since only a parent can be sure whose a pid is."""
        self._send({"kill": pid})

    def retire(self) -> None:
        """Let the server end with its last rank."""
        self._send({"retire": True})

    def close(self) -> None:
        """End the server and its ranks at once."""
        if self.is_alive:
            self._process.kill()
            self._lost()

    def _send(self, message: dict[str, Any]) -> None:
        if self.is_alive:
            try:
                self._line.send(message)
            except (BrokenPipeError, ConnectionResetError):
                self._lost()

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.is_ready, self.unfit, self.skipped = True, message["unfit"], message["skipped"]
            self.imported = frozenset(message["imported"])
        elif "started" in message:
            rank = WarmRank(self, message["started"])
            self._ranks[rank.pid] = rank
            self._started.append(rank)
        elif "exited" in message:
            self._ranks.pop(message["exited"]).code = message["code"]

    def _lost(self) -> None:
        self.is_alive = False
        self._line.sock.close()
        self._process.wait()
        # The kernel has killed them with their parent, and nobody else can tell their exit codes.
        for rank in self._ranks.values():
            rank.code = -signal.SIGKILL
        self._ranks.clear()

    def _wait(self, is_done: Callable[[], bool], what: str, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not is_done():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise WaitTimeoutError.of(what, timeout)
            self.poll(remaining_s)
            if not self.is_alive and not is_done():
                raise UnavailableError(
                    f"warm server {self.pid} ended with code {self._process.returncode}; its log says why"
                )


class WarmRank:
    """A rank forked by a warm server."""

    def __init__(self, server: WarmServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """See RankProcess."""
        if self.code is None:
            self._server.poll()
        return self.code

    def kill(self) -> None:
        """See RankProcess."""
        if self.code is None:
            self._server.kill_rank(self.pid)


class WarmStarter:
    """See RankStarter. Holds the server in use, the one being prepared, and those whose last ranks still live.

    Args:
        log_dir: where the servers' own output goes.
        learned: file of learned names, read now and rewritten when more is learned; None to learn nothing.
        reported: file in which a rank reports its imports; deleted once read.
        base: what is preloaded before anything is learned.
    """

    def __init__(
        self,
        log_dir: Path,
        learned: Path | None = None,
        reported: Path | None = None,
        base: Sequence[str] = BASE_PRELOAD,
    ) -> None:
        self._log_path = log_dir / "warm-server.log"
        self._learned = learned
        self._reported = reported
        self._was_told = False
        names = [] if learned is None else _read_or_warn(learned)
        # Each is tried when the one before it proves unfit; an empty list still spares the interpreter's start.
        self._base = tuple(base)
        self._fallbacks: list[tuple[str, ...]] = [self._base, ()]
        if names:
            self._fallbacks.insert(0, tuple(dict.fromkeys([*base, *names])))
        self._current = self._serve(self._fallbacks.pop(0))
        self._next: WarmServer | None = None
        self._retired: list[WarmServer] = []
        self._refused: set[tuple[str, ...]] = set()

    @property
    def preload(self) -> tuple[str, ...]:
        """What the next rank will find imported."""
        return self._current.preload

    def start(self, order: RankOrder) -> WarmRank:
        """See RankStarter. A server that is unfit or dead is replaced first."""
        self.poll()
        while (reason := self._why_unusable()) is not None:
            preload = self._current.preload
            self._current.close()
            if self._current.unfit:
                self._refuse(preload)
                if not self._fallbacks:
                    raise UnavailableError(f"no warm server can be started: {reason}; use --start-method cold")
                preload = self._fallbacks.pop(0)
            logger.warning("%s; starting one with %d modules", reason, len(preload))
            self._current = self._serve(preload)
        return self._current.start(order)

    def poll(self) -> None:
        """See RankStarter."""
        for server in [self._current, *self._retired]:
            server.poll()
        self._retired = [server for server in self._retired if server.is_alive]
        if self._reported is not None:
            names = _read_or_warn(self._reported)
            if names:
                self._reported.unlink()
                self._was_told = True
                self.learn(names)
        if self._next is not None:
            self._next.poll()
            self._switch(self._next)

    def wait(self, timeout_s: float) -> None:
        """See RankStarter."""
        select.select([server for server in [self._current, *self._retired] if server.is_alive], [], [], timeout_s)

    @property
    def wants_report(self) -> bool:
        """See RankStarter. Once in this launcher's life is enough: a script imports the same in every generation."""
        return self._reported is not None and not self._was_told

    def learn(self, names: Sequence[str]) -> None:
        """Prepare a server that has imported `names` too, unless the one in use or in preparation has."""
        newest = self._next or self._current
        missing = [name for name in names if name not in newest.imported and name not in newest.preload]
        wanted = (*newest.preload, *missing)
        if not missing or wanted in self._refused:
            return
        logger.info("preparing a warm server with %d more modules", len(missing))
        if self._next is not None:
            self._next.close()
        self._next = self._serve(wanted)

    def close(self) -> None:
        """See RankStarter."""
        for server in [self._current, *self._retired, *([self._next] if self._next else [])]:
            server.close()

    def _serve(self, preload: Sequence[str]) -> WarmServer:
        return WarmServer(preload, self._log_path)

    def _why_unusable(self) -> str | None:
        server = self._current
        try:
            server.wait_ready()
        except UnavailableError as error:
            if not server.is_ready:
                # An import that ends the process is as unfit as one that starts threads.
                server.unfit = str(error)
        if server.unfit:
            return f"warm server with {len(server.preload)} modules is unfit: {server.unfit}"
        return None if server.is_alive else f"warm server {server.pid} has ended"

    def _refuse(self, preload: tuple[str, ...]) -> None:
        self._refused.add(preload)
        if self._learned is not None and preload != self._base:
            self._learned.unlink(missing_ok=True)

    def _switch(self, ready: WarmServer) -> None:
        if ready.is_alive and not ready.is_ready:
            return
        self._next = None
        if not ready.is_alive or ready.unfit:
            logger.warning("learned warm server is unfit: %s; staying with the old one", ready.unfit or "it ended")
            ready.close()
            self._refuse(ready.preload)
            return
        logger.info("warm server %d with %d modules takes over", ready.pid, len(ready.preload))
        self._current.retire()
        self._retired.append(self._current)
        self._fallbacks.insert(0, self._current.preload)
        self._current = ready
        if self._learned is not None:
            write_names(self._learned, list(ready.preload))


def _read_or_warn(path: Path) -> list[str]:
    try:
        return read_names(path) or []
    except ProtocolError as error:
        logger.warning("%s", error)
        return []
