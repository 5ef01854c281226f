"""Starts a job's launcher on this node: in a session of its own, not tied to the agent's life, never twice.

The launcher inherits a lock that the kernel drops when it ends, whichever way. So an agent that was restarted knows
whether one lives, even if its former life died before it could write the pid down.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gemini_ft.agent.imports_exchange import JobImports
from gemini_ft.agent.launcher.learning import learned_path, reported_path
from gemini_ft.agent.rank_watch import identify
from gemini_ft.agent.records import ProcessIdentity
from gemini_ft.contracts.errors import ConfigurationError, UnavailableError
from gemini_ft.contracts.messages import JobSpec

__all__ = ["LauncherStarter"]

_MARKERS = ("GEMINI_FT_RUN", "GEMINI_FT_NODE")

logger = logging.getLogger(__name__)


class LauncherStarter:
    """Starts launchers that connect to the agent at `socket_path`."""

    def __init__(self, state_dir: Path, log_dir: Path, socket_path: Path, environ: Mapping[str, str]) -> None:
        self._state_dir = state_dir
        self._log_dir = log_dir
        self._socket_path = socket_path
        self._environ = environ
        self._children: list[subprocess.Popen[bytes]] = []

    def log_path(self, job_id: str) -> Path:
        """Where the launcher's own output goes."""
        return self._log_dir / job_id / "launcher.log"

    def start(self, job_id: str, spec: JobSpec) -> ProcessIdentity | None:
        """Start a launcher and return it; None if one of this job lives already.

        Raises:
            ConfigurationError: the job's command or working directory cannot be used on this node.
            UnavailableError: the system refused to start a process.
        """
        argv = self._argv(job_id, spec)
        if spec.working_directory and not Path(spec.working_directory).is_dir():
            raise ConfigurationError(
                f"job {job_id} is to run in {spec.working_directory}, which is no folder on this node"
            )
        script = Path(spec.working_directory, spec.command[0])
        if spec.command[0] != "-m" and not script.is_file():
            raise ConfigurationError(f"job {job_id} is to run {script}, which is no file on this node")
        try:
            lock = os.open(self._lock_path(job_id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return identify(self._spawn(job_id, argv, spec, lock))
            finally:
                # The launcher's copy keeps the lock.
                os.close(lock)
        except BlockingIOError:
            return None
        except OSError as error:
            raise UnavailableError(f"the launcher of job {job_id} cannot be started: {error}") from error

    def reap(self) -> None:
        """Take note of launchers that have ended."""
        self._children = [child for child in self._children if child.poll() is None]

    def imports(self, job_id: str, spec: JobSpec) -> JobImports | None:
        """Return where the job's launcher keeps and takes learned imports; None for a job without a command."""
        is_module = spec.command[:1] == ("-m",)
        command = spec.command[1:] if is_module else spec.command
        if not command:
            return None
        folder = self._state_dir / "launcher"
        target = command[0] if is_module else os.path.abspath(os.path.join(spec.working_directory, command[0]))
        return JobImports(job_id, learned_path(folder, target), reported_path(folder, job_id, str(self._socket_path)))

    def forget(self, job_id: str) -> None:
        """The job is closed: remove its lock."""
        self._lock_path(job_id).unlink(missing_ok=True)

    def _lock_path(self, job_id: str) -> Path:
        return self._state_dir / f"launcher-{job_id}.lock"

    def _spawn(self, job_id: str, argv: list[str], spec: JobSpec, lock: int) -> int:
        log_path = self.log_path(job_id)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        markers = {name: self._environ[name] for name in _MARKERS if name in self._environ}
        own = {"GEMINI_FT_AGENT_SOCKET": str(self._socket_path), "GEMINI_FT_JOB": job_id}
        with log_path.open("ab") as log:
            child = subprocess.Popen(
                argv,
                cwd=spec.working_directory or None,
                env={**self._environ, **spec.environment, **markers, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,
            )
        self._children.append(child)
        logger.info("started launcher %d of job %s, its output goes to %s", child.pid, job_id, log_path)
        return child.pid

    def _argv(self, job_id: str, spec: JobSpec) -> list[str]:
        is_module = spec.command[:1] == ("-m",)
        command = spec.command[1:] if is_module else spec.command
        if not command:
            raise ConfigurationError(f"job {job_id} has no command; give a script, or -m and a module")
        return [
            sys.executable,
            "-m",
            "gemini_ft.agent.launcher",
            "--agent-socket",
            str(self._socket_path),
            "--job",
            job_id,
            "--nproc-per-node",
            str(spec.num_ranks_per_node),
            "--state-dir",
            str(self._state_dir / "launcher"),
            "--log-dir",
            str(self._log_dir / job_id),
            *(["-m"] if is_module else []),
            "--",
            *command,
        ]
