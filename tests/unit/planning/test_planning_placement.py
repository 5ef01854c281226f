"""Placement: the shape that each strategy promises (paper section 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning.placement import (
    Strategy,
    best_placement,
    build_placement,
    group_placement,
    held_shards,
    mixed_placement,
    replica_sets,
    ring_placement,
    share_placement,
)
from gemini_ft.planning.probability import recovery_probability

sizes = st.integers(1, 6).flatmap(lambda m: st.tuples(st.integers(m, 60), st.just(m)))
any_number_of_slots = st.sampled_from([Strategy.RING, Strategy.MIXED, Strategy.SHARE])


def test_the_papers_example_of_five_machines() -> None:
    assert mixed_placement(5, 2) == {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 4), 4: (4, 2)}


def test_fewer_than_two_groups_make_one_ring() -> None:
    assert mixed_placement(3, 2) == {0: (0, 1), 1: (1, 2), 2: (2, 0)} == ring_placement(3, 2)


def test_share_fills_the_last_set_up_from_the_first_group() -> None:
    placement = share_placement(8, 3)
    assert placement[6] == (6, 7, 0)
    assert placement[7] == (7, 0, 6)
    assert replica_sets(placement) == (frozenset({0, 1, 2}), frozenset({0, 6, 7}), frozenset({3, 4, 5}))
    assert held_shards(placement)[0] == (0, 1, 2, 6, 7)


@given(sizes, any_number_of_slots)
def test_every_shard_is_kept_at_home_and_on_slots_of_the_job(size: tuple[int, int], strategy: Strategy) -> None:
    num_slots, num_replicas = size
    placement = build_placement(strategy, num_slots, num_replicas)
    assert list(placement) == list(range(num_slots))
    for slot, holders in placement.items():
        assert holders[0] == slot
        assert len(set(holders)) == len(holders) == num_replicas
        assert set(holders) <= set(placement)


@given(sizes)
def test_mixed_and_ring_load_all_slots_alike_and_share_does_not(size: tuple[int, int]) -> None:
    num_slots, num_replicas = size
    num_left = num_slots % num_replicas
    for strategy in (Strategy.MIXED, Strategy.RING):
        held = held_shards(build_placement(strategy, num_slots, num_replicas))
        assert {len(slots) for slots in held.values()} == {num_replicas}
    loads = Counter(len(slots) for slots in held_shards(share_placement(num_slots, num_replicas)).values())
    if num_left:
        usual = num_slots - num_replicas
        expected = {num_left: num_left, num_replicas: usual, num_replicas + num_left: num_replicas - num_left}
    else:
        expected = {num_replicas: num_slots}
    assert loads == Counter(expected)


@given(sizes)
def test_the_number_of_sets_is_what_theorem_1_says(size: tuple[int, int]) -> None:
    num_slots, num_replicas = size
    num_groups, num_left = divmod(num_slots, num_replicas)
    assert len(replica_sets(share_placement(num_slots, num_replicas))) == num_groups + bool(num_left)
    assert len(replica_sets(ring_placement(num_slots, num_replicas))) == (
        num_slots if num_groups > 1 or num_left else 1
    )
    num_mixed = len(replica_sets(mixed_placement(num_slots, num_replicas)))
    assert num_mixed == (num_groups - 1 + num_replicas + num_left if num_left else num_groups)


@given(sizes)
def test_where_m_divides_n_group_mixed_and_share_are_one(size: tuple[int, int]) -> None:
    num_groups, num_replicas = size
    num_slots = num_groups * num_replicas
    assert (
        group_placement(num_slots, num_replicas)
        == mixed_placement(num_slots, num_replicas)
        == share_placement(num_slots, num_replicas)
    )
    assert best_placement(num_slots, num_replicas) == (Strategy.GROUP, group_placement(num_slots, num_replicas))


@given(st.integers(2, 6), st.integers(1, 9), st.data())
def test_share_is_best_where_slots_are_left_over(num_replicas: int, num_groups: int, data: st.DataObject) -> None:
    num_slots = num_groups * num_replicas + data.draw(st.integers(1, num_replicas - 1))
    strategy, placement = best_placement(num_slots, num_replicas)
    assert strategy is Strategy.SHARE
    assert placement == share_placement(num_slots, num_replicas)


@pytest.mark.parametrize(("num_slots", "best"), [(3, Fraction(1, 3)), (4, Fraction(2, 3)), (5, Fraction(7, 10))])
def test_no_placement_at_all_is_better_than_the_best(num_slots: int, best: Fraction) -> None:
    partners = [[(slot, peer) for peer in range(num_slots) if peer != slot] for slot in range(num_slots)]
    every: Iterator[Placement] = (dict(enumerate(holders)) for holders in product(*partners))
    assert max(recovery_probability(placement, 2) for placement in every) == best
    assert recovery_probability(best_placement(num_slots, 2)[1], 2) == best


@given(sizes, any_number_of_slots)
def test_held_shards_is_the_placement_read_from_the_holders_side(size: tuple[int, int], strategy: Strategy) -> None:
    placement = build_placement(strategy, *size)
    held = held_shards(placement)
    pairs = {(slot, holder) for slot, holders in placement.items() for holder in holders}
    assert {(slot, holder) for holder, slots in held.items() for slot in slots} == pairs
    for holder, slots in held.items():
        assert slots[0] == holder
        assert list(slots[1:]) == sorted(slots[1:])


@pytest.mark.parametrize(("num_slots", "num_replicas", "named"), [(1, 2, "num_nodes is 1"), (4, 0, "at least 1")])
@pytest.mark.parametrize("strategy", list(Strategy))
def test_impossible_numbers_are_refused_with_a_sentence(
    strategy: Strategy, num_slots: int, num_replicas: int, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        build_placement(strategy, num_slots, num_replicas)
    with pytest.raises(ConfigurationError, match=named):
        best_placement(num_slots, num_replicas)


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="17 nodes with num_replicas 3 leave 2 over; use mixed or share"):
        group_placement(17, 3)


@pytest.mark.parametrize(
    ("holders", "sentence"),
    [((), "slot 1 has no holder"), ((1, 7), "slot 1 is held by 7, which is not a slot")],
)
def test_a_placement_with_a_hole_is_refused(holders: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        replica_sets({0: (0, 1), 1: holders})
