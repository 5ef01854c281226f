"""The persistent tier's bandwidth, shared by the transfers that are under way."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

import simpy

__all__ = ["SharedLink"]


@dataclass(eq=False, slots=True)
class _Transfer:
    left_bytes: float
    done: simpy.Event


class SharedLink:
    """A link on which every transfer has an equal part of the bandwidth; simulated time is in microseconds.

    `num_other_transfers` of others are always under way.
    """

    def __init__(self, env: simpy.Environment, bandwidth_bytes_per_s: float, num_other_transfers: int = 0) -> None:
        self._env = env
        self._bytes_per_us = bandwidth_bytes_per_s / 1e6
        self._num_others = num_other_transfers
        self._active: list[_Transfer] = []
        self._settled_at: float = env.now
        self._num_plans = 0

    def transfer(self, size_bytes: float) -> Generator[simpy.Event, None, None]:
        """Yield until `size_bytes` are through; a process that is interrupted here gives its part up."""
        transfer = _Transfer(size_bytes, self._env.event())
        self._settle()
        self._active.append(transfer)
        self._plan()
        try:
            yield transfer.done
        finally:
            if transfer in self._active:
                self._settle()
                self._active.remove(transfer)
                self._plan()

    @property
    def _part_bytes_per_us(self) -> float:
        return self._bytes_per_us / (len(self._active) + self._num_others)

    def _settle(self) -> None:
        elapsed_us = self._env.now - self._settled_at
        self._settled_at = self._env.now
        for transfer in self._active:
            transfer.left_bytes -= elapsed_us * self._part_bytes_per_us

    def _plan(self) -> None:
        """Wake when the next transfer ends, if none has begun or left until then."""
        self._num_plans += 1
        if not self._active:
            return
        plan = self._num_plans
        first_bytes = min(transfer.left_bytes for transfer in self._active)
        wake = self._env.timeout(max(0, math.ceil(first_bytes / self._part_bytes_per_us)))
        wake.callbacks.append(lambda event: self._finish() if plan == self._num_plans else None)

    def _finish(self) -> None:
        self._settle()
        # What is less than a microsecond's worth is rounding.
        ended = [transfer for transfer in self._active if transfer.left_bytes < self._part_bytes_per_us]
        for transfer in ended:
            self._active.remove(transfer)
            transfer.done.succeed()
        self._plan()
