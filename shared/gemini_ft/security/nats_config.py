"""`python -m gemini_ft.security.nats_config DIRECTORY`: configuration of a NATS server with one user a role.

Writes nats.conf and, for each role, a file with its credentials; credentials that are there already are kept.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemini_ft.contracts.errors import ConfigurationError, GeminiError
from gemini_ft.contracts.permissions import NatsRole, authorization
from gemini_ft.security.exposure import require_encryption
from gemini_ft.security.secret_files import read_secret, write_secret

__all__ = ["credentials_file", "main", "role_authorization", "tls_block"]


def credentials_file(directory: Path, role: NatsRole) -> Path:
    """Where the credentials of a role are, for `--nats-credentials-file`."""
    return directory / f"nats-{role}"


def role_authorization(directory: Path) -> dict[str, Any]:
    """Generate the credentials that are not in `directory` yet and return the `authorization` of all roles.

    Raises:
        ConfigurationError: a file that is there holds no credentials of its role.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    passwords = {}
    for role in NatsRole:
        path = credentials_file(directory, role)
        if not path.exists():
            write_secret(path, f"{role}:{secrets.token_urlsafe(24)}\n")
        user, _, passwords[role] = read_secret(path, str(path)).partition(":")
        if user != role or not passwords[role]:
            raise ConfigurationError(f"{path} does not hold {role}:PASSWORD; remove it, and it is made anew")
    return authorization(passwords)


def tls_block(certificate_file: Path, key_file: Path) -> dict[str, Any]:
    """Return the `tls` of a server that begins with the handshake, so that nobody can talk a client out of it."""
    return {"cert_file": str(certificate_file), "key_file": str(key_file), "handshake_first": True}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; 2 means that it was refused, in one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m gemini_ft.security.nats_config", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="where the files go")
    parser.add_argument("--listen", default="127.0.0.1:4222", metavar="HOST:PORT", help="default: 127.0.0.1:4222")
    parser.add_argument("--store-dir", type=Path, required=True, metavar="DIR", help="where the server keeps streams")
    parser.add_argument("--tls-certificate-file", type=Path, metavar="FILE", help="as the server sees it")
    parser.add_argument("--tls-key-file", type=Path, metavar="FILE", help="as the server sees it")
    parser.add_argument(
        "--insecure-plaintext", action="store_true", help="let secrets cross a trusted network without TLS"
    )
    given = parser.parse_args(argv)
    try:
        _write(given)
    except GeminiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(given: argparse.Namespace) -> None:
    certificate_file, key_file = given.tls_certificate_file, given.tls_key_file
    if (certificate_file is None) != (key_file is None):
        raise ConfigurationError("give both --tls-certificate-file and --tls-key-file, or none of them")
    host, _, port = given.listen.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(f"--listen is {given.listen!r}; give HOST:PORT, for instance 127.0.0.1:4222")
    require_encryption(
        f"NATS on {given.listen}",
        host.strip("[]"),
        encrypted=certificate_file is not None,
        insecure_plaintext=given.insecure_plaintext,
        remedy="give --tls-certificate-file and --tls-key-file",
    )
    config: dict[str, Any] = {
        "listen": given.listen,
        "server_name": "gemini-ft",
        "jetstream": {"store_dir": str(given.store_dir)},
        "authorization": role_authorization(given.directory),
    }
    if certificate_file is not None:
        config["tls"] = tls_block(certificate_file, key_file)
    write_secret(given.directory / "nats.conf", json.dumps(config, indent=1))


if __name__ == "__main__":
    sys.exit(main())
