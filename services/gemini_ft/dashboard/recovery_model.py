"""A recovery as a waterfall of its phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemini_ft.contracts.api import RECOVERY_PHASES, RecoveryModel

__all__ = ["PHASE_WORDS", "Bar", "waterfall"]

PHASE_WORDS: Mapping[str, str] = {
    "detect": "failure is noticed",
    "fence": "old generation is fenced",
    "plan": "copies are chosen",
    "re_rendezvous": "ranks start again",
    "reserve": "memory is reserved",
    "fetch": "copies are fetched",
    "load": "state is loaded",
    "first_step": "first new step",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase: when it began after the failure, and how long it took; as shares of all phases, too."""

    phase: str
    begun_ms: float
    length_ms: float
    begun_share: float
    length_share: float


def waterfall(recovery: RecoveryModel) -> list[Bar]:
    """Return the known phases in the order in which they follow each other; phases of a newer coordinator come last."""
    known = [phase for phase in RECOVERY_PHASES if phase in recovery.phases_ms]
    phases = known + sorted(recovery.phases_ms.keys() - set(known))
    total_ms = sum(recovery.phases_ms.values()) or 1.0
    bars, begun_ms = [], 0.0
    for phase in phases:
        length_ms = recovery.phases_ms[phase]
        bars.append(Bar(phase, begun_ms, length_ms, begun_ms / total_ms, length_ms / total_ms))
        begun_ms += length_ms
    return bars
