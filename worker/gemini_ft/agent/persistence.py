"""The agent's state folder: its lock, `node.json` and `job.json`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pydantic import ValidationError

from gemini_ft.agent.records import JobRecord, NodeRecord
from gemini_ft.contracts.errors import ConfigurationError, ConflictError
from gemini_ft.contracts.frames import Message

__all__ = ["StateFolder"]

R = TypeVar("R", bound=Message)


class StateFolder:
    """Owned by one agent at a time. What `save_*` has written survives a crash of the machine right after it.

    Raises:
        ConflictError: another agent runs in this folder.
        ConfigurationError: the folder cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"the state folder {self.path} cannot be used: {error.strerror}; give another one with --state-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._lock, 32, 0).decode().strip() or "of unknown pid"
            os.close(self._lock)
            raise ConflictError(
                f"agent {owner} already runs in the state folder {self.path}; give each agent a --state-dir of its own"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def load_node(self) -> NodeRecord:
        """Return `node.json`, or an empty record; raises ConfigurationError if it is damaged."""
        return self._load("node.json", NodeRecord) or NodeRecord()

    def save_node(self, record: NodeRecord) -> None:
        """Replace `node.json`."""
        self._save("node.json", record)

    def load_job(self) -> JobRecord | None:
        """Return `job.json`, or None without a job; raises ConfigurationError if it is damaged."""
        return self._load("job.json", JobRecord)

    def save_job(self, record: JobRecord) -> None:
        """Replace `job.json`."""
        self._save("job.json", record)

    def remove_job(self) -> None:
        """Remove `job.json`, if there is one."""
        (self.path / "job.json").unlink(missing_ok=True)
        self._sync_folder()

    def close(self) -> None:
        """Let another agent have the folder."""
        os.close(self._lock)

    def __enter__(self) -> StateFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, name: str, kind: type[R]) -> R | None:
        path = self.path / name
        try:
            return kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ConfigurationError(
                f"{path} is damaged or of another release ({error.error_count()} errors); "
                "remove it to let this node start anew"
            ) from error

    def _save(self, name: str, record: Message) -> None:
        temporary = self.path / f"{name}.new"
        # Opened with its mode, since job.json holds the key of the job.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(record.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / name)
        self._sync_folder()

    def _sync_folder(self) -> None:
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
