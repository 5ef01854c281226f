"""Nodes in slots across failure domains, against brute force over all seatings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning.failure_domains import Arrangement, arrange, conflicts, refill, spread
from gemini_ft.planning.placement import Strategy, build_placement, mixed_placement, replica_sets
from gemini_ft.planning.topology import Topology

Labels = Mapping[str, str]
Cost = tuple[tuple[int, int], ...]


def topology_of(levels: str, *labels: str) -> Topology:
    """`topology_of("zone rack", "a a1", "a a2")`: the domains of nodes n0 and n1; `-` leaves a label out."""
    names = levels.split()
    nodes = {
        f"n{number}": {level: domain for level, domain in zip(names, of_node.split(), strict=True) if domain != "-"}
        for number, of_node in enumerate(labels)
    }
    return Topology(nodes, tuple(names))


def racks(*sizes: int) -> Topology:
    """Racks r0, r1, ... of so many nodes each, numbered rack by rack."""
    return topology_of("rack", *(f"r{rack}" for rack, size in enumerate(sizes) for _ in range(size)))


def cost_of(placement: Placement, seated: Sequence[tuple[str, ...]], num_levels: int) -> Cost:
    """By level: sets inside one domain, and pairs of members that share one."""
    costs = []
    for level in range(num_levels):
        met = [Counter(seated[slot][level] for slot in members) for members in replica_sets(placement)]
        inside = sum(len(counts) == 1 and counts.total() > 1 for counts in met)
        costs.append((inside, sum(n * (n - 1) // 2 for counts in met for n in counts.values())))
    return tuple(costs)


def kinds(topology: Topology) -> dict[str, tuple[str, ...]]:
    return {node: tuple(labels[level] for level in topology.levels) for node, labels in topology.nodes.items()}


def cost(topology: Topology, arrangement: Arrangement) -> Cost:
    of_node = kinds(topology)
    seated = [of_node[arrangement.slots[slot]] for slot in range(len(arrangement.placement))]
    return cost_of(arrangement.placement, seated, len(topology.levels))


def least_cost(topology: Topology, placement: Placement) -> Cost:
    """Try every seating, nodes of one kind being alike."""

    def seatings(left: Counter[tuple[str, ...]], num_slots: int) -> Iterator[tuple[tuple[str, ...], ...]]:
        if not num_slots:
            yield ()
            return
        for kind in [kind for kind, number in left.items() if number]:
            left[kind] -= 1
            for rest in seatings(left, num_slots - 1):
                yield (kind, *rest)
            left[kind] += 1

    num_levels = len(topology.levels)
    every = seatings(Counter(kinds(topology).values()), len(placement))
    return min(cost_of(placement, seating, num_levels) for seating in every)


@st.composite
def small_cases(
    draw: st.DrawFn, levels: str, *, strategies: Sequence[Strategy] = (*Strategy,), hierarchy: bool = False
) -> tuple[Topology, Placement]:
    num_replicas = draw(st.integers(1, 4))
    num_slots = draw(st.integers(num_replicas, 7))
    strategy = draw(st.sampled_from(strategies))
    assume(strategy is not Strategy.GROUP or num_slots % num_replicas == 0)
    num_nodes = draw(st.integers(num_slots, max(num_slots, 7)))
    domains = draw(
        st.lists(
            st.lists(st.sampled_from("abcd"), min_size=len(levels.split()), max_size=len(levels.split())),
            min_size=num_nodes,
            max_size=num_nodes,
        )
    )
    if hierarchy:
        domains = [["".join(of_node[: depth + 1]) for depth in range(len(of_node))] for of_node in domains]
    return topology_of(levels, *map(" ".join, domains)), build_placement(strategy, num_slots, num_replicas)


BRUTE = settings(max_examples=40, deadline=None)


@BRUTE
@given(small_cases("rack"))
def test_one_level_is_solved_exactly(case: tuple[Topology, Placement]) -> None:
    topology, placement = case
    arrangement = arrange(topology, placement)
    assert arrangement.is_optimal
    assert cost(topology, arrangement) == least_cost(topology, placement)


@BRUTE
@given(small_cases("zone rack", strategies=[Strategy.GROUP], hierarchy=True))
def test_a_hierarchy_is_solved_exactly_for_groups(case: tuple[Topology, Placement]) -> None:
    topology, placement = case
    arrangement = arrange(topology, placement)
    assert cost(topology, arrangement) == least_cost(topology, placement)


@BRUTE
@given(st.one_of(small_cases("rack parallel_group"), small_cases("zone rack", hierarchy=True)))
def test_what_is_called_optimal_is(case: tuple[Topology, Placement]) -> None:
    topology, placement = case
    arrangement = arrange(topology, placement)
    if arrangement.is_optimal:
        assert cost(topology, arrangement) == least_cost(topology, placement)


@settings(deadline=None)
@given(st.one_of(small_cases("rack parallel_group"), small_cases("zone rack", hierarchy=True)))
def test_an_arrangement_seats_every_slot_and_says_what_its_sets_share(case: tuple[Topology, Placement]) -> None:
    topology, placement = case
    arrangement = arrange(topology, placement)
    assert sorted(arrangement.slots) == sorted(placement)
    assert sorted([*arrangement.slots.values(), *arrangement.spares]) == sorted(topology.nodes)
    of_node = kinds(topology)
    for level, found in enumerate(arrangement.conflicts):
        met = [{of_node[arrangement.slots[slot]][level] for slot in members} for members in replica_sets(placement)]
        assert found.level == topology.levels[level]
        assert found.num_sets == len(met)
        assert found.num_sets_sharing == sum(len(domains) < len(placement[0]) for domains in met)
        assert found.num_sets_inside == sum(len(domains) == 1 for domains in met)
    assert (arrangement.reason is None) == all(found.num_sets_sharing == 0 for found in arrangement.conflicts)
    assert conflicts(topology, placement, arrangement.slots) == arrangement.conflicts


def sizes_of_racks(largest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, largest), min_size=1, max_size=40)


@settings(deadline=None)
@given(sizes_of_racks(20), st.integers(1, 5))
def test_groups_and_rings_keep_racks_apart_up_to_one_node_of_a_rack_for_each_group(
    sizes: list[int], num_replicas: int
) -> None:
    assume(sum(sizes) >= num_replicas)
    limit = sum(sizes) // num_replicas
    strategies = [Strategy.RING] if sum(sizes) % num_replicas else [Strategy.RING, Strategy.GROUP]
    for strategy in strategies:
        (found,) = spread(racks(*sizes), strategy, num_replicas).conflicts
        assert (found.num_sets_sharing == 0) == (max(sizes) <= limit or num_replicas == 1)


@settings(deadline=None)
@given(sizes_of_racks(20), st.integers(2, 5))
def test_a_mixed_placement_keeps_racks_apart_if_its_last_ring_has_a_rack_for_each_slot(
    sizes: list[int], num_replicas: int
) -> None:
    num_groups, num_left = divmod(sum(sizes), num_replicas)
    assume(num_groups and num_left)
    (found,) = spread(racks(*sizes), Strategy.MIXED, num_replicas).conflicts
    is_possible = max(sizes) <= num_groups and len(sizes) >= num_replicas + num_left
    assert (found.num_sets_sharing == 0) == is_possible


@settings(deadline=None)
@given(sizes_of_racks(20), st.integers(2, 5))
def test_a_shared_placement_keeps_racks_apart_if_enough_racks_fit_its_two_sets_that_overlap(
    sizes: list[int], num_replicas: int
) -> None:
    num_groups, num_left = divmod(sum(sizes), num_replicas)
    assume(num_groups and num_left)
    (found,) = spread(racks(*sizes), Strategy.SHARE, num_replicas).conflicts
    # The two sets have m + q slots; q slots of the one and q of the other may pair up in a rack.
    must_be_there = [max(0, size - (num_groups - 1)) for size in sizes]
    can_be_there = len(sizes) + min(num_left, sum(size > 1 for size in sizes))
    is_possible = (
        max(must_be_there) <= 2
        and must_be_there.count(2) <= num_left
        and sum(must_be_there) <= num_replicas + num_left <= can_be_there
    )
    assert (found.num_sets_sharing == 0) == is_possible


@pytest.mark.parametrize("strategy", [Strategy.RING, Strategy.MIXED, Strategy.SHARE])
@pytest.mark.parametrize("num_replicas", [2, 3, 4, 12])
def test_ten_thousand_nodes_in_racks_of_zones(strategy: Strategy, num_replicas: int) -> None:
    zones = 3 * num_replicas
    labels = [f"z{number % zones} z{number % zones}r{number % (zones * 20)}" for number in range(10_001)]
    arrangement = spread(topology_of("zone rack", *labels), strategy, num_replicas)
    assert [found.num_sets_sharing for found in arrangement.conflicts] == [0, 0]
    assert arrangement.is_optimal
    assert len(set(arrangement.slots.values())) == 10_001


def test_a_parallel_group_is_a_level_as_any_other() -> None:
    labels = [f"p{number % 4} r{number // 4}" for number in range(16)]
    arrangement = spread(topology_of("parallel_group rack", *labels), Strategy.GROUP, 2)
    assert [found.num_sets_sharing for found in arrangement.conflicts] == [0, 0]


def test_nodes_that_are_apart_already_keep_their_order() -> None:
    arrangement = spread(topology_of("rack", "a", "b", "b", "c", "a", "a"), Strategy.GROUP, 2, num_slots=4)
    assert list(arrangement.slots.values()) == ["n0", "n1", "n2", "n3"]
    assert arrangement.spares == ("n4", "n5")
    assert arrangement.holders()["n3"] == ("n3", "n2")


def test_the_nodes_to_take_are_chosen_as_well() -> None:
    arrangement = spread(topology_of("rack", *"aaaaaabc"), Strategy.GROUP, 2, num_slots=4)
    assert arrangement.conflicts[0].num_sets_sharing == 0
    assert {"n6", "n7"} < set(arrangement.slots.values())


def test_a_later_level_yields_to_an_earlier_one_in_the_choice_of_nodes() -> None:
    labels = [*(f"a a{rack}" for rack in range(15)), *["b b0"] * 15]
    topology = topology_of("zone rack", *labels)
    arrangement = spread(topology, Strategy.GROUP, 5, num_slots=15)
    assert arrangement.is_optimal
    # 9 and 6 nodes cost least of two zones, and 6 of rack b0 are 2 in each of 3 sets.
    assert Counter(topology.nodes[node]["zone"] for node in arrangement.slots.values()) == {"a": 9, "b": 6}
    assert [found.num_sets_sharing for found in arrangement.conflicts] == [3, 3]


def test_a_node_without_a_label_is_apart_from_all_others_and_counted() -> None:
    arrangement = spread(topology_of("rack", "-", "-", "a", "a"), Strategy.GROUP, 2)
    assert arrangement.conflicts[0].num_sets_sharing == 0
    assert arrangement.conflicts[0].num_unlabelled == 2


def test_without_levels_nodes_sit_in_order() -> None:
    arrangement = arrange(Topology({"x": {}, "y": {}, "z": {}}, ()), mixed_placement(3, 2))
    assert arrangement.slots == {0: "x", 1: "y", 2: "z"}
    assert arrangement.is_optimal
    assert arrangement.reason is None


@pytest.mark.parametrize(
    ("topology", "strategy", "num_replicas", "reason"),
    [
        (
            racks(5, 2, 1),
            Strategy.GROUP,
            2,
            "a rack such as r0 must take 5 of the 8 slots, but no more than 4 of them can be kept apart, so the best "
            "compromise leaves 1 of 4 sets with members in one rack, 1 of them with all",
        ),
        (
            racks(2, 2, 2, 2),
            Strategy.MIXED,
            3,
            "the 4 domains of the level rack are too few, or too uneven, for the 5 slots whose sets overlap, so the "
            "best compromise leaves 1 of 6 sets with members in one rack",
        ),
        (
            topology_of("rack pdu", "a x", "a y", "b x", "b y", "c x", "d y"),
            Strategy.GROUP,
            3,
            "a pdu such as x must take 3 of the 6 slots, but no more than 2 of them can be kept apart, so the best "
            "compromise leaves 2 of 2 sets with members in one pdu",
        ),
    ],
)
def test_a_reason_says_why_members_meet_and_what_the_compromise_is(
    topology: Topology, strategy: Strategy, num_replicas: int, reason: str
) -> None:
    assert spread(topology, strategy, num_replicas).reason == reason


def test_levels_that_cannot_all_be_kept_apart_yield_in_their_order() -> None:
    topology = topology_of("rack pdu", "a x", "a y", "b y", "b x")
    pdus = Topology(topology.nodes, ("pdu", "rack"))
    for chosen in (topology, pdus):
        arrangement = spread(chosen, Strategy.RING, 2)
        assert arrangement.is_optimal
        assert [found.num_sets_sharing for found in arrangement.conflicts] == [0, 2]
        assert arrangement.reason is not None
        assert (
            f"no arrangement keeps nodes of one {chosen.levels[1]} apart without more conflicts" in arrangement.reason
        )


@st.composite
def vacancies(draw: st.DrawFn) -> tuple[Topology, Placement, dict[int, str]]:
    topology, placement = draw(small_cases("rack parallel_group"))
    vacant = draw(st.sets(st.sampled_from(sorted(placement)), max_size=3))
    order = draw(st.permutations(sorted(topology.nodes)))
    return topology, placement, {slot: order[slot] for slot in placement if slot not in vacant}


@BRUTE
@given(vacancies())
def test_vacant_slots_get_the_spares_that_meet_fewest(case: tuple[Topology, Placement, dict[int, str]]) -> None:
    topology, placement, slots = case
    filled = refill(topology, placement, slots)
    assert {slot: filled.slots[slot] for slot in slots} == slots
    assert sorted([*filled.slots.values(), *filled.spares]) == sorted(topology.nodes)
    of_node = kinds(topology)
    vacant = [slot for slot in placement if slot not in slots]
    spares = [node for node in topology.nodes if node not in slots.values()]
    costs = []
    for chosen in itertools.permutations(spares, len(vacant)):
        seats = slots | dict(zip(vacant, chosen, strict=True))
        seated = [of_node[seats[slot]] for slot in range(len(placement))]
        costs.append(cost_of(placement, seated, len(topology.levels)))
    assert filled.is_optimal
    assert cost(topology, filled) == min(costs)


def test_the_first_of_equal_spares_fills_a_vacant_slot() -> None:
    topology = topology_of("rack", "a", "b", "c", "a", "d", "e")
    filled = refill(topology, mixed_placement(4, 2), {0: "n0", 2: "n2", 3: "n1"})
    assert filled.slots[1] == "n4"
    assert filled.spares == ("n3", "n5")


def test_a_refill_that_must_share_says_so() -> None:
    filled = refill(topology_of("rack", "a", "b", "b", "a", "a"), mixed_placement(4, 2), {0: "n0", 2: "n2", 3: "n3"})
    assert filled.slots[1] == "n1"
    topology = topology_of("rack", "a", "b", "a", "a")
    filled = refill(topology, mixed_placement(3, 3), {0: "n0", 1: "n1"})
    assert filled.reason == (
        "the seated nodes stay where they are, and the best compromise leaves 1 of 1 sets with members in one rack"
    )


def test_many_vacant_slots_are_filled_in_a_large_job() -> None:
    topology = topology_of("rack", *(f"r{number // 16}" for number in range(4_100)))
    arrangement = spread(topology, Strategy.GROUP, 2, num_slots=4_000)
    lost = [slot for slot, node in arrangement.slots.items() if topology.nodes[node]["rack"] == "r7"]
    left = {slot: node for slot, node in arrangement.slots.items() if slot not in lost}
    filled = refill(topology, arrangement.placement, left)
    assert len(lost) == 16
    assert filled.is_optimal
    assert filled.conflicts[0].num_sets_sharing == 0


@pytest.mark.parametrize(
    ("slots", "named"),
    [
        ({0: "n0", 1: "n1", 7: "n2"}, "n2 sits in slot 7, which the placement does not have"),
        ({0: "n0", 1: "n9"}, "n9 sits in slot 1, but is no node"),
        ({0: "n0", 1: "n0"}, "n0 sits in more than one slot"),
        ({0: "n0"}, "3 slots are vacant, slot 1 first, but 2 nodes are spare"),
    ],
)
def test_slots_that_make_no_sense_are_refused(slots: dict[int, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        refill(racks(1, 1, 1), mixed_placement(4, 2), slots)


def test_fewer_nodes_than_slots_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="4 slots need as many nodes, but the topology has 3"):
        spread(racks(2, 1), Strategy.GROUP, 2, num_slots=4)


@pytest.mark.parametrize(
    "placement", [{0: (0, 1), 1: (1, 2), 2: (2,)}, {1: (1, 2), 2: (2, 1)}], ids=["uneven", "from-one"]
)
def test_other_placements_are_refused(placement: Placement) -> None:
    with pytest.raises(ConfigurationError, match="slots 0 to N - 1"):
        arrange(racks(3), placement)
