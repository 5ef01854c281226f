"""How a process of ours gets into NATS."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.permissions import NatsRole, inbox_prefix
from gemini_ft.security.exposure import is_loopback, require_encryption
from gemini_ft.security.secret_files import read_secret
from gemini_ft.security.tls import client_context

__all__ = ["NatsAccess", "add_nats_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAccess:
    """Where NATS is and what it is shown; raises ConfigurationError for what cannot be or would not be safe."""

    url: str
    """nats://HOST:PORT, or tls://HOST:PORT of a server that begins with the handshake (`handshake_first`)."""
    credentials_file: Path | None = None
    """Holds USER:PASSWORD of a role."""
    token_file: Path | None = None
    """Holds the one token of a server without roles."""
    ca_file: Path | None = None
    """Who must have signed the server's certificate; by default anyone whom the system trusts."""
    insecure_plaintext: bool = False
    """Whether secrets may go to another machine without TLS."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise ConfigurationError(f"--nats is {self.url!r}; give nats://HOST:PORT or tls://HOST:PORT")
        if parts.username is not None:
            raise ConfigurationError("--nats holds credentials; put USER:PASSWORD into a --nats-credentials-file")
        if self.credentials_file is not None and self.token_file is not None:
            raise ConfigurationError("give --nats-credentials-file or --nats-token-file, not both")
        if self.ca_file is not None and parts.scheme != "tls":
            raise ConfigurationError(f"--nats-ca-file is for tls://HOST:PORT, but --nats is {self.url}")
        if not is_loopback(parts.hostname) and not self.has_secret:
            raise ConfigurationError(
                f"NATS at {self.url} is beyond this machine and would be used without credentials; "
                "give --nats-credentials-file"
            )
        require_encryption(
            f"the connection to NATS at {self.url}",
            parts.hostname,
            encrypted=parts.scheme == "tls",
            insecure_plaintext=self.insecure_plaintext,
            remedy="use tls://HOST:PORT",
        )

    @classmethod
    def of(cls, given: argparse.Namespace) -> NatsAccess:
        """Take the options of `add_nats_options`; raises ConfigurationError as the class does."""
        return cls(
            url=given.nats,
            credentials_file=given.nats_credentials_file,
            token_file=given.nats_token_file,
            ca_file=given.nats_ca_file,
            insecure_plaintext=given.insecure_plaintext,
        )

    @property
    def has_secret(self) -> bool:
        """Whether NATS is shown credentials or a token."""
        return self.credentials_file is not None or self.token_file is not None

    def options(self, role: NatsRole) -> dict[str, Any]:
        """Read the files and return keyword arguments for `connect` of the NATS client.

        Raises:
            ConfigurationError: a file cannot be read, others can read a secret, or it has another form.
        """
        options: dict[str, Any] = {"inbox_prefix": inbox_prefix(role)}
        if self.url.startswith("tls:"):
            # First, or whoever sits in between could say that no TLS is wanted and be sent the password.
            options |= {"tls": client_context(self.ca_file, "--nats-ca-file"), "tls_handshake_first": True}
        if self.token_file is not None:
            options["token"] = read_secret(self.token_file, "--nats-token-file")
        if self.credentials_file is not None:
            user, separator, password = read_secret(self.credentials_file, "--nats-credentials-file").partition(":")
            if not user or not separator or not password:
                raise ConfigurationError(
                    f"--nats-credentials-file: {self.credentials_file} does not hold USER:PASSWORD in one line"
                )
            options |= {"user": user, "password": password}
        return options


def add_nats_options(parser: argparse.ArgumentParser) -> None:
    """Add `--nats`, its files, and `--insecure-plaintext`, which a service may heed for what it listens on as well."""
    parser.add_argument("--nats", required=True, metavar="URL", help="nats://HOST:PORT or tls://HOST:PORT")
    parser.add_argument("--nats-credentials-file", type=Path, metavar="FILE", help="holds USER:PASSWORD")
    parser.add_argument(
        "--nats-token-file", type=Path, metavar="FILE", help="holds the token, where there are no users"
    )
    parser.add_argument("--nats-ca-file", type=Path, metavar="FILE", help="who signed NATS's certificate, with tls://")
    parser.add_argument(
        "--insecure-plaintext", action="store_true", help="let secrets cross a trusted network without TLS"
    )
