"""Generated secrets in files that only their owner can read."""

import os
import secrets
from pathlib import Path


def read_or_create_secret(path: Path) -> str:
    """The secret in `path`, generated when there is none; the file is complete or absent, mode 0600."""
    try:
        return path.read_text()
    except FileNotFoundError:
        pass
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(24))
    draft.replace(path)
    return path.read_text()
