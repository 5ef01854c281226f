"""What a seating of nodes in slots costs, and searches that make one cheaper.

Numbers only: slots, nodes, levels and domains are integers. `seats[slot]` is the node in a slot or EMPTY; seats from
`num_slots` on are those of spare nodes. A set costs, at each level, the number of pairs of members that share a
domain, and more than all such pairs together if all members share one: such a set is lost with one domain. Costs of
levels count lexicographically.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, gcd

__all__ = ["EMPTY", "Problem", "Search", "improve"]

EMPTY = -1


class Problem:
    """Sets of slots of one size, and the domain of each node at each level, the most important level first."""

    def __init__(
        self,
        sets: Sequence[Sequence[int]],
        num_slots: int,
        domains: Sequence[Sequence[int]],
        penalty: Sequence[int] | None = None,
    ) -> None:
        self.sets = sets
        self.num_slots = num_slots
        self.domains = domains
        self.sets_of: list[list[int]] = [[] for _ in range(num_slots)]
        for index, members in enumerate(sets):
            for slot in members:
                self.sets_of[slot].append(index)
        # Cost of a set by how many members share a domain; it grows ever faster, on which `even_cost` rests.
        self.penalty = penalty or _penalties(len(sets[0]), len(sets))
        base = 1 + len(sets) * self.penalty[-1]
        self.weights = [base**power for power in reversed(range(len(domains)))]

    def level_cost(self, level: int, seats: Sequence[int]) -> int:
        """Return the cost of one level; empty seats cost nothing."""
        domain = self.domains[level]
        total = 0
        for members in self.sets:
            seated = [domain[seats[slot]] for slot in members if seats[slot] != EMPTY]
            if len(set(seated)) < len(seated):
                total += sum(self.penalty[num_members] for num_members in Counter(seated).values())
        return total

    def total(self, level_costs: Sequence[int]) -> int:
        """Return one number that orders as the costs of the levels do lexicographically."""
        return sum(weight * cost for weight, cost in zip(self.weights, level_costs, strict=True))

    def cost(self, seats: Sequence[int]) -> int:
        """Return the total cost of a seating."""
        return self.total([self.level_cost(level, seats) for level in range(len(self.domains))])

    def added(self, slot: int, node: int, seats: Sequence[int]) -> int:
        """Return by how much the total grows when `node` sits down in `slot` beside those already seated."""
        if slot >= self.num_slots:
            return 0
        total = 0
        for index in self.sets_of[slot]:
            others = [seats[other] for other in self.sets[index] if other != slot and seats[other] != EMPTY]
            for weight, domain in zip(self.weights, self.domains, strict=True):
                num_met = [domain[other] for other in others].count(domain[node])
                total += weight * (self.penalty[num_met + 1] - self.penalty[num_met])
        return total

    def even_cost(self, num_sets: int, num_memberships: int) -> int:
        """Return the least cost, at one level, of a domain with so many memberships in `num_sets` sets."""
        if not num_memberships:
            return 0
        each, num_fuller = divmod(num_memberships, num_sets)
        fuller = num_fuller * self.penalty[each + 1] if num_fuller else 0
        return fuller + (num_sets - num_fuller) * self.penalty[each]

    def kind(self, node: int) -> tuple[int, ...]:
        """Return the domains of a node; nodes of one kind are interchangeable."""
        return tuple(domain[node] for domain in self.domains)


def _penalties(set_size: int, num_sets: int) -> list[int]:
    pairs = [comb(num_members, 2) for num_members in range(set_size + 1)]
    return [*pairs[:-1], pairs[-1] + (1 + num_sets * pairs[-1] if set_size > 1 else 0)]


class Search:
    """Depth-first search over all ways to seat `nodes` in the empty `slots`, for a total below `limit`.

    It stops at a total of `target`, which must be a lower bound, or after weighing `max_steps` choices. `seats` is then
    the best seating found, or None; nothing cheaper exists if `is_finished`.
    """

    def __init__(
        self,
        problem: Problem,
        seats: Sequence[int],
        slots: Sequence[int],
        nodes: Sequence[int],
        *,
        limit: int | None = None,
        target: int = 0,
        max_steps: int,
    ) -> None:
        self.seats: list[int] | None = None
        self.cost = limit
        self._problem = problem
        self._target = target
        self.num_steps_left = max_steps
        self._current = list(seats)
        # Slots of many sets come first: there the choice is smallest.
        self._slots = sorted(slots, key=lambda slot: -len(problem.sets_of[slot]))
        self._waiting: dict[tuple[int, ...], list[int]] = {}
        for node in reversed(nodes):
            self._waiting.setdefault(problem.kind(node), []).append(node)
        self._num_of_kind = {kind: len(waiting) for kind, waiting in self._waiting.items()}
        self._has_twins = len(problem.domains) == 1 and all(seat == EMPTY for seat in seats)
        self._descend(0, problem.cost(seats))

    @property
    def is_finished(self) -> bool:
        """True unless the search ran out of steps."""
        return self.num_steps_left > 0

    def _descend(self, depth: int, cost: int) -> None:
        if depth == len(self._slots):
            self.seats, self.cost = list(self._current), cost
            return
        slot = self._slots[depth]
        for added, kind in self._choices(slot):
            if not self.is_finished or (self.cost is not None and cost + added >= self.cost):
                return
            node = self._waiting[kind].pop()
            self._current[slot] = node
            self._descend(depth + 1, cost + added)
            self._current[slot] = EMPTY
            self._waiting[kind].append(node)
            if self.seats is not None and self.cost is not None and self.cost <= self._target:
                return

    def _choices(self, slot: int) -> list[tuple[int, tuple[int, ...]]]:
        """Kinds of which a node waits, the cheapest first. Among equals, a slot of more sets than the last goes to a
        kind of which few wait, any other slot to one of which many do.
        """
        sets_of = self._problem.sets_of
        few_first = len(sets_of[slot]) > len(sets_of[self._slots[-1]])
        choices = []
        fresh_counts = set()
        for kind, waiting in self._waiting.items():
            if not waiting:
                continue
            if self._has_twins and len(waiting) == self._num_of_kind[kind]:
                # Domains of one size of which no node sits yet are the same up to their names.
                if len(waiting) in fresh_counts:
                    continue
                fresh_counts.add(len(waiting))
            preference = len(waiting) if few_first else -len(waiting)
            choices.append((self._problem.added(slot, waiting[-1], self._current), preference, waiting[-1], kind))
        self.num_steps_left -= len(choices)
        return [(added, kind) for added, _, _, kind in sorted(choices)]


def improve(problem: Problem, seats: list[int], seats_to_change: Sequence[int], *, target: int, max_steps: int) -> int:
    """Swap the nodes of two of `seats_to_change` in place as long as a swap lowers the total; return the total.

    It stops at a total of `target`, which must be a lower bound, or when `max_steps` swaps have been tried.
    """
    cost = problem.cost(seats)
    # Neighbours are alike, so that a swap with one rarely helps: go around in strides of about the golden section.
    stride = round(0.618 * len(seats_to_change)) or 1
    while gcd(stride, len(seats_to_change)) > 1:
        stride -= 1
    has_improved = True
    while has_improved:
        has_improved = False
        for index, slot in enumerate(seats_to_change):
            if cost <= target:
                return cost
            if not problem.added(slot, seats[slot], seats):
                continue
            for distance in range(1, len(seats_to_change)):
                other = seats_to_change[(index + distance * stride) % len(seats_to_change)]
                if problem.kind(seats[slot]) == problem.kind(seats[other]):
                    continue
                if not max_steps:
                    return cost
                max_steps -= 1
                gain = _swap(problem, seats, slot, other)
                if gain > 0:
                    cost -= gain
                    has_improved = True
                    break
                seats[slot], seats[other] = seats[other], seats[slot]
    return cost


def _swap(problem: Problem, seats: list[int], slot: int, other: int) -> int:
    """Swap two nodes; return by how much the total falls."""
    here, there = seats[slot], seats[other]
    before = problem.added(slot, here, seats)
    seats[slot] = EMPTY
    before += problem.added(other, there, seats)
    seats[other] = EMPTY
    after = problem.added(slot, there, seats)
    seats[slot] = there
    after += problem.added(other, here, seats)
    seats[other] = here
    return before - after
