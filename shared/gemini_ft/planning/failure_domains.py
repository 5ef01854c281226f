"""Which node sits in which slot, so that a rack, zone or parallel group that fails takes as little as possible along.

A replica set is lost when all its members are. The paper takes all sets of lost machines as equally likely, so that
any choice of members is as good as another (section 4): keeping the members of a set in different failure domains
costs nothing there, and makes all the difference when a domain fails as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning._dealing import Structure, deals, is_hierarchy, levelled, plan_level
from gemini_ft.planning._seating import EMPTY, Problem, Search, improve
from gemini_ft.planning.placement import Strategy, build_placement, replica_sets
from gemini_ft.planning.topology import Topology

__all__ = ["Arrangement", "LevelConflicts", "arrange", "conflicts", "refill", "spread"]

# Limits on the work of one arrangement, about a second in all.
_MAX_SEARCHED_SLOTS = 10
_MAX_SEARCH_STEPS = 50_000
_MAX_SWAPS = 40_000


@dataclass(frozen=True, slots=True)
class LevelConflicts:
    """Replica sets with two or more members in one domain of `level`, and those of which all are: one failure of that
    domain loses their shards. Of `num_unlabelled` seated nodes the domain is not known; they count as apart.
    """

    level: str
    num_sets: int
    num_sets_sharing: int
    num_sets_inside: int
    num_unlabelled: int = 0


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Nodes in the slots of a placement.

    Levels count in their order: at each, first as few sets as possible lie inside one domain, then as few pairs of
    members as possible share one. `is_optimal` is True only if no arrangement is better, by proof. `reason` is None
    when no set shares a domain; otherwise it says why, and what the compromise is.
    """

    placement: Placement
    slots: dict[int, str]
    spares: tuple[str, ...]
    conflicts: tuple[LevelConflicts, ...]
    is_optimal: bool
    reason: str | None

    def holders(self) -> dict[str, tuple[str, ...]]:
        """Return node -> the nodes that hold its shards, itself first."""
        return {
            self.slots[slot]: tuple(self.slots[holder] for holder in holders)
            for slot, holders in self.placement.items()
        }


def spread(topology: Topology, strategy: Strategy, num_replicas: int, *, num_slots: int | None = None) -> Arrangement:
    """Return the placement of `strategy` with the topology's nodes in its slots; see `arrange`.

    `num_slots` of the nodes are seated, by default all of them.

    Raises:
        ConfigurationError: the numbers do not suit the strategy, or there are fewer nodes than slots.
    """
    wanted = len(topology.nodes) if num_slots is None else num_slots
    return arrange(topology, build_placement(strategy, wanted, num_replicas))


def arrange(topology: Topology, placement: Placement) -> Arrangement:
    """Choose a node for each slot so that members of a replica set are in different domains whenever that is possible.

    For one level, and for a hierarchy of levels with disjoint sets, such an arrangement is found whenever there is one,
    and the best compromise otherwise (but for more than 16 slots whose sets overlap, as in a ring: there a good one).
    Elsewhere a bounded, deterministic search does what it can. Nodes stay in the order given if that is as good.

    Raises:
        ConfigurationError: fewer nodes than slots, or sets of different sizes.
    """
    num_nodes, num_slots = len(topology.nodes), len(placement)
    if num_nodes < num_slots:
        raise ConfigurationError(
            f"{num_slots} slots need as many nodes, but the topology has {num_nodes}; add nodes or take fewer slots"
        )
    problem = _problem(topology, placement)
    structure = Structure(problem)
    plans = [plan_level(problem, structure, level) for level in range(len(topology.levels))]
    target = problem.total([plan.bound for plan in plans])
    seats = list(range(num_nodes))
    if problem.cost(seats) > target:
        seats = min([seats, *deals(problem, structure, plans)], key=problem.cost)
    if not structure.tangle and is_hierarchy(problem):
        target = problem.cost(seats)
    seats, is_optimal = _refined(problem, seats, range(num_slots), target)
    found = _conflicts(problem, topology, seats)
    why = []
    for level, conflict in enumerate(found):
        if conflict.num_sets_sharing:
            obstacle = _obstacle(problem, structure, plans[level].bound, topology, level, is_optimal)
            why.append(f"{obstacle}, so {_compromise(conflict, is_optimal)}")
    return _arrangement(topology, placement, seats, found, is_optimal, why)


def refill(topology: Topology, placement: Placement, slots: Mapping[int, str]) -> Arrangement:
    """Fill the slots that `slots` leaves vacant from the topology's other nodes, so that fewest members meet.

    Seated nodes stay where they are. The best spare is found for one vacant slot, the first of them among equals; for
    several, a bounded search says by `is_optimal` whether it has tried everything.

    Raises:
        ConfigurationError: too few spares, a node or slot that is not known, or a node in two slots.
    """
    problem = _problem(topology, placement)
    seats = _seated(topology, placement, slots)
    vacant = [slot for slot in range(problem.num_slots) if seats[slot] == EMPTY]
    seated = set(seats)
    spares = [node for node in range(len(topology.nodes)) if node not in seated]
    if len(spares) < len(vacant):
        raise ConfigurationError(
            f"{len(vacant)} slots are vacant, slot {vacant[0]} first, but {len(spares)} nodes are spare; add nodes"
        )
    target = problem.cost(seats)
    waiting: dict[tuple[int, ...], list[int]] = {}
    for spare in reversed(spares):
        waiting.setdefault(problem.kind(spare), []).append(spare)
    for slot in vacant:
        firsts = [of_kind[-1] for of_kind in waiting.values() if of_kind]
        seats[slot] = min(firsts, key=lambda spare: (problem.added(slot, spare, seats), spare))
        waiting[problem.kind(seats[slot])].pop()
    seats, is_optimal = _refined(problem, seats, vacant, target)
    found = _conflicts(problem, topology, seats)
    why = [
        f"the seated nodes stay where they are, and {_compromise(conflict, is_optimal)}"
        for conflict in found
        if conflict.num_sets_sharing
    ]
    return _arrangement(topology, placement, seats, found, is_optimal, why)


def conflicts(topology: Topology, placement: Placement, slots: Mapping[int, str]) -> tuple[LevelConflicts, ...]:
    """Return what the sets share at each level of the topology, with these nodes in the slots.

    Raises:
        ConfigurationError: as in `refill`.
    """
    return _conflicts(_problem(topology, placement), topology, _seated(topology, placement, slots))


def _problem(topology: Topology, placement: Placement) -> Problem:
    sets = [tuple(sorted(members)) for members in replica_sets(placement)]
    if sorted(placement) != list(range(len(placement))) or len(set(map(len, sets))) != 1:
        raise ConfigurationError("a placement must have the slots 0 to N - 1, and the same number of holders for each")
    domains = []
    for level in topology.levels:
        numbers: dict[str, int] = {}
        of_nodes = []
        for number, labels in enumerate(topology.nodes.values()):
            # A node without the label gets a domain to itself; the node's number keeps it from meeting any other.
            domain = labels.get(level)
            of_nodes.append(number if domain is None else numbers.setdefault(domain, number))
        domains.append(of_nodes)
    return Problem(sets, len(placement), domains)


def _seated(topology: Topology, placement: Placement, slots: Mapping[int, str]) -> list[int]:
    """Return the seats with the nodes of `slots`, all others empty."""
    index = {node: number for number, node in enumerate(topology.nodes)}
    for slot, node in slots.items():
        if slot not in placement:
            raise ConfigurationError(f"{node} sits in slot {slot}, which the placement does not have")
        if node not in index:
            raise ConfigurationError(f"{node} sits in slot {slot}, but is no node of the topology")
    if len(set(slots.values())) < len(slots):
        twice, _ = Counter(slots.values()).most_common(1)[0]
        raise ConfigurationError(f"{twice} sits in more than one slot; give every slot a node of its own")
    seats = [EMPTY] * max(len(index), len(placement))
    for slot, node in slots.items():
        seats[slot] = index[node]
    return seats


def _refined(problem: Problem, seats: Sequence[int], slots: Sequence[int], target: int) -> tuple[list[int], bool]:
    """Return `seats` with the nodes in `slots` changed for the better, and whether nothing better exists; `target` is a
    lower bound.
    """
    seats = _with_spares(seats)
    open_seats = [*slots, *range(problem.num_slots, len(seats))]
    cost = improve(problem, seats, open_seats, target=target, max_steps=_MAX_SWAPS)
    if cost == target or len(slots) > _MAX_SEARCHED_SLOTS:
        return seats, cost == target
    fixed = list(seats)
    for seat in open_seats:
        fixed[seat] = EMPTY
    nodes = sorted(seats[seat] for seat in open_seats)
    search = Search(problem, fixed, slots, nodes, limit=cost, target=target, max_steps=_MAX_SEARCH_STEPS)
    return seats if search.seats is None else _with_spares(search.seats), search.is_finished


def _with_spares(seats: Sequence[int]) -> list[int]:
    """Seat the nodes that sit nowhere, in order, in the empty seats."""
    seated = set(seats)
    spares = (node for node in range(len(seats)) if node not in seated)
    return [next(spares) if node == EMPTY else node for node in seats]


def _conflicts(problem: Problem, topology: Topology, seats: Sequence[int]) -> tuple[LevelConflicts, ...]:
    found = []
    labels = list(topology.nodes.values())
    for level, domain in zip(topology.levels, problem.domains, strict=True):
        met = [[domain[seats[slot]] for slot in members if seats[slot] != EMPTY] for members in problem.sets]
        found.append(
            LevelConflicts(
                level,
                len(problem.sets),
                sum(len(set(of_set)) < len(of_set) for of_set in met),
                sum(len(set(of_set)) == 1 and len(of_set) == len(problem.sets[0]) for of_set in met),
                sum(node != EMPTY and level not in labels[node] for node in seats[: problem.num_slots]),
            )
        )
    return tuple(found)


def _obstacle(
    problem: Problem, structure: Structure, bound: int, topology: Topology, level: int, is_optimal: bool
) -> str:
    """Say what keeps the members of a set together at this level."""
    name = topology.levels[level]
    if not bound:
        given = " without more conflicts at the levels before it" if level else ""
        return f"no arrangement {'keeps' if is_optimal else 'was found that keeps'} nodes of one {name} apart{given}"
    limit = sum(
        max(size for size, least in enumerate(costs) if not least)
        for costs in (structure.least_in_groups, structure.least_in_tangle)
    )
    domains = topology.domains(name)
    largest = max(domains, key=lambda domain: len(domains[domain]))
    must_take = max(levelled(Counter(Counter(problem.domains[level]).values()), problem.num_slots))
    if must_take > limit:
        return (
            f"a {name} such as {largest} must take {must_take} of the {problem.num_slots} slots, but no more than "
            f"{limit} of them can be kept apart"
        )
    return (
        f"the {len(domains)} domains of the level {name} are too few, or too uneven, for the {len(structure.tangle)} "
        "slots whose sets overlap"
    )


def _compromise(conflict: LevelConflicts, is_optimal: bool) -> str:
    inside = f", {conflict.num_sets_inside} of them with all" if conflict.num_sets_inside else ""
    return (
        f"the {'best compromise' if is_optimal else 'compromise found'} leaves {conflict.num_sets_sharing} of "
        f"{conflict.num_sets} sets with members in one {conflict.level}{inside}"
    )


def _arrangement(
    topology: Topology,
    placement: Placement,
    seats: Sequence[int],
    found: tuple[LevelConflicts, ...],
    is_optimal: bool,
    why: Sequence[str],
) -> Arrangement:
    names = list(topology.nodes)
    slots = {slot: names[seats[slot]] for slot in range(len(placement))}
    spares = tuple(names[node] for node in sorted(seats[len(placement) :]))
    return Arrangement(placement, slots, spares, found, is_optimal, "; ".join(why) or None)
