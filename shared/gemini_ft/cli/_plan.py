"""What `gemini-ft plan` finds out, as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning.erasure import ErasureCode
from gemini_ft.planning.failure_domains import Arrangement, arrange
from gemini_ft.planning.interleaving import Prediction, Scheme, pacing_of, predict
from gemini_ft.planning.placement import Strategy, best_placement, build_placement, held_shards, replica_sets
from gemini_ft.planning.probability import NoExactMethodError, recovery_probability, recovery_probability_domains
from gemini_ft.planning.profile import IdleProfile
from gemini_ft.planning.schedule import jitter_effect, partition, smallest_interval
from gemini_ft.planning.topology import Topology

__all__ = ["DomainRisk", "Plan", "RedundancyOption", "SchedulePlan", "make_plan", "plan_schedule"]


@dataclass(frozen=True, slots=True)
class RedundancyOption:
    """One way to keep copies. `probabilities`: number of nodes lost at once -> probability of recovery from memory.

    Shards of one version: what a node keeps on average and at most, sends, and receives at most.
    """

    label: str
    is_chosen: bool
    num_sets: int
    probabilities: dict[int, float]
    kept_shards_mean: float
    kept_shards_max: float
    sent_shards: float
    received_shards_max: float


@dataclass(frozen=True, slots=True)
class DomainRisk:
    """Replica sets at one level of failure domains. `probabilities`: number of whole domains lost -> probability of
    recovery from memory, sampled if `is_estimate`.
    """

    level: str
    num_domains: int
    num_sets: int
    num_sets_sharing: int
    num_sets_inside: int
    probabilities: dict[int, float]
    is_estimate: bool


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """A checkpoint of every iteration on an idle profile, for one rank.

    `interval`: the smallest number of iterations that one checkpoint fits into; None: into none, for `reason`.
    `overrun_probability` is that of the span which is most likely too short, `delay_s` the expected delay a
    checkpoint; both None where the profile has no deviations.
    """

    interval: int | None
    reason: str | None
    idle_s: float
    traffic_s: float
    num_chunks: int
    overrun_probability: float | None
    delay_s: float | None
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster as planned. `names`: slot -> node. Group placement is an option where m divides N."""

    num_nodes: int
    num_replicas: int
    strategy: Strategy
    placement: Placement
    names: Mapping[int, str]
    options: tuple[RedundancyOption, ...]
    arrangement: Arrangement | None
    domains: tuple[DomainRisk, ...]


def make_plan(num_nodes: int, num_replicas: int, strategy: Strategy | None, topology: Topology | None) -> Plan:
    """Plan a placement; `strategy` None takes the best.

    Raises:
        ConfigurationError: the numbers do not suit the strategy or the topology.
    """
    if strategy is None:
        strategy, placement = best_placement(num_nodes, num_replicas)
    else:
        placement = build_placement(strategy, num_nodes, num_replicas)
    options = [
        _option(candidate, num_nodes, num_replicas, is_chosen=candidate is strategy)
        for candidate in Strategy
        if candidate is not Strategy.GROUP or num_nodes % num_replicas == 0
    ]
    options += _coded(num_nodes, num_replicas)
    arrangement = None if topology is None else arrange(topology, placement)
    return Plan(
        num_nodes=num_nodes,
        num_replicas=num_replicas,
        strategy=strategy,
        placement=placement,
        names={slot: str(slot) for slot in placement} if arrangement is None else arrangement.slots,
        options=tuple(options),
        arrangement=arrangement,
        domains=() if topology is None or arrangement is None else tuple(_risks(topology, arrangement)),
    )


def plan_schedule(profile: IdleProfile, num_replicas: int) -> SchedulePlan:
    """Plan the traffic of one rank.

    Raises:
        ConfigurationError: no replica at all.
    """
    pacing = pacing_of(profile)
    chunks = partition(profile.spans_s, profile.shard_bytes, num_replicas, **pacing)
    predictions = tuple(predict(profile, scheme, num_replicas) for scheme in Scheme)
    interval, reason, overrun, delay_s = None, None, None, None
    try:
        interval = smallest_interval(profile.spans_s, profile.shard_bytes, num_replicas, **pacing)
    except ConfigurationError as error:
        reason = str(error)
    if any(span.std_s for span in profile.spans):
        effect = jitter_effect(
            profile.spans_s,
            [span.std_s for span in profile.spans],
            chunks,
            bandwidth_bytes_per_s=pacing["bandwidth_bytes_per_s"],
            latency_s=pacing["latency_s"],
        )
        overrun, delay_s = max(effect.overrun_probability), effect.expected_delay_s
    return SchedulePlan(
        interval=interval,
        reason=reason,
        idle_s=profile.idle_s,
        traffic_s=next(one.traffic_s for one in predictions if one.scheme is Scheme.PIPELINED),
        num_chunks=len(chunks),
        overrun_probability=overrun,
        delay_s=delay_s,
        predictions=predictions,
    )


def _losses(num_nodes: int, num_replicas: int) -> range:
    return range(num_replicas, min(num_replicas + 2, num_nodes) + 1)


def _option(strategy: Strategy, num_nodes: int, num_replicas: int, *, is_chosen: bool) -> RedundancyOption:
    placement = build_placement(strategy, num_nodes, num_replicas)
    kept = [len(shards) for shards in held_shards(placement).values()]
    return RedundancyOption(
        label=strategy.value,
        is_chosen=is_chosen,
        num_sets=len(replica_sets(placement)),
        probabilities={lost: float(recovery_probability(placement, lost)) for lost in _losses(num_nodes, num_replicas)},
        kept_shards_mean=sum(kept) / len(kept),
        kept_shards_max=max(kept),
        sent_shards=num_replicas - 1,
        received_shards_max=max(kept) - 1,
    )


def _coded(num_nodes: int, num_replicas: int) -> Iterator[RedundancyOption]:
    """Coded groups that need the memory of m replicas: 2m members of which any 2m - 2 may be lost."""
    num_members, num_losses = 2 * num_replicas, 2 * num_replicas - 2
    if num_losses < 1 or num_nodes < num_members:
        return
    code = ErasureCode(num_members, num_losses)
    yield RedundancyOption(
        label=f"coded, any {num_losses} of {num_members}",
        is_chosen=False,
        num_sets=len(code.groups(num_nodes)),
        probabilities={
            lost: float(code.recovery_probability(num_nodes, lost)) for lost in _losses(num_nodes, num_replicas)
        },
        kept_shards_mean=float(code.memory_factor),
        kept_shards_max=float(code.memory_factor),
        sent_shards=float(code.traffic_factor),
        received_shards_max=float(code.traffic_factor),
    )


def _risks(topology: Topology, arrangement: Arrangement) -> Iterator[DomainRisk]:
    for conflict in arrangement.conflicts:
        domains = {slot: topology.nodes[node][conflict.level] for slot, node in arrangement.slots.items()}
        num_domains = len(set(domains.values()))
        probabilities, is_estimate = {}, False
        for lost in range(1, min(2, num_domains - 1) + 1):
            try:
                exact = recovery_probability_domains(arrangement.placement, domains, lost)
                probabilities[lost] = float(exact)
            except NoExactMethodError:
                from gemini_ft.planning.monte_carlo import DomainFailures, estimate_recovery

                model = DomainFailures(domains, num_lost_domains=lost)
                probabilities[lost] = estimate_recovery(arrangement.placement, model).probability
                is_estimate = True
        yield DomainRisk(
            level=conflict.level,
            num_domains=num_domains,
            num_sets=conflict.num_sets,
            num_sets_sharing=conflict.num_sets_sharing,
            num_sets_inside=conflict.num_sets_inside,
            probabilities=probabilities,
            is_estimate=is_estimate,
        )
