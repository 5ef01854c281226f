"""What a simulated run has cost, by cause, and means over many seeds."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from gemini_ft.planning.simulation.scenario import FailureKind

__all__ = ["Cause", "Estimate", "RunResult", "Summary", "Tier", "estimate", "summarize"]


class Cause(enum.StrEnum):
    """What wasted time went into. Lost work is what was trained and rolled back."""

    STALL = "stall"
    LOST_WORK = "lost_work"
    DETECTION = "detection"
    COORDINATION = "coordination"
    SERIALIZATION = "serialization"
    REPLACEMENT = "replacement"
    RETRIEVAL = "retrieval"
    WARM_UP = "warm_up"


class Tier(enum.StrEnum):
    """Where a version was restored from: the slowest source that a machine needed."""

    LOCAL = "local"
    PEER = "peer"
    PERSISTENT = "persistent"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunResult(_Frozen):
    """One seed. `useful_us` and all of `wasted_us` add up to `total_us`, to the microsecond.

    `num_failures` counts what hit working machines, `num_restarted_recoveries` failures during a recovery, and
    `num_lost_sets` replica sets or coded groups that lost their shards.
    """

    seed: int
    total_us: int
    useful_us: int
    wasted_us: dict[Cause, int]
    recoveries: dict[Tier, int]
    num_failures: dict[FailureKind, int]
    num_restarted_recoveries: int
    num_lost_sets: int

    @property
    def effective_time_ratio(self) -> float:
        """Useful time as a share of all time."""
        return self.useful_us / self.total_us


class Estimate(_Frozen):
    """Mean over seeds and its confidence interval; with one seed there is no interval."""

    mean: float
    low: float | None
    high: float | None


class Summary(_Frozen):
    """Means over the seeds of a scenario, with intervals of 95 %.

    `wasted_shares` are shares of all time; with the effective-time ratio they add up to 1. `wasted_s_per_failure` is
    all wasted time but stalls, divided by the failures (None: there were none).
    """

    name: str
    num_seeds: int
    duration_s: float
    effective_time_ratio: Estimate
    wasted_shares: dict[Cause, Estimate]
    wasted_s_per_failure: float | None
    recoveries: dict[Tier, Estimate]
    num_failures: dict[FailureKind, Estimate]
    num_restarted_recoveries: Estimate
    num_lost_sets: Estimate


def summarize(name: str, results: Sequence[RunResult]) -> Summary:
    """Return means and confidence intervals of at least one result."""
    num_failures = sum(sum(result.num_failures.values()) for result in results)
    wasted_us = sum(sum(result.wasted_us.values()) - result.wasted_us[Cause.STALL] for result in results)
    kinds: tuple[FailureKind, ...] = ("software", "hardware")
    return Summary(
        name=name,
        num_seeds=len(results),
        duration_s=results[0].total_us / 1e6,
        effective_time_ratio=estimate(result.effective_time_ratio for result in results),
        wasted_shares={
            cause: estimate(result.wasted_us[cause] / result.total_us for result in results) for cause in Cause
        },
        wasted_s_per_failure=wasted_us / 1e6 / num_failures if num_failures else None,
        recoveries={tier: estimate(result.recoveries[tier] for result in results) for tier in Tier},
        num_failures={kind: estimate(result.num_failures[kind] for result in results) for kind in kinds},
        num_restarted_recoveries=estimate(result.num_restarted_recoveries for result in results),
        num_lost_sets=estimate(result.num_lost_sets for result in results),
    )


def estimate(values: Iterable[float]) -> Estimate:
    """Return the mean of independent values and its 95 % interval by Student's t."""
    sample = list(values)
    mean = statistics.fmean(sample)
    if len(sample) < 2:
        return Estimate(mean=mean, low=None, high=None)
    half = _t_quantile(len(sample) - 1) * statistics.stdev(sample) / math.sqrt(len(sample))
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def _t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, within 1 %: exact for 1 and 2, else the expansion about the normal one
    (Abramowitz and Stegun 26.7.5).
    """
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
