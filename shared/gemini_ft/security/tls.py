"""TLS contexts from files. Hosts and certificates are checked; certificates are read at start only."""

from __future__ import annotations

import ssl
from pathlib import Path

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.security.secret_files import require_private

__all__ = ["client_context", "load_certificate", "optional_server_context"]


def optional_server_context(certificate_file: Path | None, key_file: Path | None) -> ssl.SSLContext | None:
    """Return a context for servers that show this certificate (with its chain) and ask clients for none.

    Raises:
        ConfigurationError: one of the files is missing or cannot be used, or others can read the key.
    """
    if certificate_file is None and key_file is None:
        return None
    if certificate_file is None or key_file is None:
        raise ConfigurationError("give both --tls-certificate-file and --tls-key-file, or none of them")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, certificate_file, key_file)
    return context


def client_context(ca_file: Path | None, option: str) -> ssl.SSLContext:
    """Return a context for clients that trust `ca_file` alone, or without one what the system trusts.

    Raises:
        ConfigurationError: the file cannot be used; the sentence names `option`.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"{option}: {ca_file} holds no certificate authority that can be read: {_reason(error)}"
        ) from error


def load_certificate(context: ssl.SSLContext, certificate_file: Path, key_file: Path) -> None:
    """Let a context show a certificate; raises ConfigurationError if it cannot be used."""
    require_private(key_file, "--tls-key-file")
    try:
        # Without a password the library would ask for one at the terminal.
        context.load_cert_chain(certificate_file, key_file, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"--tls-certificate-file {certificate_file} and --tls-key-file {key_file} cannot be used: "
            f"{_reason(error)}; give a certificate and its own key, in PEM and without a password"
        ) from error


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
