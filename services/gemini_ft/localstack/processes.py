"""Processes that can be found again and ended, however they were re-parented."""

import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from gemini_ft.contracts.errors import ConfigurationError, UnavailableError, WaitTimeoutError

RUN_VARIABLE = "GEMINI_FT_RUN"
NODE_VARIABLE = "GEMINI_FT_NODE"

# The kernel sends the parent-death signal when the *thread* that started the child ends. This one lives
# as long as the interpreter, so a process may be started from a thread that does not.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


@dataclass(frozen=True)
class Marker:
    """What marks the processes of one run, or of one node of it, by their environment."""

    run_id: str
    node: str | None = None

    def environment(self) -> dict[str, str]:
        """The variables that mark a process; children inherit them."""
        node = {} if self.node is None else {NODE_VARIABLE: self.node}
        return {RUN_VARIABLE: self.run_id, **node}

    def __str__(self) -> str:
        return f"run {self.run_id}" if self.node is None else f"node {self.node} of run {self.run_id}"


class ManagedProcess:
    """One process in a session of its own, with its output in a log file.

    With `parent_death_signal` it gets that signal when this process ends in any way, SIGKILL included.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        owner: tuple[int, int] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        parent_death_signal: signal.Signals | None = None,
    ) -> None:
        """`env` is the whole environment (this process's when None); `owner` a (uid, gid) to run as."""
        self.name = name
        self.log_path = log_path
        self._argv = [*die_with_parent(parent_death_signal), *argv]
        self._env = env
        self._cwd = cwd
        self._owner = owner
        self._stop_signal = stop_signal
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Raises UnavailableError before the first start."""
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def start(self, env: Mapping[str, str] | None = None) -> None:
        """Start it, with `env` added to its environment this time.

        Raises UnavailableError if it runs already, OSError if its program cannot be executed.
        """
        if self.running:
            raise UnavailableError(f"{self.name} runs already, as process {self.pid}; stop it first")
        self._process = _spawner.submit(self._spawn, env or {}).result()

    def wait(self, timeout_s: float) -> int:
        """Return its exit status; raises WaitTimeoutError if it has not ended after `timeout_s`."""
        try:
            return self._started().wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise WaitTimeoutError.of(f"{self.name} (process {self.pid}) to end", timeout_s) from None

    def send_signal(self, number: signal.Signals) -> None:
        """Harmless when it has ended."""
        self._started().send_signal(number)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask it to end, and SIGKILL it after `timeout_s`; harmless when it is not running."""
        if not self.running:
            return
        self.send_signal(self._stop_signal)
        try:
            self.wait(timeout_s)
        except WaitTimeoutError:
            self.kill()

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL this one process, not its children; harmless when it is not running."""
        if self.running:
            self.send_signal(signal.SIGKILL)
            self.wait(timeout_s)

    def log_tail(self, num_chars: int = 2000) -> str:
        """The end of its log, for error messages."""
        try:
            return self.log_path.read_text(errors="replace")[-num_chars:]
        except FileNotFoundError:
            return ""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise UnavailableError(f"{self.name} has not been started")
        return self._process

    def _spawn(self, added_env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        uid, gid = self._owner or (None, None)
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._cwd,
                env={**(os.environ if self._env is None else self._env), **added_env},
                user=uid,
                group=gid,
                extra_groups=None if uid is None else [],
                start_new_session=True,
            )
        finally:
            os.close(log)


def die_with_parent(number: signal.Signals | None) -> list[str]:
    """The argv prefix under which a program gets `number` when its parent dies; empty for None.

    Raises ConfigurationError where util-linux's `setpriv` is missing.
    """
    if number is None:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise ConfigurationError(
            "`setpriv` was not found, without which servers would outlive the command that started them; "
            "install util-linux"
        )
    return [setpriv, "--pdeathsig", number.name.removeprefix("SIG")]


def marked_processes(marker: Marker) -> list[psutil.Process]:
    """Every live process that carries `marker` in its environment, with all its descendants.

    Re-parented processes are found as well. The calling process is never among them, nor are processes
    whose environment this user may not read.
    """
    wanted = marker.environment().items()
    children: dict[int, list[psutil.Process]] = {}
    frontier = []
    for process in psutil.process_iter():
        try:
            children.setdefault(process.ppid(), []).append(process)
            if wanted <= process.environ().items():
                frontier.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    found = {os.getpid(): psutil.Process()}
    while frontier:
        process = frontier.pop()
        if process.pid not in found:
            found[process.pid] = process
            frontier.extend(children.get(process.pid, ()))
    return [process for pid, process in found.items() if pid != os.getpid() and _alive(process)]


def kill_marked(marker: Marker, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL every process of `marker` until none is left; returns the pids that were killed.

    Raises WaitTimeoutError if some are still there after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    while alive := marked_processes(marker):
        remaining_s = deadline - time.monotonic()
        if remaining_s < 0:
            pids = ", ".join(str(process.pid) for process in alive)
            raise WaitTimeoutError.of(f"the killed processes {pids} of {marker} to disappear", timeout_s)
        killed.update(process.pid for process in alive)
        kill_processes(alive, remaining_s)
    return sorted(killed)


def kill_processes(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """SIGKILL `processes` and wait until they have ended or `timeout_s` is over.

    A process that has ended meanwhile is left alone, even if its pid has been given to another.
    """
    descriptors = []
    try:
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            descriptors.append(descriptor)
            # Checked after the descriptor is open: from here on it can mean no other process.
            if process.is_running():
                try:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        _wait_ended(descriptors, timeout_s)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_ended(descriptors: Iterable[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
