"""Which slots hold which shards (paper section 4).

Four strategies, all of which keep one replica at home. What decides how many failures a placement survives is the
number of its distinct replica sets: losing all slots of one set loses its shards (Theorem 1).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement

__all__ = [
    "Strategy",
    "best_placement",
    "build_placement",
    "group_placement",
    "held_shards",
    "mixed_placement",
    "replica_sets",
    "ring_placement",
    "share_placement",
]


class Strategy(enum.StrEnum):
    """How slots are put into replica sets."""

    GROUP = "group"
    RING = "ring"
    MIXED = "mixed"
    SHARE = "share"


def group_placement(num_slots: int, num_replicas: int) -> Placement:
    """Return disjoint groups of m slots that hold each other's shards: N / m sets, the optimum (Theorem 1).

    Raises:
        ConfigurationError: the slots cannot be divided into groups of m.
    """
    _check(num_slots, num_replicas)
    if num_slots % num_replicas:
        raise ConfigurationError(
            f"group placement needs a number of nodes that num_replicas divides, but {num_slots} nodes with "
            f"num_replicas {num_replicas} leave {num_slots % num_replicas} over; use mixed or share"
        )
    return _groups(num_slots, num_replicas)


def ring_placement(num_slots: int, num_replicas: int) -> Placement:
    """Return the ring: slot i is held by i and the m - 1 slots after it (paper section 7.2), N sets.

    Raises:
        ConfigurationError: fewer slots than replicas, or no replica at all.
    """
    _check(num_slots, num_replicas)
    return _ring(range(num_slots), num_replicas)


def mixed_placement(num_slots: int, num_replicas: int) -> Placement:
    """Return slot -> the `num_replicas` slots that hold its shards, itself first.

    Groups of m slots hold each other's shards; when m does not divide N, the last group takes the N mod m slots that
    are left and is a ring of m copies (paper section 4, Algorithm 1). Every slot sends and receives m - 1 replicas.
    For N < 2m there is one group: all slots.

    Raises:
        ConfigurationError: fewer slots than replicas, or no replica at all.
    """
    _check(num_slots, num_replicas)
    first_of_last_group = (num_slots // num_replicas - 1) * num_replicas
    last_group = range(first_of_last_group, num_slots)
    return _groups(first_of_last_group, num_replicas) | _ring(last_group, num_replicas)


def share_placement(num_slots: int, num_replicas: int) -> Placement:
    """Return groups of m, and one set more for the q = N mod m slots that are left, filled up from the first group.

    That is ceil(N / m) sets, the lower bound of Theorem 1, at a price: m - q slots of the first group hold m + q
    replicas, and the q slots that were left hold q. Not in the paper; group placement when m divides N.

    Raises:
        ConfigurationError: fewer slots than replicas, or no replica at all.
    """
    _check(num_slots, num_replicas)
    num_left = num_slots % num_replicas
    grouped = num_slots - num_left
    if not num_left:
        return _groups(num_slots, num_replicas)
    last_set = _ring([*range(grouped, num_slots), *range(num_replicas - num_left)], num_replicas)
    return _groups(grouped, num_replicas) | {slot: last_set[slot] for slot in range(grouped, num_slots)}


_BUILDERS = {
    Strategy.GROUP: group_placement,
    Strategy.RING: ring_placement,
    Strategy.MIXED: mixed_placement,
    Strategy.SHARE: share_placement,
}


def build_placement(strategy: Strategy, num_slots: int, num_replicas: int) -> Placement:
    """Return the placement of `strategy`: slot -> the slots that hold its shards, itself first.

    Raises:
        ConfigurationError: the numbers do not suit the strategy.
    """
    return _BUILDERS[strategy](num_slots, num_replicas)


def best_placement(num_slots: int, num_replicas: int) -> tuple[Strategy, Placement]:
    """Return the placement that most probably survives the loss of m slots, the better balanced one among equals.

    With m losses exactly the replica sets themselves are fatal, so the fewest distinct sets win (Theorem 1).

    Raises:
        ConfigurationError: fewer slots than replicas, or no replica at all.
    """
    _check(num_slots, num_replicas)
    strategies = [Strategy.MIXED, Strategy.SHARE, Strategy.RING]
    if num_slots % num_replicas == 0:
        strategies.insert(0, Strategy.GROUP)

    def cost(candidate: tuple[Strategy, Placement]) -> tuple[int, int]:
        placement = candidate[1]
        return len(replica_sets(placement)), max(map(len, held_shards(placement).values()))

    return min(((strategy, build_placement(strategy, num_slots, num_replicas)) for strategy in strategies), key=cost)


def replica_sets(placement: Placement) -> tuple[frozenset[int], ...]:
    """Return the distinct sets of slots whose joint loss loses shards, in ascending order of their sorted members.

    Raises:
        ConfigurationError: a slot has no holder, or a holder that is not a slot of the placement.
    """
    for slot, holders in placement.items():
        if not holders:
            raise ConfigurationError(f"slot {slot} has no holder; name the slots that hold its shards, itself first")
        for holder in holders:
            if holder not in placement:
                raise ConfigurationError(f"slot {slot} is held by {holder}, which is not a slot of the placement")
    return tuple(sorted({frozenset(holders) for holders in placement.values()}, key=sorted))


def held_shards(placement: Placement) -> dict[int, tuple[int, ...]]:
    """Return holder -> the slots whose shards it holds, itself first, then in ascending order."""
    held: dict[int, list[int]] = {slot: [] for slot in placement}
    for slot in sorted(placement):
        for holder in placement[slot]:
            held[holder].append(slot)
    return {holder: tuple(sorted(slots, key=lambda slot: (slot != holder, slot))) for holder, slots in held.items()}


def _check(num_slots: int, num_replicas: int) -> None:
    if num_replicas < 1:
        raise ConfigurationError(f"num_replicas is {num_replicas}; it counts the local copy, so give at least 1")
    if num_slots < num_replicas:
        raise ConfigurationError(
            f"num_replicas is {num_replicas}, but num_nodes is {num_slots}: every copy needs a node of its own; "
            f"give num_replicas of at most {num_slots}, or more nodes"
        )


def _ring(members: Sequence[int], num_replicas: int) -> Placement:
    """Each member is held by itself and the members after it, the first following the last."""
    size = len(members)
    return {
        member: tuple(members[(position + distance) % size] for distance in range(num_replicas))
        for position, member in enumerate(members)
    }


def _groups(num_slots: int, num_replicas: int) -> Placement:
    placement: Placement = {}
    for first in range(0, num_slots, num_replicas):
        placement |= _ring(range(first, first + num_replicas), num_replicas)
    return placement
