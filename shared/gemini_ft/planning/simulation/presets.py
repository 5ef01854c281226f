"""Scenarios that come with the project: the paper's two clusters, the demo, and what lies beyond the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.simulation.demo_report import MeasuredPhases, MeasuredRecovery
from gemini_ft.planning.simulation.policies import Gemini, GeminiFT, HighFreq, Policy, Strawman
from gemini_ft.planning.simulation.scenario import (
    CodedGroups,
    DomainFailures,
    Domains,
    Machines,
    PersistentTier,
    PoissonFailures,
    Replicas,
    Scenario,
    UniformDelay,
)

__all__ = [
    "DEMO_RECOVERY",
    "PRESETS",
    "Variant",
    "at_size",
    "beyond_the_paper",
    "local_demo",
    "paper_p3dn_40b",
    "paper_p4d_100b",
    "policies",
    "preset",
]

DEMO_RECOVERY = MeasuredRecovery(
    software=MeasuredPhases(detection_s=0.085, coordination_s=0.350, retrieval_s=0.244, warm_up_s=1.954),
    hardware=MeasuredPhases(detection_s=0.704, coordination_s=1.148, retrieval_s=0.194, warm_up_s=1.347),
    stall_s=0.0074,
    re_replication_s=0.020,
)
"""One `gemini-ft demo` of version 0.1.0: 5.1 million parameters, four ranks on two shared cores, warm server."""

_PUBLISHED_FAILURES_PER_MACHINE_PER_DAY = 0.015
_FSX_BYTES_PER_S = 20e9 / 8
_SERIALIZATION_BYTES_PER_S = 75.2e9 / 81
_REPLACEMENT = UniformDelay(low_s=240, high_s=420)


def paper_p4d_100b() -> Scenario:
    """GPT-2 100B on 16 p4d.24xlarge (paper sections 7.1 to 7.3).

    75.2 GB a machine, 62 s an iteration of which 10 s are idle, 2.5 s of these for a replica (Figure 8), 20 Gbps of
    shared storage, 15 s to detect, 81 s to serialise a replica, 253 s of warm-up (Figure 14). Failures are software
    failures, as in Figure 15, of 1.5 % of the machines a day.
    """
    return Scenario(
        name="paper-p4d-100b",
        num_machines=16,
        iteration_s=62,
        idle_s=10.0,
        shard_bytes=75.2e9,
        network_bytes_per_s=75.2e9 / 2.5,
        serialization_bytes_per_s=_SERIALIZATION_BYTES_PER_S,
        detection_s=15,
        warm_up_s=253,
        failures=(PoissonFailures(failure="software", per_machine_per_day=_PUBLISHED_FAILURES_PER_MACHINE_PER_DAY),),
        machines=Machines(lead_time_s=_REPLACEMENT),
        persistent=PersistentTier(bandwidth_bytes_per_s=_FSX_BYTES_PER_S),
        policy=Gemini(),
    )


def paper_p3dn_40b() -> Scenario:
    """GPT-2 40B on 16 p3dn.24xlarge: 30 GB a machine (12 bytes a parameter), 45 s an iteration, 5.7 s of them idle,
    4.4 s of these for a replica (Figure 13). Detection, serialisation rate and warm-up, which the paper gives for p4d
    only, are taken from there.
    """
    return paper_p4d_100b().changed(
        name="paper-p3dn-40b",
        iteration_s=45,
        idle_s=5.7,
        shard_bytes=30e9,
        network_bytes_per_s=30e9 / 4.4,
    )


def local_demo() -> Scenario:
    """The demo's job on one laptop, as measured: a rank is killed every 5 minutes, a machine lost every 30.

    The rates of failures, the 5 s until a node is added and the storage are assumptions.
    """
    return Scenario(
        name="local-demo",
        num_machines=4,
        duration_days=1,
        iteration_s=0.615,
        shard_bytes=15_363_780,
        network_bytes_per_s=(512 << 20) / 0.34,
        serialization_bytes_per_s=_SERIALIZATION_BYTES_PER_S,
        detection_s=DEMO_RECOVERY.software.detection_s,
        warm_up_s=DEMO_RECOVERY.software.warm_up_s,
        failures=(
            PoissonFailures(failure="software", per_machine_per_day=288 / 4),
            PoissonFailures(failure="hardware", per_machine_per_day=48 / 4),
        ),
        machines=Machines(num_standbys=1, lead_time_s=5.0),
        persistent=PersistentTier(bandwidth_bytes_per_s=1e9),
        policy=GeminiFT(measured=DEMO_RECOVERY),
    )


PRESETS: dict[str, Callable[[], Scenario]] = {
    "paper-p4d-100b": paper_p4d_100b,
    "paper-p3dn-40b": paper_p3dn_40b,
    "local-demo": local_demo,
}


def preset(name: str) -> Scenario:
    """Return the preset `name`.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if name not in PRESETS:
        raise ConfigurationError(f"there is no preset {name!r}; choose from {', '.join(PRESETS)}")
    return PRESETS[name]()


def policies(scenario: Scenario) -> dict[str, Scenario]:
    """Return the scenario under each policy that is compared, by the name that tables show.

    HighFreq's interval is nine iterations on p4d, as the paper prints it, serialisation included; elsewhere the least
    number of iterations that holds a checkpoint. "Gemini-FT, cold" restarts processes as the paper does. Only
    "Gemini-FT" has a measured stall; where an iteration is as short as in the demo, that sets it back.
    """
    interval_s = 9 * scenario.iteration_s if scenario.name.startswith("paper-p4d-100b") else None
    compared: dict[str, Policy] = {
        "Strawman": Strawman(),
        "HighFreq": HighFreq(interval_s=interval_s),
        "GEMINI": Gemini(),
        "Gemini-FT, cold": GeminiFT(),
        "Gemini-FT": GeminiFT(measured=DEMO_RECOVERY),
    }
    return {name: scenario.changed(policy=policy) for name, policy in compared.items()}


def at_size(scenario: Scenario, num_machines: int) -> Scenario:
    """Return the scenario with more or fewer machines, and all else as it is.

    As in the paper's simulation, a machine keeps its shard, and an iteration and a persistent checkpoint take what
    they took: the storage's bandwidth grows with the number of machines.
    """
    bandwidth_bytes_per_s = scenario.persistent.bandwidth_bytes_per_s * num_machines / scenario.num_machines
    return scenario.changed(
        name=f"{scenario.name}, {num_machines:,} machines",
        num_machines=num_machines,
        persistent=scenario.persistent.model_copy(update={"bandwidth_bytes_per_s": bandwidth_bytes_per_s}),
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of a table: `axis` is what is varied, `label` to what."""

    axis: str
    label: str
    scenario: Scenario


def beyond_the_paper() -> tuple[Variant, ...]:
    """Return what the paper did not look at: size, restart, racks, redundancy and standbys, each varied alone.

    The base is the paper's p4d job on 1,000 machines under Gemini-FT with the demo's phases, a lower bound of what a
    warm restart of a job of that size takes; 1.5 % of the machines fail a day, half of them in hardware; racks of 32,
    each of which fails as a whole once in two years. These rates and racks are assumptions.
    """
    base = at_size(paper_p4d_100b(), 1000).changed(
        failures=(
            PoissonFailures(failure="software", per_machine_per_day=_PUBLISHED_FAILURES_PER_MACHINE_PER_DAY / 2),
            PoissonFailures(failure="hardware", per_machine_per_day=_PUBLISHED_FAILURES_PER_MACHINE_PER_DAY / 2),
            DomainFailures(per_domain_per_day=1 / 730),
        ),
        domains=Domains(num_machines=32),
        machines=Machines(num_standbys=4, lead_time_s=_REPLACEMENT),
        policy=GeminiFT(measured=DEMO_RECOVERY),
    )
    restarts: dict[str, Policy] = {
        "GEMINI as published": Gemini(),
        "nothing serialised, cold restart": GeminiFT(),
        "warm restart": GeminiFT(measured=DEMO_RECOVERY),
    }
    redundancies: dict[str, Replicas | CodedGroups] = {
        "m = 2": Replicas(),
        "m = 3": Replicas(num_replicas=3),
        "groups of 4, any 2 lost": CodedGroups(),
    }
    variants = [
        Variant(
            "size and restart",
            f"{num_machines:,} machines, {label}",
            at_size(base, num_machines).changed(policy=policy),
        )
        for num_machines in (1000, 10_000, 100_000)
        for label, policy in restarts.items()
    ]
    variants += [
        Variant(
            "redundancy and racks",
            f"{label}, {'racks apart' if are_spread else 'racks ignored'}",
            base.changed(redundancy=redundancy, domains=Domains(num_machines=32, are_spread=are_spread)),
        )
        for are_spread in (False, True)
        for label, redundancy in redundancies.items()
    ]
    variants += [
        Variant(
            "standbys",
            f"{num_standbys} standbys",
            base.changed(machines=Machines(num_standbys=num_standbys, lead_time_s=_REPLACEMENT)),
        )
        for num_standbys in (0, 1, 4, 32)
    ]
    return tuple(variants)
