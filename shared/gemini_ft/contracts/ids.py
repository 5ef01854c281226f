"""Identifiers. They are minted by the coordinator (jobs, nodes) or once per process life (incarnations)."""

from __future__ import annotations

import secrets
from typing import Annotated

from pydantic import StringConstraints

__all__ = ["Incarnation", "JobId", "NodeId", "new_incarnation", "new_job_id", "new_node_id"]

_TOKEN = r"^[a-z0-9][a-z0-9-]{0,62}$"

JobId = Annotated[str, StringConstraints(pattern=_TOKEN)]
NodeId = Annotated[str, StringConstraints(pattern=_TOKEN)]
Incarnation = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


def new_job_id() -> str:
    """Return a job id that was never used; safe as a NATS token and as a folder name."""
    return f"job-{secrets.token_hex(5)}"


def new_node_id() -> str:
    """Return a node id that was never used. Only the coordinator calls this."""
    return f"node-{secrets.token_hex(5)}"


def new_incarnation() -> str:
    """Return the id of one process life; a restart of the same agent gets another one."""
    return secrets.token_hex(16)
