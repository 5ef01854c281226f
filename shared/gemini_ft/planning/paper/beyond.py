"""What the paper did not look at: size, warm restart, racks, redundancy and standbys, simulated and exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemini_ft.planning.erasure import ErasureCode
from gemini_ft.planning.placement import best_placement
from gemini_ft.planning.probability import recovery_probability
from gemini_ft.planning.simulation.presets import beyond_the_paper
from gemini_ft.planning.simulation.results import Summary
from gemini_ft.planning.simulation.run import run_scenario

__all__ = ["Beyond", "RedundancyRow", "SimulatedRow", "beyond", "redundancy_rows"]

_NUM_SEEDS = 4
_MACHINE_DAYS = 120_000
"""What a run simulates: larger clusters, which fail more often, for fewer days."""


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """One variant; `axis` is what is varied, `label` to what."""

    axis: str
    label: str
    num_days: float
    summary: Summary


@dataclass(frozen=True, slots=True)
class RedundancyRow:
    """One kind of redundancy: what a machine keeps and sends of a version, in shards, and the exact probability of
    recovery from memory by the number of machines that are lost at once.
    """

    num_machines: int
    label: str
    kept_shards: float
    sent_shards: float
    probabilities: dict[int, float]


@dataclass(frozen=True, slots=True)
class Beyond:
    """Both tables."""

    simulated: Sequence[SimulatedRow]
    redundancy: Sequence[RedundancyRow]


def beyond(on_progress: Callable[[str], None] = lambda label: None) -> Beyond:
    """Simulate every variant, telling `on_progress` which one begins; the same result each time."""
    simulated = []
    for variant in beyond_the_paper():
        on_progress(variant.label)
        num_days = _MACHINE_DAYS / variant.scenario.num_machines
        summary = run_scenario(variant.scenario.changed(duration_days=num_days), _NUM_SEEDS, num_processes=1)
        simulated.append(SimulatedRow(variant.axis, variant.label, num_days, summary))
    return Beyond(simulated, [row for size in (16, 1000) for row in redundancy_rows(size)])


def redundancy_rows(num_machines: int) -> list[RedundancyRow]:
    """Return m = 2, m = 3 and coded groups of 4 that survive any 2 losses, with 2 to 4 of `num_machines` lost."""
    rows = []
    for num_replicas in (2, 3):
        _, placement = best_placement(num_machines, num_replicas)
        probabilities = {lost: float(recovery_probability(placement, lost)) for lost in (2, 3, 4)}
        rows.append(RedundancyRow(num_machines, f"m = {num_replicas}", num_replicas, num_replicas - 1, probabilities))
    code = ErasureCode(4, 2)
    rows.append(
        RedundancyRow(
            num_machines,
            "groups of 4, any 2 lost",
            float(code.memory_factor),
            float(code.traffic_factor),
            {lost: float(code.recovery_probability(num_machines, lost)) for lost in (2, 3, 4)},
        )
    )
    return rows
