"""What failures cost a training run, in closed form (paper section 2.1, equations 1 and 2; section 7.3).

Two accounts of the same run are here. The paper's is linear: every failure costs the same, and costs add up
(`effective_time_ratio`). The exact one lets failures also hit recoveries and unfinished checkpoints
(`renewal_effective_time_ratio`). They agree while a failure costs little against the time between two; the
linear one reaches zero where a run is merely slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gemini_ft.contracts.errors import ConfigurationError

__all__ = [
    "DAY_S",
    "CheckpointCosts",
    "average_wasted_time_s",
    "best_wasted_time_s",
    "effective_time_ratio",
    "max_frequency_per_s",
    "renewal_effective_time_ratio",
    "transfer_time_s",
    "worst_wasted_time_s",
]

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class CheckpointCosts:
    """Times of one way of making checkpoints, in seconds.

    `interval_s` is 1/f, the wall time from one checkpoint to the next, and contains `serialization_s`, during which
    training waits; `write_s` follows it and runs beside training. `recovery_s` is what a failure costs beside
    T_wasted: detection, serialisation after the failure, replacement, warm-up (left out of equation 1).

    Raises:
        ConfigurationError: a time is negative or not finite, `interval_s` breaks equation 2, or nothing is left of
            it to train in.
    """

    iteration_s: float
    interval_s: float
    write_s: float
    retrieval_s: float
    serialization_s: float = 0.0
    recovery_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigurationError(f"{name} is {value}; give a time in seconds of at least 0")
        # Serialising one checkpoint may overlap with writing the one before: only writes exclude each other.
        shortest = max(self.write_s, self.iteration_s)
        if self.interval_s <= 0 or self.interval_s < shortest:
            raise ConfigurationError(
                f"interval_s is {self.interval_s:g}, but a checkpoint takes {self.write_s:g} s to write and the state "
                f"changes every {self.iteration_s:g} s; give an interval above 0 and of at least {shortest:g} s"
            )
        if self.serialization_s >= self.interval_s:
            raise ConfigurationError(
                f"serialization_s is {self.serialization_s:g}, which leaves no time to train in an interval of "
                f"{self.interval_s:g} s; give a longer interval_s"
            )

    @property
    def checkpoint_s(self) -> float:
        """t_ckpt: from the state to the end of its checkpoint."""
        return self.serialization_s + self.write_s


def transfer_time_s(size_bytes: float, bandwidth_bytes_per_s: float, num_senders: int = 1) -> float:
    """Return how long `num_senders` machines with `size_bytes` each take on a link they share.

    With N senders this is a checkpoint to, or retrieval from, the persistent tier, whose bandwidth does not grow with
    N; with one it is a checkpoint to a peer's memory (paper section 7.2).

    Raises:
        ConfigurationError: no bandwidth, or a negative size or number.
    """
    if not bandwidth_bytes_per_s > 0:
        raise ConfigurationError(f"bandwidth_bytes_per_s is {bandwidth_bytes_per_s:g}; give a number above 0")
    if size_bytes < 0 or num_senders < 0:
        raise ConfigurationError(f"size_bytes is {size_bytes:g} and num_senders {num_senders}; neither may be negative")
    return num_senders * size_bytes / bandwidth_bytes_per_s


def max_frequency_per_s(write_s: float, iteration_s: float) -> float:
    """Return the highest checkpoint frequency: 1 / max(write, iteration) (equation 2).

    Raises:
        ConfigurationError: both times are 0, or one is negative.
    """
    shortest = max(write_s, iteration_s)
    if min(write_s, iteration_s) < 0 or shortest == 0:
        raise ConfigurationError(
            f"write_s is {write_s:g} and iteration_s {iteration_s:g}; neither may be negative, nor both 0"
        )
    return 1 / shortest


def best_wasted_time_s(costs: CheckpointCosts) -> float:
    """Return T_wasted for a failure just after a checkpoint has ended: t_ckpt + t_rtvl (section 2.1)."""
    return costs.checkpoint_s + costs.retrieval_s


def average_wasted_time_s(costs: CheckpointCosts) -> float:
    """Return T_wasted for a failure at any time alike: t_ckpt + 1/(2f) + t_rtvl (equation 1)."""
    return best_wasted_time_s(costs) + costs.interval_s / 2


def worst_wasted_time_s(costs: CheckpointCosts) -> float:
    """Return T_wasted for a failure just before a checkpoint ends: t_ckpt + 1/f + t_rtvl (section 2.1)."""
    return best_wasted_time_s(costs) + costs.interval_s


def effective_time_ratio(costs: CheckpointCosts, failures_per_day: float) -> float:
    """Return the useful share of all time in the paper's linear account (section 7.3, Figure 15), at least 0.

    1 - serialisation share - failures a day x (T_wasted + recovery) / one day. Work that is done again counts whole,
    although part of it was serialisation and counted before; failures never meet a recovery.

    Raises:
        ConfigurationError: a negative number of failures.
    """
    rate_per_s = _rate_per_s(failures_per_day)
    cost_s = average_wasted_time_s(costs) + costs.recovery_s
    return max(0.0, 1 - costs.serialization_s / costs.interval_s - rate_per_s * cost_s)


def renewal_effective_time_ratio(costs: CheckpointCosts, failures_per_day: float) -> float:
    """Return the useful share of all time for Poisson failures that may hit at any time, recoveries included.

    A recovery of length D = recovery + t_rtvl that is hit starts again, so it takes (e^(rD) - 1) / r; training lasts
    1 / r and keeps the checkpoints that ended in it, the k-th after k intervals and a write. Exact for a constant D
    and rate r, in the long run; our own derivation, by the renewal-reward theorem.

    Raises:
        ConfigurationError: a negative number of failures.
    """
    rate_per_s = _rate_per_s(failures_per_day)
    trained_s = costs.interval_s - costs.serialization_s
    if rate_per_s == 0:
        return trained_s / costs.interval_s
    down_s = costs.recovery_s + costs.retrieval_s
    exponent = -rate_per_s * (costs.interval_s + costs.write_s + down_s)
    return rate_per_s * trained_s * math.exp(exponent) / -math.expm1(-rate_per_s * costs.interval_s)


def _rate_per_s(failures_per_day: float) -> float:
    if not math.isfinite(failures_per_day) or failures_per_day < 0:
        raise ConfigurationError(f"failures_per_day is {failures_per_day}; give a number of at least 0")
    return failures_per_day / DAY_S
