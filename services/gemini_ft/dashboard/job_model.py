"""A job's life as spans of time, and what of it was useful."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gemini_ft.contracts.api import EventModel, JobModel, RecoveryModel

__all__ = ["Account", "Activity", "Span", "account", "timeline"]


class Activity(enum.StrEnum):
    """What a job did during a span."""

    WAITING = "waiting"
    STARTING = "starting"
    TRAINING = "training"
    RECOVERING = "recovering"
    BLOCKED = "blocked"
    SUSPENDED = "suspended"


_ENDS = {"job_succeeded", "job_failed", "job_stopped"}
_DURING = {
    "job_created": Activity.WAITING,
    "generation_begun": Activity.RECOVERING,
    "job_running": Activity.TRAINING,
    "job_blocked": Activity.BLOCKED,
    "job_suspended": Activity.SUSPENDED,
}
_WAITING = (Activity.WAITING, Activity.STARTING, Activity.BLOCKED, Activity.SUSPENDED)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a job's life in which it did one thing."""

    activity: Activity
    generation: int
    begun_at: datetime
    ended_at: datetime

    @property
    def length_s(self) -> float:
        """How long it took."""
        return (self.ended_at - self.begun_at).total_seconds()


@dataclass(frozen=True, slots=True)
class Account:
    """Where a job's time went, in seconds. `wasted_s` is what failures and checkpoints have cost; time in which the
    job waited for nodes or for people counts neither way.
    """

    useful_s: float
    recovering_s: float
    lost_work_s: float
    stall_s: float
    waiting_s: float

    @property
    def wasted_s(self) -> float:
        """Recoveries, steps that were done twice, and waiting for checkpoints."""
        return self.recovering_s + self.lost_work_s + self.stall_s

    @property
    def goodput(self) -> float | None:
        """Useful share of the time in which the job could have trained; None: it could not yet."""
        total_s = self.useful_s + self.wasted_s
        return self.useful_s / total_s if total_s > 0 else None


def timeline(events: Iterable[EventModel], now: datetime) -> list[Span]:
    """Return the spans of a job from its own events, oldest first, the last of them open until `now`."""
    spans: list[Span] = []
    current: tuple[Activity, int, datetime] | None = None
    for event in sorted(events, key=lambda event: event.id):
        activity = _DURING.get(event.kind)
        if activity is None and event.kind not in _ENDS:
            continue
        generation = event.generation or 0
        if activity is Activity.RECOVERING and generation <= 1:
            activity = Activity.STARTING
        if current is not None and current[0] is not activity:
            if event.at > current[2]:
                spans.append(Span(*current, ended_at=event.at))
            current = None
        if activity is None:
            current = None
        elif current is None:
            current = (activity, generation, event.at)
    if current is not None:
        spans.append(Span(*current, ended_at=max(now, current[2])))
    return spans


def account(job: JobModel, spans: Sequence[Span], recoveries: Sequence[RecoveryModel], stall_s: float = 0.0) -> Account:
    """Return where a job's time went.

    A failure counts from when it happened, not from when it was found. Lost work is the number of steps that were done
    twice, at the mean duration of a step of this job. `stall_s` is what the ranks of the newest generation have waited
    for checkpoints; that of earlier ones is not known.
    """
    length_s = {activity: sum(one.length_s for one in spans if one.activity is activity) for activity in Activity}
    detect_s = sum(recovery.phases_ms.get("detect", 0.0) for recovery in recoveries) / 1000
    training_s = max(0.0, length_s[Activity.TRAINING] - detect_s)
    num_lost = sum(recovery.num_steps_lost or 0 for recovery in recoveries)
    num_kept = 0 if job.finished_step is None else job.finished_step + 1
    lost_work_s = training_s * num_lost / (num_kept + num_lost) if num_lost else 0.0
    stall_s = min(stall_s, training_s - lost_work_s)
    return Account(
        useful_s=training_s - lost_work_s - stall_s,
        recovering_s=length_s[Activity.RECOVERING] + min(detect_s, length_s[Activity.TRAINING]),
        lost_work_s=lost_work_s,
        stall_s=stall_s,
        waiting_s=sum(length_s[activity] for activity in _WAITING),
    )
