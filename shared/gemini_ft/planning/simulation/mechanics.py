"""What a policy does in a scenario, in seconds: the numbers that the simulation and the closed forms run on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.simulation.policies import Gemini, GeminiFT, HighFreq, Strawman
from gemini_ft.planning.simulation.scenario import Scenario
from gemini_ft.planning.wasted_time import CheckpointCosts, transfer_time_s

__all__ = ["Mechanics", "Phases", "mechanics_of"]


@dataclass(frozen=True, slots=True)
class Phases:
    """A recovery, in this order; the wait for machines lies between serialisation and retrieval."""

    detection_s: float
    coordination_s: float
    serialization_s: float
    retrieval_s: float
    warm_up_s: float

    @property
    def fixed_s(self) -> float:
        """All but the retrieval, without a wait for machines."""
        return self.detection_s + self.coordination_s + self.serialization_s + self.warm_up_s


@dataclass(frozen=True, slots=True)
class Mechanics:
    """A policy, applied to a scenario.

    In each interval of wall time training runs, then waits for `stall_s` while the state is taken; the version is
    complete `write_s` later. `software` retrieves from the own memory and `hardware` from peers if `is_in_memory`;
    everything else comes from the persistent tier, in `persistent_s` if no other traffic of the job is there.
    `order_after_s`: from a known loss to the order of a machine. `re_replication_s`: from the retrieval to whole
    redundancy; None: with the first version after the restart.
    """

    is_in_memory: bool
    interval_s: float
    stall_s: float
    write_s: float
    software: Phases
    hardware: Phases
    persistent_s: float
    order_after_s: float
    re_replication_s: float | None

    def costs(self, iteration_s: float) -> CheckpointCosts:
        """Costs of a software failure, for the closed forms."""
        retrieval_s = self.software.retrieval_s if self.is_in_memory else self.persistent_s
        return CheckpointCosts(
            iteration_s=iteration_s,
            interval_s=self.interval_s,
            write_s=self.write_s,
            retrieval_s=retrieval_s,
            serialization_s=self.stall_s,
            recovery_s=self.software.fixed_s,
        )


def mechanics_of(scenario: Scenario) -> Mechanics:
    """Apply the scenario's policy.

    Raises:
        ConfigurationError: the policy's interval is shorter than a write or an iteration (equation 2).
    """
    policy = scenario.policy
    if isinstance(policy, Strawman | HighFreq):
        mechanics = _persistent(scenario, policy)
    else:
        mechanics = _in_memory(scenario, policy)
    try:
        mechanics.costs(scenario.iteration_s)
    except ConfigurationError as error:
        raise ConfigurationError(f"policy {policy.kind} of scenario {scenario.name}: {error}") from None
    return mechanics


def _persistent(scenario: Scenario, policy: Strawman | HighFreq) -> Mechanics:
    persistent_s = _persistent_s(scenario)
    if isinstance(policy, HighFreq):
        stall_s = scenario.shard_bytes / scenario.serialization_bytes_per_s
        shortest_s = max(persistent_s + stall_s, scenario.iteration_s)
        interval_s = policy.interval_s or math.ceil(shortest_s / scenario.iteration_s) * scenario.iteration_s
    else:
        stall_s, interval_s = 0.0, policy.interval_s
    phases = Phases(scenario.detection_s, 0.0, 0.0, 0.0, scenario.warm_up_s)
    return Mechanics(
        is_in_memory=False,
        interval_s=interval_s,
        stall_s=stall_s,
        write_s=persistent_s,
        software=phases,
        hardware=phases,
        persistent_s=persistent_s,
        order_after_s=0.0,
        re_replication_s=None,
    )


def _in_memory(scenario: Scenario, policy: Gemini | GeminiFT) -> Mechanics:
    shard_s = transfer_time_s(scenario.shard_bytes, scenario.network_bytes_per_s)
    sent_s = scenario.redundancy.sent_shards * shard_s
    num_iterations = 1 if scenario.idle_s is None else max(1, math.ceil(sent_s / scenario.idle_s))
    interval_s = num_iterations * scenario.iteration_s
    if isinstance(policy, Gemini):
        kept_bytes = scenario.redundancy.kept_shards * scenario.shard_bytes
        save_s = kept_bytes / scenario.serialization_bytes_per_s
        software = Phases(scenario.detection_s, 0.0, save_s, 0.0, scenario.warm_up_s)
        hardware = Phases(scenario.detection_s, 0.0, save_s, shard_s, scenario.warm_up_s)
        stall_s, order_after_s, re_replication_s = 0.0, save_s, None
    elif policy.measured is None:
        software = Phases(scenario.detection_s, 0.0, 0.0, 0.0, scenario.warm_up_s)
        hardware = Phases(scenario.detection_s, 0.0, 0.0, shard_s, scenario.warm_up_s)
        stall_s, order_after_s, re_replication_s = 0.0, 0.0, sent_s
    else:
        measured = policy.measured
        # Nobody has measured loading shards of this size: it is taken to be no faster than the network.
        software, hardware = (
            Phases(phases.detection_s, phases.coordination_s, 0.0, max(phases.retrieval_s, shard_s), phases.warm_up_s)
            for phases in (measured.software, measured.hardware)
        )
        stall_s, order_after_s = measured.stall_s, 0.0
        re_replication_s = max(measured.re_replication_s, sent_s)
    return Mechanics(
        is_in_memory=True,
        interval_s=interval_s,
        stall_s=stall_s,
        write_s=interval_s,
        software=software,
        hardware=hardware,
        persistent_s=_persistent_s(scenario),
        order_after_s=order_after_s,
        re_replication_s=re_replication_s,
    )


def _persistent_s(scenario: Scenario) -> float:
    share = scenario.persistent.bandwidth_bytes_per_s / (1 + scenario.persistent.num_other_transfers)
    return transfer_time_s(scenario.shard_bytes, share, scenario.num_machines)
