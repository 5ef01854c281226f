"""Recoveries that this process has led, counted by cause and timed by phase."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.registry import Collector

from gemini_ft.contracts.api import RECOVERY_PHASES
from gemini_ft.coordinator.actions import Action, AssignPlan, BeginGeneration, CompleteRecovery

__all__ = ["Cause", "RecoveryCounts", "cause_of"]

_OTHER_PHASE = "other"
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Cause(enum.StrEnum):
    """Kinds of causes, few enough for a label."""

    RANK_EXITED = enum.auto()
    RANK_HUNG = enum.auto()
    NODE_FAILED = enum.auto()
    RESTORE_FAILED = enum.auto()
    LAUNCHER_GONE = enum.auto()
    DRAIN = enum.auto()
    RESUME = enum.auto()
    OTHER = enum.auto()


# The causes are sentences for people; a test takes each of them from where it is made.
_SENTENCES = (
    (Cause.RANK_EXITED, re.compile(r"\S+: rank \d+ \(process \d+\) ended ")),
    (Cause.RANK_HUNG, re.compile(r"\S+: no rank of \S+ has finished a step for ")),
    (Cause.RESTORE_FAILED, re.compile(r"rank \d+ on \S+ \(slot \d+\) could not restore")),
    (Cause.NODE_FAILED, re.compile(r"\S+ \(slot \d+\) has (failed|come back without the job)")),
    (Cause.LAUNCHER_GONE, re.compile(r"the launcher on \S+ \(slot \d+\) has been gone ")),
    (Cause.DRAIN, re.compile(r"(drain of|the ranks were held for a drain) ")),
    (Cause.RESUME, re.compile(r".* resumed the job$")),
)


def cause_of(sentence: str) -> Cause:
    """Return the kind of a recovery's cause."""
    return next((cause for cause, form in _SENTENCES if form.match(sentence)), Cause.OTHER)


class RecoveryCounts(Collector):
    """`note` is told every action that took effect. A recovery counts when its plan is made."""

    def __init__(self) -> None:
        self._recoveries = Counter(
            "gemini_ft_recoveries", "Recoveries that this process has planned", ["cause"], registry=None
        )
        self._phases_s = Histogram(
            "gemini_ft_recovery_phase_seconds",
            "How long the phases of recoveries took",
            ["phase"],
            buckets=_BUCKETS_S,
            registry=None,
        )
        for cause in Cause:
            self._recoveries.labels(cause.value)

    def note(self, action: Action) -> None:
        """Take an action that was carried out. The start of a job, generation 1, is no recovery."""
        match action:
            case BeginGeneration(detect_s=float(detect_s)):
                self.add_phases(action.generation + 1, {"detect": detect_s})
            case AssignPlan():
                if action.generation > 1:
                    self._recoveries.labels(cause_of(action.cause).value).inc()
                self.add_phases(action.generation, action.phases_s)
            case CompleteRecovery():
                self.add_phases(action.generation, action.phases_s)

    def add_phases(self, generation: int, phases_s: Mapping[str, float]) -> None:
        """Take durations of phases. Ranks may report any name; those that are not known share a label."""
        if generation > 1:
            for phase, seconds in phases_s.items():
                self._phases_s.labels(phase if phase in RECOVERY_PHASES else _OTHER_PHASE).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        return [*self._recoveries.collect(), *self._phases_s.collect()]
