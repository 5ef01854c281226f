"""Seatings by construction, and bounds on what any seating costs.

Costs grow ever faster with the members that share a domain, so the least that a domain can cost is reached by
spreading its nodes evenly. For disjoint sets, dealing the nodes out domain by domain, one to each set in turn, does
that for all domains at once, at every level of a hierarchy (zones of racks). A ring is dealt out in the same way to
floor(N / m) arcs, and no two nodes of a domain with at most so many come closer than m.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemini_ft.planning._seating import EMPTY, Problem, Search

__all__ = ["LevelPlan", "Structure", "deals", "is_hierarchy", "levelled", "plan_level"]

# Limits on the search for the best seats of the tangle, which has fewer than 2m slots but for a ring.
_MAX_SEARCHED_SLOTS = 16
_MAX_SEARCH_STEPS = 50_000


class Structure:
    """Sets taken apart: `groups` share no slot with another set; `tangle` are the slots of those that do."""

    def __init__(self, problem: Problem) -> None:
        self.groups = [members for members in problem.sets if all(len(problem.sets_of[slot]) == 1 for slot in members)]
        grouped = {slot for members in self.groups for slot in members}
        self.tangle = [slot for slot in range(problem.num_slots) if slot not in grouped]
        position = {slot: index for index, slot in enumerate(self.tangle)}
        self.tangled_sets = [[position[slot] for slot in members] for members in problem.sets if members[0] in position]
        num_slots = problem.num_slots
        self.is_ring = {frozenset(members) for members in problem.sets} == {
            frozenset((first + distance) % num_slots for distance in range(len(problem.sets[0])))
            for first in range(num_slots)
        }
        self.least = _least_costs(problem, len(problem.sets), range(num_slots))
        self.least_in_tangle = _least_costs(problem, len(self.tangled_sets), self.tangle)
        self.least_in_groups = [problem.even_cost(len(self.groups), size) for size in range(len(grouped) + 1)]


def _least_costs(problem: Problem, num_sets: int, slots: Sequence[int]) -> list[int]:
    """Return k -> the least that k nodes of one domain in `slots` can cost: spread evenly, in slots of fewest sets."""
    memberships = itertools.accumulate(sorted(len(problem.sets_of[slot]) for slot in slots), initial=0)
    return [problem.even_cost(num_sets, num) for num in memberships]


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """No seating costs less than `bound` at this level; `tangle_domains` are those of the tangled slots of a seating
    that costs the least found, or None if the tangle is too large to search.
    """

    bound: int
    tangle_domains: tuple[int, ...] | None


def plan_level(problem: Problem, structure: Structure, level: int) -> LevelPlan:
    """Plan one level as if it were the only one.

    Exact unless the tangle has more than 16 slots or its search runs out of steps: whatever numbers of nodes the
    domains have in the tangle (a partition of its slots), it costs least to give the largest numbers to the largest
    domains, and to deal the rest evenly to the groups.
    """
    sizes = Counter(problem.domains[level])
    domains = sorted(sizes, key=lambda domain: (-sizes[domain], domain))
    counts = [sizes[domain] for domain in domains]
    relaxed = sum(structure.least[size] for size in levelled(Counter(counts), problem.num_slots).elements())
    num_tangled = len(structure.tangle)
    is_small = num_tangled <= _MAX_SEARCHED_SLOTS
    if not is_small and not structure.groups:
        return LevelPlan(relaxed, None)
    options = []
    for parts in _partitions(num_tangled, num_tangled if is_small else 2):
        if len(parts) > len(counts) or any(part > count for part, count in zip(parts, counts, strict=False)):
            continue
        left = Counter(counts)
        for part, count in zip(parts, counts, strict=False):
            left[count] -= 1
            left[count - part] += 1
        in_groups = levelled(left, problem.num_slots - num_tangled)
        in_groups_cost = sum(number * structure.least_in_groups[size] for size, number in in_groups.items())
        in_tangle_cost = sum(structure.least_in_tangle[part] for part in parts)
        options.append((in_groups_cost + in_tangle_cost, -len(parts), parts))
    if not options:
        return LevelPlan(relaxed, None)
    bound, part_of = _best_option(problem, structure, sorted(options))
    if not is_small:
        bound = min(bound, relaxed)
    return LevelPlan(bound, None if part_of is None else tuple(domains[part] for part in part_of))


def _best_option(
    problem: Problem, structure: Structure, options: Sequence[tuple[int, int, tuple[int, ...]]]
) -> tuple[int, list[int] | None]:
    """Return a bound for all `options` and, of the best found, the part that each tangled slot belongs to."""
    if not structure.tangle:
        return options[0][0], []
    best: int | None = None
    part_of: list[int] | None = None
    bounds = []
    num_steps_left = _MAX_SEARCH_STEPS
    slots = range(len(structure.tangle))
    for hoped, _, parts in options:
        if best is not None and hoped >= best:
            break
        domains = [part for part, size in enumerate(parts) for _ in range(size)]
        target = sum(structure.least_in_tangle[size] for size in parts)
        in_groups_cost = hoped - target
        search = Search(
            Problem(structure.tangled_sets, len(slots), [domains], problem.penalty),
            [EMPTY] * len(slots),
            slots,
            slots,
            limit=None if best is None else best - in_groups_cost,
            target=target,
            max_steps=num_steps_left,
        )
        num_steps_left = search.num_steps_left
        if search.seats is not None and search.cost is not None:
            best = in_groups_cost + search.cost
            part_of = [domains[node] for node in search.seats]
        if not search.is_finished:
            bounds.append(hoped)
    return min([*bounds, *([] if best is None else [best])]), part_of


def is_hierarchy(problem: Problem) -> bool:
    """Return whether each domain lies in one domain of every coarser level."""
    coarse_first = sorted(problem.domains, key=lambda domain: len(set(domain)))
    return all(
        len(set(zip(coarse, fine, strict=True))) == len(set(fine)) for coarse, fine in itertools.pairwise(coarse_first)
    )


def deals(problem: Problem, structure: Structure, plans: Sequence[LevelPlan]) -> Iterator[list[int]]:
    """Yield seatings of all slots, spare seats left empty; none is better if there is no tangle and a hierarchy."""
    by_importance = tuple(range(len(plans)))
    coarse_first = tuple(sorted(by_importance, key=lambda level: len(set(problem.domains[level]))))
    for order in dict.fromkeys([by_importance, coarse_first]):
        tangle_domains = plans[order[0]].tangle_domains
        if tangle_domains is not None:
            yield _deal_to_groups(problem, structure, order, tangle_domains)
        if structure.is_ring and structure.tangle:
            yield _deal_to_ring(problem, structure, order)


def _deal_to_groups(
    problem: Problem, structure: Structure, order: Sequence[int], tangle_domains: Sequence[int]
) -> list[int]:
    """Seat the tangle as planned for the first level of `order`, then deal to the groups."""
    num_nodes = len(problem.domains[0])
    seats = [EMPTY] * num_nodes
    unused = dict.fromkeys(range(num_nodes))
    wanted = zip(structure.tangle, tangle_domains, strict=True)
    for slot, domain in sorted(wanted, key=lambda want: -len(problem.sets_of[want[0]])):
        seats[slot] = _best_node(
            problem, seats, slot, [node for node in unused if problem.domains[order[0]][node] == domain]
        )
        del unused[seats[slot]]
    num_groups = len(structure.groups)
    chosen = _choose(problem, list(unused), problem.num_slots - len(structure.tangle), structure.least_in_groups)
    chosen.sort(key=lambda node: ([problem.domains[level][node] for level in order], node))
    for index, node in enumerate(chosen):
        seats[structure.groups[index % num_groups][index // num_groups]] = node
    return seats


def _best_node(problem: Problem, seats: Sequence[int], slot: int, nodes: Sequence[int]) -> int:
    """Return the node that adds least in `slot`; among equals, of the kind of which there are most."""
    num_of_kind = Counter(map(problem.kind, nodes))
    first_of_kind = {problem.kind(node): node for node in reversed(nodes)}
    return min(
        first_of_kind.values(),
        key=lambda node: (problem.added(slot, node, seats), -num_of_kind[problem.kind(node)], node),
    )


def _deal_to_ring(problem: Problem, structure: Structure, order: Sequence[int]) -> list[int]:
    """Deal to floor(N / m) arcs of at least m slots, the largest domains first.

    A domain of floor(N / m) nodes comes while all arcs are equally full and takes the same place in each. A smaller one
    that goes on from the last arc to the first, one place later, leaves at least one arc free in between.
    """
    num_slots = problem.num_slots
    chosen = _choose(problem, range(len(problem.domains[0])), num_slots, structure.least)
    prefixes = {
        node: [tuple(problem.domains[level][node] for level in order[: end + 1]) for end in range(len(order))]
        for node in chosen
    }
    num_of_prefix = Counter(prefix for node_prefixes in prefixes.values() for prefix in node_prefixes)
    chosen.sort(key=lambda node: ([(-num_of_prefix[prefix], prefix) for prefix in prefixes[node]], node))
    num_arcs = num_slots // len(problem.sets[0])
    length, num_longer = divmod(num_slots, num_arcs)
    seats = [EMPTY] * len(problem.domains[0])
    for index, node in enumerate(chosen):
        place, arc = divmod(index, num_arcs)
        seats[arc * length + min(arc, num_longer) + place] = node
    return seats


def _choose(problem: Problem, nodes: Sequence[int], num_chosen: int, least: Sequence[int]) -> list[int]:
    """Return the nodes whose domains cost least in all, if k nodes of one cost `least[k]`; the first ones among equals.

    The greedy choice is the best one for a hierarchy of domains, since `least` is convex.
    """
    waiting: dict[tuple[int, ...], list[int]] = {}
    for node in reversed(nodes):
        waiting.setdefault(problem.kind(node), []).append(node)
    num_taken: list[Counter[int]] = [Counter() for _ in problem.domains]

    def price(kind: tuple[int, ...]) -> int:
        counts = [taken[domain] for taken, domain in zip(num_taken, kind, strict=True)]
        return problem.total([least[count + 1] - least[count] for count in counts])

    queue = [(0, of_kind[-1], kind) for kind, of_kind in waiting.items()]
    heapq.heapify(queue)
    chosen: list[int] = []
    while len(chosen) < num_chosen:
        known_price, node, kind = heapq.heappop(queue)
        # Prices only rise, so one that still holds is the lowest.
        if price(kind) > known_price:
            heapq.heappush(queue, (price(kind), node, kind))
            continue
        chosen.append(waiting[kind].pop())
        for taken, domain in zip(num_taken, kind, strict=True):
            taken[domain] += 1
        if waiting[kind]:
            heapq.heappush(queue, (known_price, waiting[kind][-1], kind))
    return chosen


def levelled(sizes: Counter[int], total: int) -> Counter[int]:
    """Return how many nodes are taken from domains of such sizes (size -> number of domains), as evenly as possible."""
    taken: Counter[int] = Counter()
    num_open = sum(sizes.values())
    level = 0
    for size in sorted(sizes):
        if (size - level) * num_open > total:
            break
        total -= (size - level) * num_open
        level = size
        num_open -= sizes[size]
        taken[size] += sizes[size]
    if num_open:
        more, num_one_more = divmod(total, num_open)
        taken[level + more] += num_open - num_one_more
        taken[level + more + 1] += num_one_more
    return +taken


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `total` as a sum of numbers of at most `largest`, in descending order."""
    if not total:
        yield ()
    for part in range(min(total, largest), 0, -1):
        for rest in _partitions(total - part, part):
            yield (part, *rest)
