"""One run of a scenario: training that is stopped by failures, and recoveries that are stopped by failures too.

The model is driven by failures: between two of them, iterations and checkpoints are counted, not simulated. All
times are whole microseconds, so the account is exact. What is assumed:

- Training is synchronous: any failure stops all machines, and all roll back to one version.
- A failure during a recovery starts the recovery again with its own detection; machines that were ordered stay
  ordered, versions stay where they are.
- A slot without a machine cannot fail. The start of the run costs nothing, and version 0 is in the persistent tier.
- Detection and waits for machines overlap: a machine is ordered when its own loss is known.
- In memory, the newest complete version is restored as long as no replica set has lost more members than it
  survives. A member counts as lost from its failure until its replacement holds all its copies again.
- When a set is lost, everyone loads the newest version of the persistent tier (paper section 6), and memory holds
  nothing until redundancy is whole again.
- An upload to the persistent tier from memory outlives failures; one whose version loses a set runs on, taking its
  part of the bandwidth, and does not count. One that is due while another runs begins after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from functools import lru_cache

import simpy

from gemini_ft.planning.simulation.failures import Failure, generate_failures, random_stream
from gemini_ft.planning.simulation.link import SharedLink
from gemini_ft.planning.simulation.mechanics import Mechanics, mechanics_of
from gemini_ft.planning.simulation.results import Cause, RunResult, Tier
from gemini_ft.planning.simulation.scenario import (
    Delay,
    ExponentialDelay,
    FailureKind,
    Machines,
    Redundancy,
    Scenario,
    UniformDelay,
)
from gemini_ft.planning.wasted_time import DAY_S

__all__ = ["simulate"]

_Process = Generator[simpy.Event, None, None]


def simulate(scenario: Scenario, seed: int) -> RunResult:
    """Simulate one run; the same scenario and seed give the same result everywhere.

    Raises:
        ConfigurationError: the policy cannot work in this scenario.
    """
    return _Run(scenario, mechanics_of(scenario), seed).result()


class _Training:
    """Which work is done and complete at which time while nothing fails. Work is counted in microseconds of it."""

    def __init__(self, mechanics: Mechanics) -> None:
        self._interval_us = _us(mechanics.interval_s)
        self._work_us = self._interval_us - _us(mechanics.stall_s)
        self._write_us = _us(mechanics.write_s)
        self.first_version_us = self._interval_us + self._write_us

    def work(self, elapsed_us: int) -> int:
        """Work done in `elapsed_us`; the rest of the time is stalls, at the end of each interval."""
        intervals, rest_us = divmod(elapsed_us, self._interval_us)
        return intervals * self._work_us + min(rest_us, self._work_us)

    def complete(self, elapsed_us: int) -> int:
        """Work in the newest complete version that was made in `elapsed_us`."""
        return max(0, (elapsed_us - self._write_us) // self._interval_us) * self._work_us


class _Repair:
    """Slots without a machine, the pool of standbys, and machines on their way."""

    def __init__(self, env: simpy.Environment, machines: Machines, seed: int, order_after_us: int) -> None:
        self.empty_slots: set[int] = set()
        self._env = env
        self._lead_time = machines.lead_time_s
        self._num_standbys = machines.num_standbys
        self._order_after_us = order_after_us
        self._waiting: deque[int] = deque()
        self._filled = env.event()
        self._rng = random_stream(seed, 0)

    def lose(self, slot: int) -> None:
        """The slot's machine is gone; it is known, and another ordered, after the scenario's delay."""
        self.empty_slots.add(slot)
        self._env.process(self._replace(slot))

    def wait(self) -> _Process:
        """Yield until every slot has a machine."""
        while self.empty_slots:
            yield self._filled

    def _replace(self, slot: int) -> _Process:
        yield self._env.timeout(self._order_after_us)
        if self._num_standbys:
            self._num_standbys -= 1
            self._fill(slot)
        else:
            self._waiting.append(slot)
        yield self._env.timeout(self._draw_us(self._lead_time))
        if self._waiting:
            self._fill(self._waiting.popleft())
        else:
            self._num_standbys += 1

    def _fill(self, slot: int) -> None:
        self.empty_slots.remove(slot)
        if not self.empty_slots:
            self._filled.succeed()
            self._filled = self._env.event()

    def _draw_us(self, delay: Delay) -> int:
        match delay:
            case UniformDelay(low_s=low_s, high_s=high_s):
                return _us(self._rng.uniform(low_s, high_s))
            case ExponentialDelay(mean_s=mean_s):
                return _us(self._rng.exponential(mean_s))
            case _:
                return _us(delay)


class _Memory:
    """Which members of which sets have their copies, and whether the memory tier can restore anything."""

    def __init__(self, scenario: Scenario) -> None:
        self._num_losses = scenario.redundancy.num_losses
        self._sets, self._sets_of = _replica_sets(scenario.redundancy, scenario.num_machines)
        self._missing: set[int] = set()
        self._is_lost = False
        self._whole_at: int | None = None

    def is_lost(self, now: int) -> bool:
        """Nothing can be restored from memory."""
        self._settle(now)
        return self._is_lost

    def is_whole(self, now: int) -> bool:
        """Every slot has its copies."""
        self._settle(now)
        return not self._is_lost and not self._missing

    def expect_whole(self, at: int | None) -> None:
        """Redundancy is whole again at `at`, unless a machine is lost before; None: not in sight."""
        self._whole_at = at

    def lose(self, slots: list[int], now: int) -> int:
        """Lose the memory of `slots`; return how many sets have lost their shards by it."""
        self._settle(now)
        self._whole_at = None
        if self._is_lost:
            return 0
        self._missing.update(slots)
        touched = {index for slot in slots for index in self._sets_of[slot]}
        num_lost = sum(sum(slot in self._missing for slot in self._sets[index]) > self._num_losses for index in touched)
        self._is_lost = num_lost > 0
        return num_lost

    def _settle(self, now: int) -> None:
        if self._whole_at is not None and now >= self._whole_at:
            self._missing.clear()
            self._is_lost = False
            self._whole_at = None


class _Run:
    """State of the simulated job. `_work` is where training started last; `_in_memory` and `_persisted` are the work
    in the newest complete version of either tier.
    """

    def __init__(self, scenario: Scenario, mechanics: Mechanics, seed: int) -> None:
        self._seed = seed
        self._mechanics = mechanics
        self._total_us = _us(scenario.duration_days * DAY_S)
        self._total_bytes = scenario.total_bytes
        self._upload_interval_us = _us(scenario.persistent.interval_s)
        self._training = _Training(mechanics)
        self._memory = _Memory(scenario)
        self._env = simpy.Environment(initial_time=0)
        self._link = SharedLink(
            self._env, scenario.persistent.bandwidth_bytes_per_s, scenario.persistent.num_other_transfers
        )
        order_after_us = _us(mechanics.hardware.detection_s + mechanics.order_after_s)
        self._repair = _Repair(self._env, scenario.machines, seed, order_after_us)
        self._resumed_at: int | None = None
        self._work = self._in_memory = self._persisted = 0
        self._trained_us = 0
        self._upload_is_spoiled = False
        self._latest_is_hardware = self._has_lost_machines = False
        self._wasted_us = dict.fromkeys(Cause, 0)
        self._recoveries = dict.fromkeys(Tier, 0)
        self._num_failures: dict[FailureKind, int] = {"software": 0, "hardware": 0}
        self._num_restarted = self._num_lost_sets = 0
        self._never = self._env.event()
        self._job = self._env.process(self._live())
        self._env.process(self._fail(generate_failures(scenario, seed)))
        if mechanics.is_in_memory:
            self._env.process(self._upload())

    def result(self) -> RunResult:
        """Run to the end and settle the account."""
        self._env.run(self._job)
        useful_us = self._restorable()
        if self._resumed_at is not None:
            useful_us = self._work + self._training.work(self._now - self._resumed_at)
            self._count_training()
        self._wasted_us[Cause.LOST_WORK] = self._trained_us - useful_us
        return RunResult(
            seed=self._seed,
            total_us=self._total_us,
            useful_us=useful_us,
            wasted_us=self._wasted_us,
            recoveries=self._recoveries,
            num_failures=self._num_failures,
            num_restarted_recoveries=self._num_restarted,
            num_lost_sets=self._num_lost_sets,
        )

    @property
    def _now(self) -> int:
        return int(self._env.now)

    @property
    def _ended(self) -> bool:
        return self._now >= self._total_us

    def _live(self) -> _Process:
        while True:
            self._resumed_at = self._now
            try:
                yield self._never
            except simpy.Interrupt:
                if self._ended:
                    return
            while True:
                try:
                    yield from self._recover()
                    break
                except simpy.Interrupt:
                    if self._ended:
                        return

    def _recover(self) -> _Process:
        """One attempt to come back, to the end of warm-up."""
        mechanics = self._mechanics
        latest = mechanics.hardware if self._latest_is_hardware else mechanics.software
        phases = mechanics.hardware if self._has_lost_machines else mechanics.software
        yield from self._spend(Cause.DETECTION, latest.detection_s)
        yield from self._spend(Cause.COORDINATION, phases.coordination_s)
        yield from self._spend(Cause.SERIALIZATION, phases.serialization_s)
        yield from self._charge(Cause.REPLACEMENT, self._repair.wait())
        tier = self._tier()
        if tier is Tier.PERSISTENT:
            yield from self._charge(Cause.RETRIEVAL, self._link.transfer(self._total_bytes))
        else:
            source = mechanics.software if tier is Tier.LOCAL else mechanics.hardware
            yield from self._spend(Cause.RETRIEVAL, source.retrieval_s)
        self._work = self._in_memory = self._restorable()
        if mechanics.re_replication_s is not None and not self._memory.is_whole(self._now):
            self._memory.expect_whole(self._now + _us(mechanics.re_replication_s))
        yield from self._spend(Cause.WARM_UP, phases.warm_up_s)
        if mechanics.is_in_memory and mechanics.re_replication_s is None:
            self._memory.expect_whole(self._now + self._training.first_version_us)
        self._recoveries[tier] += 1
        self._has_lost_machines = False

    def _tier(self) -> Tier:
        if not self._mechanics.is_in_memory or self._memory.is_lost(self._now):
            return Tier.PERSISTENT
        return Tier.LOCAL if self._memory.is_whole(self._now) else Tier.PEER

    def _restorable(self) -> int:
        return self._persisted if self._tier() is Tier.PERSISTENT else self._in_memory

    def _spend(self, cause: Cause, duration_s: float) -> _Process:
        if duration_s:
            began = self._now
            try:
                yield self._env.timeout(_us(duration_s))
            finally:
                self._wasted_us[cause] += self._now - began

    def _charge(self, cause: Cause, waiting: _Process) -> _Process:
        began = self._now
        try:
            yield from waiting
        finally:
            self._wasted_us[cause] += self._now - began

    def _fail(self, failures: list[Failure]) -> _Process:
        for failure in failures:
            if failure.at_us >= self._total_us:
                break
            yield self._env.timeout(failure.at_us - self._now)
            self._hit(failure)
        yield self._env.timeout(self._total_us - self._now)
        self._job.interrupt()

    def _hit(self, failure: Failure) -> None:
        hit = [slot for slot in failure.machines if slot not in self._repair.empty_slots]
        if not hit:
            return
        if self._resumed_at is None:
            self._num_restarted += 1
        else:
            self._stop_training()
        self._num_failures["hardware" if failure.is_hardware else "software"] += 1
        self._latest_is_hardware = failure.is_hardware
        if failure.is_hardware:
            self._has_lost_machines = True
            for slot in hit:
                self._repair.lose(slot)
            if self._mechanics.is_in_memory:
                num_lost = self._memory.lose(hit, self._now)
                self._num_lost_sets += num_lost
                self._upload_is_spoiled |= num_lost > 0
        elif self._mechanics.re_replication_s is None and not self._memory.is_whole(self._now):
            # Redundancy was to return with a version that training no longer makes.
            self._memory.expect_whole(None)
        self._job.interrupt()

    def _stop_training(self) -> None:
        complete = self._newest_complete()
        self._count_training()
        if self._mechanics.is_in_memory:
            self._in_memory = complete
        else:
            self._persisted = complete
        self._resumed_at = None

    def _count_training(self) -> None:
        assert self._resumed_at is not None
        elapsed_us = self._now - self._resumed_at
        work = self._training.work(elapsed_us)
        self._trained_us += work
        self._wasted_us[Cause.STALL] += elapsed_us - work

    def _newest_complete(self) -> int:
        if self._resumed_at is None:
            return self._in_memory
        return self._work + self._training.complete(self._now - self._resumed_at)

    def _upload(self) -> _Process:
        while True:
            due_at = self._now + self._upload_interval_us
            yield from self._upload_once()
            yield self._env.timeout(max(0, due_at - self._now))

    def _upload_once(self) -> _Process:
        version = self._newest_complete()
        if version <= self._persisted or self._memory.is_lost(self._now):
            return
        self._upload_is_spoiled = False
        yield from self._link.transfer(self._total_bytes)
        if not self._upload_is_spoiled:
            self._persisted = version


@lru_cache(maxsize=4)
def _replica_sets(
    redundancy: Redundancy, num_machines: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the sets, and machine -> indices of its sets."""
    sets = redundancy.sets(num_machines)
    sets_of: list[list[int]] = [[] for _ in range(num_machines)]
    for index, members in enumerate(sets):
        for machine in members:
            sets_of[machine].append(index)
    return sets, tuple(map(tuple, sets_of))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
