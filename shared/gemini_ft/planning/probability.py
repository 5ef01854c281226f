"""How probably a job recovers from the memory that is left, exactly (paper section 4).

Shards are lost when all slots of one replica set are. The answers are fractions, for any placement whose sets fall
apart into groups, rings and other narrow components, also after relabelling: all strategies, at any size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from fractions import Fraction

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning._counting import NoExactMethodError, num_survivable, survival_probability
from gemini_ft.planning.placement import replica_sets

__all__ = [
    "NoExactMethodError",
    "all_down_rate_per_s",
    "check_num_lost",
    "corollary_1",
    "num_survivable_losses",
    "number_domains",
    "recovery_probability",
    "recovery_probability_domains",
    "recovery_probability_independent",
    "set_loss_rate_per_s",
]


def num_survivable_losses(placement: Placement, num_lost: int) -> int:
    """Return after how many of the C(N, k) losses of k = `num_lost` slots every shard has a copy left.

    Raises:
        ConfigurationError: `num_lost` is not within 0 and N.
        NoExactMethodError: the replica sets overlap too much to count; use Monte Carlo.
    """
    check_num_lost(num_lost, len(placement), "nodes")
    return num_survivable(len(placement), replica_sets(placement), num_lost)


def recovery_probability(placement: Placement, num_lost: int) -> Fraction:
    """Return the probability that every shard has a copy left after the loss of `num_lost` slots, all equally likely.

    Raises: as `num_survivable_losses`.
    """
    return Fraction(num_survivable_losses(placement, num_lost), math.comb(len(placement), num_lost))


def recovery_probability_domains(
    placement: Placement, domains: Mapping[int, Hashable], num_lost_domains: int
) -> Fraction:
    """Return the probability of recovery after the loss of whole failure domains, all choices equally likely.

    `domains` maps each slot to its domain (rack, zone); domains without a slot of the placement do not count.

    Raises:
        ConfigurationError: a slot has no domain, or `num_lost_domains` is not within 0 and their number.
        NoExactMethodError: too many domains overlap; use Monte Carlo.
    """
    number = number_domains(placement, domains)
    num_domains = len(set(number.values()))
    check_num_lost(num_lost_domains, num_domains, "failure domains")
    sets = {frozenset(number[slot] for slot in members) for members in replica_sets(placement)}
    return Fraction(num_survivable(num_domains, sets, num_lost_domains), math.comb(num_domains, num_lost_domains))


def recovery_probability_independent(placement: Placement, node_loss_probability: float) -> float:
    """Return the probability of recovery when each slot is lost independently with `node_loss_probability`.

    Raises:
        ConfigurationError: the probability is not within 0 and 1.
        NoExactMethodError: the replica sets overlap too much; use Monte Carlo.
    """
    if not 0 <= node_loss_probability <= 1:
        raise ConfigurationError(f"node_loss_probability is {node_loss_probability:g}; give a number from 0 to 1")
    return survival_probability(len(placement), replica_sets(placement), node_loss_probability)


def corollary_1(num_slots: int, num_replicas: int, num_lost: int) -> Fraction:
    """Return the paper's probability of recovery for group placement (Corollary 1, equation 3).

    Exact for k < 2m; a lower bound for k >= 2m, where it counts a loss of two groups twice.

    Raises:
        ConfigurationError: m does not divide N, where the formula is not even a bound, or k is not within 0 and N.
    """
    if num_replicas < 1 or num_slots < num_replicas or num_slots % num_replicas:
        raise ConfigurationError(
            f"Corollary 1 holds only where num_replicas divides the number of nodes, but they are {num_replicas} and "
            f"{num_slots}; use recovery_probability"
        )
    check_num_lost(num_lost, num_slots, "nodes")
    if num_lost < num_replicas:
        return Fraction(1)
    num_groups = num_slots // num_replicas
    fatal = num_groups * math.comb(num_slots - num_replicas, num_lost - num_replicas)
    return max(Fraction(0), 1 - Fraction(fatal, math.comb(num_slots, num_lost)))


def set_loss_rate_per_s(placement: Placement, node_failures_per_s: float, exposure_s: float) -> float:
    """Return how often per second all slots of a replica set are down at once, failures being independent.

    A failed slot is exposed for `exposure_s`, until its shards have all their replicas again. Leading order in
    node_failures_per_s * exposure_s (small), and an upper bound where sets overlap.

    Raises:
        ConfigurationError: a rate or an exposure is negative.
    """
    return sum(
        all_down_rate_per_s(len(members), node_failures_per_s, exposure_s) for members in replica_sets(placement)
    )


def all_down_rate_per_s(num_members: int, node_failures_per_s: float, exposure_s: float) -> float:
    """Return how often per second `num_members` nodes come to be down at once: m L (L W)^(m - 1).

    L is `node_failures_per_s`, W is `exposure_s`; leading order in L W.

    Raises:
        ConfigurationError: a rate or an exposure is negative.
    """
    if node_failures_per_s < 0 or exposure_s < 0:
        raise ConfigurationError(
            f"node_failures_per_s is {node_failures_per_s:g} and exposure_s is {exposure_s:g}; neither can be negative"
        )
    down = node_failures_per_s * exposure_s
    return float(num_members * node_failures_per_s * down ** (num_members - 1))


def number_domains(slots: Iterable[int], domains: Mapping[int, Hashable]) -> dict[int, int]:
    """Return slot -> the number of its domain, counted from 0 in the order of the slots.

    Raises:
        ConfigurationError: a slot has no domain.
    """
    numbers: dict[Hashable, int] = {}
    number = {}
    for slot in slots:
        if slot not in domains:
            raise ConfigurationError(f"slot {slot} has no failure domain; name one for each slot")
        number[slot] = numbers.setdefault(domains[slot], len(numbers))
    return number


def check_num_lost(num_lost: int, num_all: int, what: str) -> None:
    """Refuse a number of losses that is not within 0 and `num_all`, with a sentence about `what` is lost.

    Raises:
        ConfigurationError: it is not.
    """
    if not 0 <= num_lost <= num_all:
        raise ConfigurationError(f"{num_lost} lost {what} is not possible: there are {num_all}; give 0 to {num_all}")
