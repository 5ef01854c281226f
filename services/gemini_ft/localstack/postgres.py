"""A private Postgres, run as root or not."""

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

from gemini_ft.contracts.errors import ConfigurationError, UnavailableError
from gemini_ft.localstack._binaries import find_postgres_bin
from gemini_ft.localstack._ports import LOOPBACK, ReservedPort
from gemini_ft.localstack.processes import ManagedProcess, die_with_parent, kill_processes
from gemini_ft.localstack.waiting import wait_until
from gemini_ft.security.secret_files import read_or_create_secret

_START_TIMEOUT_S = 30.0
_INITDB_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 10.0
_USER_NAMESPACE = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
_READY_LINE = 7
_SEGMENT_LINE = 6


class PostgresServer:
    """A LocalServer that speaks Postgres, with a password (SCRAM) and TCP on loopback only.

    Postgres refuses to be root. Started by root it runs as the user `postgres` or `nobody` if that one can
    reach binaries and data, else as an ordinary user inside a user namespace; no folder is opened and no
    user is made.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        die_with_parent: bool = True,
    ) -> None:
        """`settings` are server parameters, as in postgresql.conf."""
        self._directory = directory.absolute()
        self._port = port
        self._settings = dict(settings or {})
        self._env = env
        self._die_with_parent = die_with_parent
        self._bin = find_postgres_bin()
        self._reserved: ReservedPort | None = None
        self._process: ManagedProcess | None = None

    @property
    def url(self) -> str:
        """With user and password. Raises UnavailableError before the first start."""
        if not self._port:
            raise UnavailableError("postgres has no port yet; start it first")
        return f"postgresql://postgres:{self.password}@{LOOPBACK}:{self._port}/postgres"

    @property
    def sqlalchemy_url(self) -> str:
        return self.url.replace("postgresql://", "postgresql+asyncpg://", 1)

    @property
    def password(self) -> str:
        return read_or_create_secret(self._directory / "password")

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def start(self) -> None:
        """Return when clients can connect; the first start creates the database cluster."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        owner, prefix = self._identity()
        if not self._data.exists():
            self._create_cluster(owner, prefix)
        if self._reserved is None:
            self._reserved = ReservedPort(self._port)
            self._port = self._reserved.number
        self._process = ManagedProcess(
            [*prefix, *self._dying(), str(self._bin / "postgres"), "-D", str(self._data), *self._options()],
            name="postgres",
            log_path=self._directory / "postgres.log",
            env=self._env,
            cwd=Path("/"),
            owner=owner,
            stop_signal=signal.SIGINT,
        )
        self._process.start()
        try:
            wait_until(self._is_ready, "postgres to accept connections", _START_TIMEOUT_S)
        except Exception:
            self.stop()
            raise

    def stop(self) -> None:
        """End it cleanly (clients are disconnected) and leave nothing behind but its directory."""
        if self.running:
            self._started().stop()
        if self._process is not None:
            self._remove_leftover_segment()
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None

    def kill(self) -> None:
        """SIGKILL the postmaster and all its backends; `start` brings it back on the same port."""
        if not self.running:
            return
        # A stopped postmaster forks no more, so that the list of its children is complete.
        self._started().send_signal(signal.SIGSTOP)
        children = psutil.Process(self.pid).children(recursive=True)
        self._started().kill(_KILL_TIMEOUT_S)
        kill_processes(children, _KILL_TIMEOUT_S)

    def __enter__(self) -> "PostgresServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    def _identity(self) -> tuple[tuple[int, int] | None, list[str]]:
        """Whom Postgres runs as: (uid, gid) to drop to, if any, and the argv prefix that is needed."""
        if os.geteuid() != 0:
            return None, []
        if self._data.exists():
            status = self._data.stat()
            return (None, _USER_NAMESPACE) if status.st_uid == 0 else ((status.st_uid, status.st_gid), [])
        for name in ("postgres", "nobody"):
            try:
                user = pwd.getpwnam(name)
            except KeyError:
                continue
            needed = (self._bin / "postgres", self._directory)
            if all(_reachable(path, user.pw_uid, user.pw_gid) for path in needed):
                return (user.pw_uid, user.pw_gid), []
        tried = subprocess.run([*_USER_NAMESPACE, "true"], capture_output=True, text=True)
        if tried.returncode:
            raise ConfigurationError(
                f"Postgres does not run as root, neither `postgres` nor `nobody` can reach both {self._bin} "
                f"and {self._directory}, and a user namespace was refused ({tried.stderr.strip()}); "
                "run the command as an ordinary user"
            )
        return None, _USER_NAMESPACE

    def _started(self) -> ManagedProcess:
        if self._process is None:
            raise UnavailableError("postgres has not been started")
        return self._process

    def _dying(self) -> list[str]:
        # Inside the user namespace: entering one clears the parent-death signal.
        return die_with_parent(signal.SIGINT if self._die_with_parent else None)

    def _options(self) -> list[str]:
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self._port),
            "unix_socket_directories": "",
            "log_destination": "stderr",
            # Not /dev/shm, where a killed server would leave its segments.
            "dynamic_shared_memory_type": "mmap",
            **self._settings,
        }
        return [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]

    def _create_cluster(self, owner: tuple[int, int] | None, prefix: list[str]) -> None:
        """Create the cluster beside its final place, so that an interrupted start leaves no half of one."""
        draft = self._directory / "data.draft"
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(mode=0o700)
        read_or_create_secret(self._directory / "password")
        if owner is not None:
            for path in (draft, self._directory / "password"):
                os.chown(path, *owner)
        initdb = [
            *prefix,
            str(self._bin / "initdb"),
            f"--pgdata={draft}",
            "--username=postgres",
            f"--pwfile={self._directory / 'password'}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--set=dynamic_shared_memory_type=mmap",
            "--no-instructions",
            "--no-sync",
        ]
        uid, gid = owner or (None, None)
        done = subprocess.run(
            initdb,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd="/",
            env=self._env,
            user=uid,
            group=gid,
            extra_groups=None if owner is None else [],
            timeout=_INITDB_TIMEOUT_S,
        )
        if done.returncode:
            raise UnavailableError(f"initdb could not create a database in {draft}: {done.stderr[-2000:].strip()}")
        draft.rename(self._data)

    def _is_ready(self) -> bool:
        process = self._started()
        if not process.running:
            raise UnavailableError(
                f"postgres ended with status {process.returncode} instead of starting; "
                f"its log says: {process.log_tail()}"
            )
        lines = self._pid_file_lines()
        # A killed server leaves a file that says "ready": it counts only with the pid of this one.
        return len(lines) > _READY_LINE and lines[0] == str(process.pid) and lines[_READY_LINE] == "ready"

    def _pid_file_lines(self) -> list[str]:
        try:
            return [line.strip() for line in (self._data / "postmaster.pid").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def _remove_leftover_segment(self) -> None:
        """Remove the small System V segment by which Postgres locks its data, if a kill left it there.

        Its key and id stand in postmaster.pid, which a clean end removes.
        """
        lines = self._pid_file_lines()
        if len(lines) <= _SEGMENT_LINE:
            return
        key, segment = (int(word) for word in lines[_SEGMENT_LINE].split())
        libc = ctypes.CDLL(None, use_errno=True)
        # The id may have been given to somebody else since; the pair of key and id was not.
        if libc.shmget(key, 0, 0) == segment:
            libc.shmctl(segment, 0, None)  # IPC_RMID


def _reachable(path: Path, uid: int, gid: int) -> bool:
    for step in (path, *path.parents):
        status = step.stat()
        bit = 0o100 if status.st_uid == uid else 0o010 if status.st_gid == gid else 0o001
        if not status.st_mode & bit:
            return False
    return True
