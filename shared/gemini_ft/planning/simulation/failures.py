"""When which machines fail: all processes of a scenario, merged in order of time.

The failures of a seed depend on the seed, the failure processes and the number of machines only, not on the policy,
so policies are compared on the same failures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gemini_ft.planning.simulation.scenario import (
    DomainFailures,
    PoissonFailures,
    Scenario,
    TraceFailures,
    WeibullFailures,
)
from gemini_ft.planning.wasted_time import DAY_S

__all__ = ["Failure", "generate_failures", "random_stream"]


class Failure(NamedTuple):
    """One failure, `at_us` microseconds after the start."""

    at_us: int
    is_hardware: bool
    machines: tuple[int, ...]


def random_stream(seed: int, number: int) -> np.random.Generator:
    """Return stream `number` of a seed; streams are independent of each other."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))


def generate_failures(scenario: Scenario, seed: int) -> list[Failure]:
    """Return every failure of a run; failures at one instant are in the order of their processes."""
    found: list[Failure] = []
    for index, process in enumerate(scenario.failures):
        rng = random_stream(seed, index + 1)
        match process:
            case PoissonFailures():
                found.extend(_poisson(process, scenario, rng))
            case WeibullFailures():
                found.extend(_weibull(process, scenario, rng))
            case DomainFailures():
                found.extend(_domains(process, scenario, rng))
            case TraceFailures():
                found.extend(_trace(process, scenario))
    found.sort(key=lambda failure: failure.at_us)
    return found


def _poisson(process: PoissonFailures, scenario: Scenario, rng: np.random.Generator) -> Iterator[Failure]:
    mean = process.per_machine_per_day * scenario.num_machines * scenario.duration_days
    count = rng.poisson(mean)
    days = rng.uniform(0, scenario.duration_days, count)
    machines = rng.integers(0, scenario.num_machines, count)
    return _single(days, machines, process.failure == "hardware")


def _weibull(process: WeibullFailures, scenario: Scenario, rng: np.random.Generator) -> Iterator[Failure]:
    scale_days = process.mean_days / math.gamma(1 + 1 / process.shape)
    if process.are_new:
        days = scale_days * rng.weibull(process.shape, scenario.num_machines)
    else:
        # What is left of a life that is met at a random time: a uniform part of a life chosen in proportion to its
        # length, and the length-biased Weibull is a power of a gamma variable.
        lives = rng.gamma(1 + 1 / process.shape, size=scenario.num_machines) ** (1 / process.shape)
        days = scale_days * lives * rng.uniform(size=scenario.num_machines)
    machines = np.arange(scenario.num_machines)
    all_days, all_machines = [days[:0]], [machines[:0]]
    while True:
        in_time = days < scenario.duration_days
        days, machines = days[in_time], machines[in_time]
        if not len(days):
            return _single(np.concatenate(all_days), np.concatenate(all_machines), process.failure == "hardware")
        all_days.append(days)
        all_machines.append(machines)
        days = days + scale_days * rng.weibull(process.shape, len(days))


def _single(
    days: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    machines: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    is_hardware: bool,
) -> Iterator[Failure]:
    times_us = (days * DAY_S * 1e6).astype(np.int64).tolist()
    for at_us, machine in zip(times_us, machines.tolist(), strict=True):
        yield Failure(at_us, is_hardware, (machine,))


def _domains(process: DomainFailures, scenario: Scenario, rng: np.random.Generator) -> Iterator[Failure]:
    assert scenario.domains is not None, "checked by Scenario"
    domains = scenario.domains.members(scenario.num_machines)
    count = rng.poisson(process.per_domain_per_day * len(domains) * scenario.duration_days)
    days = rng.uniform(0, scenario.duration_days, count)
    for day, index in zip(days.tolist(), rng.integers(0, len(domains), count).tolist(), strict=True):
        members = domains[index]
        hit = rng.uniform(size=len(members)) < process.share
        machines = tuple(machine for machine, is_hit in zip(members, hit.tolist(), strict=True) if is_hit)
        if machines:
            yield Failure(int(day * DAY_S * 1e6), process.failure == "hardware", machines)


def _trace(process: TraceFailures, scenario: Scenario) -> Iterator[Failure]:
    for failure in process.failures:
        if failure.time_s < scenario.duration_days * DAY_S:
            yield Failure(round(failure.time_s * 1e6), failure.failure == "hardware", failure.machines)
