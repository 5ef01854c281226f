"""How a job got on while somebody looked: samples of what each answer of the API said, and rates from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gemini_ft.contracts.api import JobModel, NodeModel

__all__ = ["Sample", "sample_of", "step_rate", "step_rates"]

_WINDOW_S = 20.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A job at one moment of this process's clock. `stall_s` is of the rank that has waited longest."""

    at_s: float
    generation: int
    finished_step: int | None
    committed_step: int | None
    sealed_step: int | None
    stall_s: float

    @property
    def lag_steps(self) -> int | None:
        """By how many finished steps replication is behind: those that no sealed version holds."""
        if self.finished_step is None:
            return None
        return self.finished_step - (-1 if self.sealed_step is None else min(self.sealed_step, self.finished_step))

    @property
    def commit_lag_steps(self) -> int | None:
        """How many finished steps would be lost if all ranks died now."""
        if self.finished_step is None:
            return None
        return self.finished_step - (-1 if self.committed_step is None else self.committed_step)


def sample_of(job: JobModel, members: Iterable[NodeModel], at_s: float) -> Sample:
    """Return what a job and its nodes say."""
    ranks = [rank for node in members for rank in node.ranks if rank.generation == job.generation]
    sealed = [rank.sealed_everywhere_step for rank in ranks]
    known = [number for number in sealed if number is not None]
    return Sample(
        at_s=at_s,
        generation=job.generation,
        finished_step=job.finished_step,
        committed_step=job.committed_step,
        sealed_step=min(known) if known and len(known) == len(sealed) else None,
        stall_s=max((rank.stall_us for rank in ranks), default=0) / 1e6,
    )


def step_rates(samples: Iterable[Sample], window_s: float = _WINDOW_S) -> list[float | None]:
    """Return finished steps a second at each sample, over `window_s` before it and within its generation; None: not
    known yet.
    """
    rates: list[float | None] = []
    window: deque[Sample] = deque()
    for newest in samples:
        while window and (window[0].generation != newest.generation or newest.at_s - window[0].at_s > window_s):
            window.popleft()
        rate = None
        if newest.finished_step is not None:
            if window and window[0].finished_step is not None and newest.at_s > window[0].at_s:
                rate = max(0.0, (newest.finished_step - window[0].finished_step) / (newest.at_s - window[0].at_s))
            window.append(newest)
        rates.append(rate)
    return rates


def step_rate(samples: Sequence[Sample], window_s: float = _WINDOW_S) -> float | None:
    """Return the newest of `step_rates`."""
    begin_s = samples[-1].at_s - window_s if samples else 0.0
    return next(iter(reversed(step_rates((one for one in samples if one.at_s >= begin_s), window_s))), None)
