"""What checkpoint memory has done in this life of the agent, for its metrics."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["DamageFound", "ReplicaCounts"]


class DamageFound(enum.StrEnum):
    """Where bytes were found that do not match their digests."""

    STORED = "stored"
    """In a sealed copy, when all copies were checked."""
    STAGED = "staged"
    """In an own version, when a holder had refused it."""
    RECEIVED = "received"
    """In what a peer sent."""
    RESTORED = "restored"
    """By the rank that loaded the copy."""


@dataclass(slots=True)
class ReplicaCounts:
    """Bytes of shards that went over the data plane, and damaged copies that were found."""

    sent_bytes: int = 0
    received_bytes: int = 0
    num_damaged: Counter[DamageFound] = field(default_factory=Counter)
