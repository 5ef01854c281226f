"""Placement against the paper's numbers: exact probabilities by enumeration (section 4)."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning.placement import mixed_placement


def recovery_probability(placement: Placement, num_lost: int) -> Fraction:
    """Share of all equally likely losses of `num_lost` machines after which every shard has a copy left."""
    holders = {frozenset(slots) for slots in placement.values()}
    losses = [frozenset(lost) for lost in combinations(placement, num_lost)]
    return Fraction(sum(not any(held <= lost for held in holders) for lost in losses), len(losses))


@pytest.mark.parametrize(
    ("num_slots", "num_replicas", "num_lost", "survived", "losses"),
    [
        (8, 2, 2, 24, 28),
        (8, 2, 3, 32, 56),
        (8, 2, 4, 16, 70),
        (9, 2, 2, 30, 36),
        (9, 2, 3, 44, 84),
        (9, 2, 4, 24, 126),
        (15, 2, 2, 96, 105),
        (15, 2, 3, 340, 455),
        (15, 2, 4, 720, 1365),
        (16, 2, 2, 112, 120),
        (16, 2, 3, 448, 560),
        (16, 2, 4, 1120, 1820),
        (17, 2, 2, 126, 136),
        (17, 2, 3, 532, 680),
        (17, 2, 4, 1400, 2380),
        (8, 3, 2, 28, 28),
        (8, 3, 3, 50, 56),
        (8, 3, 4, 45, 70),
        (9, 3, 3, 81, 84),
        (9, 3, 4, 108, 126),
        (15, 3, 3, 450, 455),
        (15, 3, 4, 1305, 1365),
        (16, 3, 2, 120, 120),
        (16, 3, 3, 552, 560),
        (16, 3, 4, 1719, 1820),
    ],
)
def test_recovery_is_as_probable_as_enumeration_says(
    num_slots: int, num_replicas: int, num_lost: int, survived: int, losses: int
) -> None:
    placement = mixed_placement(num_slots, num_replicas)
    assert recovery_probability(placement, num_lost) == Fraction(survived, losses)


def test_the_papers_example_of_five_machines() -> None:
    assert mixed_placement(5, 2) == {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 4), 4: (4, 2)}


def test_fewer_than_two_groups_make_one_ring() -> None:
    assert mixed_placement(3, 2) == {0: (0, 1), 1: (1, 2), 2: (2, 0)}


@given(st.integers(1, 6).flatmap(lambda m: st.tuples(st.integers(m, 60), st.just(m))))
def test_every_placement_keeps_the_shard_at_home_and_spreads_the_load_evenly(sizes: tuple[int, int]) -> None:
    num_slots, num_replicas = sizes
    placement = mixed_placement(num_slots, num_replicas)
    assert list(placement) == list(range(num_slots))
    for slot, holders in placement.items():
        assert holders[0] == slot
        assert len(set(holders)) == len(holders) == num_replicas
        assert set(holders) <= set(placement)
    load = Counter(holder for holders in placement.values() for holder in holders)
    assert set(load.values()) == {num_replicas}
    num_sets = len({frozenset(holders) for holders in placement.values()})
    left_over = num_slots % num_replicas
    last_ring = num_replicas + left_over if left_over else 1
    assert num_sets <= num_slots // num_replicas - 1 + last_ring


@pytest.mark.parametrize(("num_slots", "num_replicas", "named"), [(1, 2, "num_nodes is 1"), (4, 0, "at least 1")])
def test_impossible_numbers_are_refused_with_a_sentence(num_slots: int, num_replicas: int, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        mixed_placement(num_slots, num_replicas)
