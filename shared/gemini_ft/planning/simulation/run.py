"""Many seeds of a scenario, on several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.simulation.job import simulate
from gemini_ft.planning.simulation.results import RunResult, Summary, summarize
from gemini_ft.planning.simulation.scenario import Scenario

__all__ = ["run_scenario", "run_seeds"]

_BATCHES_A_PROCESS = 8


def run_scenario(
    scenario: Scenario,
    num_seeds: int = 100,
    *,
    first_seed: int = 0,
    num_processes: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Summary:
    """Simulate seeds first_seed, first_seed + 1, ... and return their means; see `run_seeds`."""
    results = run_seeds(
        scenario, num_seeds, first_seed=first_seed, num_processes=num_processes, on_progress=on_progress
    )
    return summarize(scenario.name, results)


def run_seeds(
    scenario: Scenario,
    num_seeds: int = 100,
    *,
    first_seed: int = 0,
    num_processes: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[RunResult]:
    """Return one result a seed, in order of the seeds and the same whatever the number of processes.

    `num_processes` None takes all processors that this process may use. `on_progress` is called with the number of
    seeds that have just been finished.

    Raises:
        ConfigurationError: fewer than one seed or process, a negative seed, or a scenario whose policy cannot work.
    """
    if num_processes is None:
        num_processes = len(os.sched_getaffinity(0))
    for name, value, least in (
        ("num_seeds", num_seeds, 1),
        ("num_processes", num_processes, 1),
        ("seed", first_seed, 0),
    ):
        if value < least:
            raise ConfigurationError(f"{name} is {value}; give at least {least}")
    seeds = range(first_seed, first_seed + num_seeds)
    report = on_progress or (lambda num_finished: None)
    if min(num_processes, num_seeds) == 1:
        results = []
        for seed in seeds:
            results.append(simulate(scenario, seed))
            report(1)
        return results
    size = max(1, num_seeds // (num_processes * _BATCHES_A_PROCESS))
    batches = [seeds[first : first + size] for first in range(0, num_seeds, size)]
    found: dict[int, list[RunResult]] = {}
    # A forked child of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(batches)), mp_context=context) as pool:
        futures = {pool.submit(_simulate_all, scenario, batch): index for index, batch in enumerate(batches)}
        try:
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                report(len(batches[futures[future]]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [result for index in range(len(batches)) for result in found[index]]


def _simulate_all(scenario: Scenario, seeds: Sequence[int]) -> list[RunResult]:
    return [simulate(scenario, seed) for seed in seeds]
