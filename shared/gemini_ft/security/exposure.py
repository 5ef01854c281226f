"""What may be reached from other machines, and what may cross the network unencrypted."""

from __future__ import annotations

import ipaddress

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["is_loopback", "require_encryption"]


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
