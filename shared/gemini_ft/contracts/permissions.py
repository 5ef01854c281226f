"""Who may publish and read which subjects of NATS: one user a role, as the server's configuration wants it.

No role but the control plane's may create streams: a stream copies any subject, and republishes to any.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from gemini_ft.contracts.subjects import (
    HEARTBEAT_STREAM,
    HEARTBEATS,
    IMPORTS_BUCKET,
    REGISTER,
    VERDICT_CONSUMER,
    VERDICT_STREAM,
    log_subject,
    order_subject,
    verdict_subject,
)

__all__ = ["NatsRole", "authorization", "inbox_prefix", "permissions"]

_ANY = "*"
_IMPORTS_STREAM = f"KV_{IMPORTS_BUCKET}"
_API = "$JS.API"
_ANSWER_TIME = "10m"
"""A fence of large memory is answered late."""


class NatsRole(StrEnum):
    """A role is the name of its NATS user as well."""

    COORDINATOR = "coordinator"
    FAILURE_DETECTOR = "failure-detector"
    AGENT = "agent"


def inbox_prefix(role: NatsRole) -> str:
    """Below which subject the answers to a role's own requests come; other roles cannot read there."""
    return f"_INBOX.gemini-{role}"


def permissions(role: NatsRole) -> dict[str, Any]:
    """Return the `permissions` of a role's user; what is not listed is refused."""
    match role:
        case NatsRole.COORDINATOR:
            read = [REGISTER, HEARTBEATS]
            publish = [
                order_subject(_ANY),
                log_subject(_ANY),
                # Answers to registrations; not `allow_responses`, by which an agent could choose the subject.
                f"{inbox_prefix(NatsRole.AGENT)}.>",
                *_stream_making(VERDICT_STREAM),
                *_stream_making(_IMPORTS_STREAM),
                f"{_API}.CONSUMER.INFO.{VERDICT_STREAM}.{VERDICT_CONSUMER}",
                f"{_API}.CONSUMER.CREATE.{VERDICT_STREAM}.{VERDICT_CONSUMER}.>",
                f"{_API}.CONSUMER.MSG.NEXT.{VERDICT_STREAM}.{VERDICT_CONSUMER}",
                f"$JS.ACK.{VERDICT_STREAM}.{VERDICT_CONSUMER}.>",
            ]
        case NatsRole.FAILURE_DETECTOR:
            read = [HEARTBEATS]
            publish = [
                verdict_subject(_ANY),
                # It sends messages to itself, to see that the connection lives.
                f"{inbox_prefix(role)}.>",
                *_stream_making(VERDICT_STREAM),
                *_stream_making(HEARTBEAT_STREAM),
                f"{_API}.STREAM.MSG.GET.{HEARTBEAT_STREAM}",
            ]
        case NatsRole.AGENT:
            read = [order_subject(_ANY), log_subject(_ANY)]
            publish = [
                REGISTER,
                HEARTBEATS,
                f"{_API}.STREAM.INFO.{_IMPORTS_STREAM}",
                f"{_API}.STREAM.MSG.GET.{_IMPORTS_STREAM}",
                f"$KV.{IMPORTS_BUCKET}.*",
            ]
    granted: dict[str, Any] = {
        "publish": {"allow": publish},
        "subscribe": {"allow": [*read, f"{inbox_prefix(role)}.>"]},
    }
    if role is NatsRole.AGENT:
        # One answer to each order or question that reached it, and none to what did not.
        granted["allow_responses"] = {"max": 1, "expires": _ANSWER_TIME}
    return granted


def authorization(passwords: Mapping[NatsRole, str]) -> dict[str, Any]:
    """Return the `authorization` block of nats.conf; whoever is none of its users is refused."""
    return {
        "users": [
            {"user": str(role), "password": passwords[role], "permissions": permissions(role)} for role in NatsRole
        ]
    }


def _stream_making(stream: str) -> tuple[str, str]:
    return f"{_API}.STREAM.INFO.{stream}", f"{_API}.STREAM.CREATE.{stream}"
