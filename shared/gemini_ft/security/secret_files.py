"""Secrets in files that nobody but their owner reads."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["read_or_create_secret", "read_secret", "require_private", "write_secret"]


def require_private(path: Path, option: str) -> None:
    """See that others cannot read a file. As with PostgreSQL's keys, the group may if root owns the file.

    Raises:
        ConfigurationError: they can, or the file is not there; the sentence names `option`.
    """
    with open(_open(path, option), "rb") as file:
        _require_private(file.fileno(), path, option)


def read_secret(path: Path, option: str) -> str:
    """Return the text of a private file, without white space around it.

    Raises:
        ConfigurationError: others can read it, or it is empty, no text, or cannot be read; the sentence names `option`.
    """
    with open(_open(path, option), "rb") as file:
        _require_private(file.fileno(), path, option)
        try:
            secret = file.read().decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{option}: {path} cannot be read: {error}") from error
    if not secret:
        raise ConfigurationError(f"{option}: {path} is empty")
    return secret


def write_secret(path: Path, text: str) -> Path:
    """Write a file with mode 0600, complete or not at all, and return its path."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
    return path


def read_or_create_secret(path: Path) -> str:
    """Return the secret in `path`; generate it when there is none."""
    if not path.exists():
        write_secret(path, secrets.token_urlsafe(24))
    return path.read_text()


def _open(path: Path, option: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(f"{option}: {path} cannot be read: {error.strerror}") from error


def _require_private(descriptor: int, path: Path, option: str) -> None:
    status = os.fstat(descriptor)
    of_root = status.st_uid == 0 and os.geteuid() != 0
    if stat.S_ISREG(status.st_mode) and status.st_mode & (0o037 if of_root else 0o077):
        raise ConfigurationError(
            f"{option}: others can read the secret in {path} (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run chmod 600 {path}"
        )
