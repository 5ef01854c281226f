"""What may be reached from other machines, and what may cross the network unencrypted."""

from __future__ import annotations

import ipaddress
import socket

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["bind_http", "is_loopback", "require_encryption"]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than `localhost` counts as beyond."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_encryption(what: str, host: str, *, encrypted: bool, insecure_plaintext: bool, remedy: str) -> None:
    """See that secrets do not cross the network in the clear, unless somebody has said so.

    Raises:
        ConfigurationError: `what` would send them to or from `host` unencrypted.
    """
    if not (encrypted or insecure_plaintext or is_loopback(host)):
        raise ConfigurationError(
            f"{what} would carry secrets over the network unencrypted; {remedy}, "
            "or give --insecure-plaintext if everybody on that network is trusted"
        )


def bind_http(what: str, listen: str, *, encrypted: bool, insecure_plaintext: bool) -> tuple[socket.socket, str]:
    """Bind HOST:PORT (port 0: any free one) for `what`, and return the socket and its URL.

    Raises:
        ConfigurationError: the address is malformed or cannot be bound, or tokens would reach it unencrypted.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise ConfigurationError(f"--listen is {listen!r}; give HOST:PORT, for instance 127.0.0.1:0")
    require_encryption(
        f"{what} on {listen}",
        host,
        encrypted=encrypted,
        insecure_plaintext=insecure_plaintext,
        remedy="give --tls-certificate-file and --tls-key-file",
    )
    try:
        bound = socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cannot listen on {listen}: {error}; choose another --listen") from error
    shown = f"[{host}]" if ":" in host else host
    return bound, f"{'https' if encrypted else 'http'}://{shown}:{bound.getsockname()[1]}"
