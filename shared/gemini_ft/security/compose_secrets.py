"""`python -m gemini_ft.security.compose_secrets DIRECTORY`: the secrets of docker-compose.yml, a file each.

What is there already is kept. Prints the line of .env that lets containers run as the owner of the files. Nothing but
Python's own library is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gemini_ft.contracts.errors import GeminiError
from gemini_ft.security.nats_config import role_authorization
from gemini_ft.security.secret_files import read_or_create_secret, write_secret

__all__ = ["main", "write_secrets"]

_GENERATED = ("api-token", "cookie-secret", "grafana-password", "postgres-password")
_NATS_STORE_BYTES = 1 << 30
_INSTEAD_OF_ROOT = (10001, 10001)


def write_secrets(directory: Path) -> None:
    """Generate what is missing in `directory`, readable by its owner only.

    Raises:
        ConfigurationError: credentials of NATS that are there already have another form.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = {name: read_or_create_secret(directory / name) for name in _GENERATED}
    nats = {
        "listen": "0.0.0.0:4222",
        "http": "127.0.0.1:8222",
        "server_name": "gemini-ft",
        "jetstream": {"store_dir": "/data", "max_file_store": _NATS_STORE_BYTES},
        "authorization": role_authorization(directory),
    }
    write_secret(directory / "nats.conf", json.dumps(nats, indent=1))
    login = f"gemini_ft:{made['postgres-password'].strip()}"
    write_secret(directory / "database-url", f"postgresql://{login}@postgres:5432/gemini_ft\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files and print GEMINI_FT_USER; 2 means that it was refused, in one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m gemini_ft.security.compose_secrets", description=__doc__)
    parser.add_argument(
        "directory", type=Path, metavar="DIRECTORY", help="deploy/secrets, as docker-compose.yml has it"
    )
    directory: Path = parser.parse_args(argv).directory
    try:
        write_secrets(directory)
    except GeminiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        uid, gid = _INSTEAD_OF_ROOT
        for path in (directory, *directory.iterdir()):
            os.chown(path, uid, gid)
    print(f"GEMINI_FT_USER={uid}:{gid}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
