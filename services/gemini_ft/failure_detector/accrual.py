"""Phi accrual: how unlikely a silence is, given the arrivals seen so far (Hayashibara et al., SRDS 2004)."""

import math
from collections import deque

__all__ = ["ArrivalWindow"]


class ArrivalWindow:
    """The newest intervals between arrivals from one sender, all timed by the receiver's monotonic clock."""

    def __init__(self, *, expected_interval_s: float, num_intervals: int, deviation_floor_s: float) -> None:
        """`expected_interval_s` is what the sender announces: the mean until there are arrivals, its floor after.

        Heartbeats sent out of turn, because something happened, thus never make the receiver impatient.
        """
        self._expected_interval_s = expected_interval_s
        self._deviation_floor_s = deviation_floor_s
        self._intervals: deque[float] = deque(maxlen=num_intervals)

    def add(self, interval_s: float) -> None:
        """Take the interval between two consecutive arrivals."""
        self._intervals.append(interval_s)

    @property
    def mean_s(self) -> float:
        """Never below the announced interval."""
        if not self._intervals:
            return self._expected_interval_s
        return max(self._expected_interval_s, math.fsum(self._intervals) / len(self._intervals))

    @property
    def deviation_s(self) -> float:
        """Standard deviation, never below the floor: a calm past does not make a small delay a death."""
        if not self._intervals:
            return self._deviation_floor_s
        mean_s = math.fsum(self._intervals) / len(self._intervals)
        variance = math.fsum((interval - mean_s) ** 2 for interval in self._intervals) / len(self._intervals)
        return max(self._deviation_floor_s, math.sqrt(variance))

    def phi(self, silent_s: float, pause_s: float) -> float:
        """-log10 of the chance that a living sender is silent for `silent_s`, when pauses of `pause_s` are ordinary.

        Finite, and never falling while `silent_s` grows.
        """
        return _minus_log10_upper_tail((silent_s - pause_s - self.mean_s) / self.deviation_s)


def _minus_log10_upper_tail(z: float) -> float:
    """-log10 P(Z > z) of a standard normal Z; beyond z = 30, where erfc underflows, by its asymptote."""
    if z < 30.0:
        return max(0.0, -math.log10(0.5 * math.erfc(z / math.sqrt(2.0))))
    return z * z / 2.0 * math.log10(math.e) + math.log10(z * math.sqrt(2.0 * math.pi))
