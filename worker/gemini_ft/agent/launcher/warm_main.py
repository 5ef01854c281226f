"""The warm server's process: it imports once, then forks a rank per order.

Lines of JSON on one socket. In: the list of modules, then orders and kills. Out: readiness, starts, exits.
Own code rather than `multiprocessing.forkserver`, because that one

* is a module-level singleton: a second server beside the first means to swap private globals under its lock;
* hands its children pickled objects and leaves `multiprocessing` in them in the state of a child, while a rank should
  find the module as fresh as `python script.py` does (scripts start their own data loader workers);
* dies of a preload that raises anything but ImportError, and does not tell what it imported or which threads that left.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini_ft.agent.launcher.entry import RankOrder, become_rank, die_with_parent, run_target

__all__ = ["LineSocket", "main"]


class LineSocket:
    """Lines of JSON over a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; waits while the peer's buffer is full."""
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that one read completes, or None at the end of the stream."""
        data = self.sock.recv(1 << 16)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            names.append(comm.read().strip())
    return names


def _cuda_is_bad_in_fork() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork())


def _unfit_reason() -> str | None:
    """Say why ranks must not be forked from this process, or None.

    Asked after a throw-away fork: libraries that know about forks (OpenBLAS) then have put their threads away.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(int(_cuda_is_bad_in_fork()))
    if os.waitpid(pid, 0)[1] != 0:
        return "an import initialized CUDA"
    threads = _thread_names()
    if len(threads) > 1:
        return f"imports started {len(threads) - 1} threads ({', '.join(sorted(threads))})"
    return None


@contextmanager
def _cuda_asked_through_nvml() -> Iterator[None]:
    """Keep `torch.cuda.is_available()` in an imported module from initializing CUDA."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _preload(names: list[str]) -> dict[str, str]:
    """Import what can be imported; return the reasons of the rest."""
    skipped = {}
    with _cuda_asked_through_nvml():
        for name in names:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:
                skipped[name] = f"{type(error).__name__}: {error}"
    return skipped


class _Server:
    """Forks ranks until its socket ends, and as long as ranks live once it is told to retire."""

    def __init__(self, line: LineSocket) -> None:
        self._line = line
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}
        self._retired = False

    def serve(self) -> RankOrder | None:
        """Return an order in the process that is to become its rank, and None in the server at its end."""
        self._selector.register(self._line.sock, selectors.EVENT_READ)
        while self._pids or not self._retired:
            for key, _ in self._selector.select():
                if key.fd in self._pids:
                    self._reap(key.fd)
                    continue
                messages = self._line.receive()
                if messages is None:
                    return None
                for message in messages:
                    order = self._handle(message)
                    if order is not None:
                        return order
        return None

    def _handle(self, message: dict[str, Any]) -> RankOrder | None:
        if "start" in message:
            return self._fork(message["start"])
        if "kill" in message:
            if message["kill"] in self._pids.values():
                _kill_group(message["kill"])
        elif "retire" in message:
            self._retired = True
        return None

    def _fork(self, order: str) -> RankOrder | None:
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            self._line.sock.close()
            for pidfd in self._pids:
                os.close(pidfd)
            return RankOrder.from_json(order)
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._line.send({"started": pid})
        return None

    def _reap(self, pidfd: int) -> None:
        pid = self._pids.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        # Before the wait: the dead rank still holds its pid, so the group cannot be a stranger's.
        _kill_group(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._line.send({"exited": pid, "code": code})


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        # It was forked this instant and leads no group yet.
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Serve the launcher on the other end of the socket whose descriptor and owner's pid are the arguments."""
    control_fd, launcher_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not sys.flags.safe_path:
        # `-m` put the working directory there; nothing of the user's may be imported before a rank runs it.
        del sys.path[0]
    # The heap of imports is never garbage, and a collection in a child would copy its pages.
    gc.disable()
    line = LineSocket(socket.socket(fileno=control_fd))
    first = None
    while not first:
        first = line.receive()
        if first is None:
            return
    names: list[str] = first[0]["preload"]
    skipped = _preload(names)
    unfit = _unfit_reason()
    gc.freeze()
    line.send({"ready": True, "unfit": unfit, "skipped": skipped, "imported": list(sys.modules)})
    server_pid = os.getpid()
    order = _Server(line).serve()
    if order is not None:
        del line
        become_rank(order, server_pid)
        run_target(order)


if __name__ == "__main__":
    main()
