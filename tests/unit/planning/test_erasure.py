"""Erasure-coded groups against enumeration and the replicas they compete with."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.erasure import ErasureCode
from gemini_ft.planning.placement import group_placement
from gemini_ft.planning.probability import recovery_probability, set_loss_rate_per_s


@pytest.mark.parametrize(
    ("num_slots", "num_lost", "printed", "replicas"),
    [
        (16, 2, "100.00", "93.3"),
        (16, 3, "97.14", "80.0"),
        (16, 4, "89.23", "61.5"),
        (64, 2, "100.00", "98.4"),
        (64, 3, "99.85", "95.2"),
        (64, 4, "99.39", "90.6"),
    ],
)
def test_groups_of_four_that_survive_two_losses_beat_two_replicas(
    num_slots: int, num_lost: int, printed: str, replicas: str
) -> None:
    coded = ErasureCode(4, 2).recovery_probability(num_slots, num_lost)
    assert f"{float(100 * coded):.2f}" == printed
    assert f"{float(100 * recovery_probability(group_placement(num_slots, 2), num_lost)):.1f}" == replicas


def test_four_coded_members_cost_the_memory_of_two_replicas_and_half_as_many_sends_again() -> None:
    code = ErasureCode(4, 2)
    assert code.memory_factor == 2
    assert code.traffic_factor == Fraction(3, 2)


codes = st.integers(2, 5).flatmap(lambda g: st.builds(ErasureCode, st.just(g), st.integers(1, g - 1)))


@given(codes, st.data())
def test_probabilities_are_what_brute_force_finds(code: ErasureCode, data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(code.num_members, 11))
    groups = code.groups(num_slots)
    for num_lost in range(num_slots + 1):
        losses = list(combinations(range(num_slots), num_lost))
        survived = [all(len(set(group) & set(lost)) <= code.num_losses for group in groups) for lost in losses]
        assert code.recovery_probability(num_slots, num_lost) == Fraction(sum(survived), len(losses))


@given(codes, st.data())
def test_groups_share_all_slots_evenly(code: ErasureCode, data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(code.num_members, 100))
    groups = code.groups(num_slots)
    assert [slot for group in groups for slot in group] == list(range(num_slots))
    sizes = {len(group) for group in groups}
    assert min(sizes) >= code.num_members
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == num_slots // code.num_members


@given(st.integers(2, 5), st.integers(1, 6), st.data())
def test_a_code_that_survives_all_but_one_is_group_placement(
    num_members: int, num_groups: int, data: st.DataObject
) -> None:
    code, num_slots = ErasureCode(num_members, num_members - 1), num_members * num_groups
    placement = group_placement(num_slots, num_members)
    num_lost = data.draw(st.integers(0, num_slots))
    assert code.recovery_probability(num_slots, num_lost) == recovery_probability(placement, num_lost)
    assert code.memory_factor == num_members
    assert code.traffic_factor == num_members - 1
    assert code.loss_rate_per_s(num_slots, 1e-6, 600) == pytest.approx(set_loss_rate_per_s(placement, 1e-6, 600))


def test_a_large_job_whose_groups_are_not_all_alike() -> None:
    code = ErasureCode(4, 2)
    # 2,499 groups of four and one of five; with three losses only three of one group are fatal.
    num_fatal = 2_499 * 4 + 10
    num_losses = 10_001 * 10_000 * 9_999 // 6
    assert code.recovery_probability(10_001, 3) == 1 - Fraction(num_fatal, num_losses)
    assert code.loss_rate_per_s(10_001, 1e-6, 600) == pytest.approx(num_fatal * 3e-6 * 6e-4**2)
    assert code.recovery_probability(10_001, 100) < code.recovery_probability(10_001, 99) < 1
    assert code.recovery_probability(10_001, 10_001) == 0


@pytest.mark.parametrize(("num_members", "num_losses"), [(4, 0), (4, 4), (1, 1)])
def test_codes_that_cannot_be_are_refused(num_members: int, num_losses: int) -> None:
    with pytest.raises(ConfigurationError, match="give num_losses from 1 to num_members - 1"):
        ErasureCode(num_members, num_losses)


def test_too_few_nodes_or_too_many_losses_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs as many nodes, but there are 3"):
        ErasureCode().groups(3)
    with pytest.raises(ConfigurationError, match="9 lost nodes is not possible"):
        ErasureCode().recovery_probability(8, 9)
