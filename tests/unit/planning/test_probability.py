"""Exact probabilities of recovery: the published tables to the last digit, brute force, and large jobs."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning.placement import (
    Strategy,
    build_placement,
    group_placement,
    mixed_placement,
    replica_sets,
    ring_placement,
    share_placement,
)
from gemini_ft.planning.probability import (
    NoExactMethodError,
    all_down_rate_per_s,
    corollary_1,
    num_survivable_losses,
    recovery_probability,
    recovery_probability_domains,
    recovery_probability_independent,
    set_loss_rate_per_s,
)

DAY_S = 86_400.0

# N, k, then per strategy the percentage and the number of losses that are survived; last, for m = 2, the percentage of
# Corollary 1. All k-subsets were enumerated by a program of its own.
TWO_REPLICAS = """
  8 2 |       85.714 24 |       71.429 20 |       85.714 24 |       85.714 24 | 85.714
  8 3 |       57.143 32 |       28.571 16 |       57.143 32 |       57.143 32 | 57.143
  8 4 |       22.857 16 |         2.857 2 |       22.857 16 |       22.857 16 | 14.286
  9 2 |               - |       75.000 27 |       83.333 30 |       86.111 31 |      -
  9 3 |               - |       35.714 30 |       52.381 44 |       59.524 50 |      -
  9 4 |               - |         7.143 9 |       19.048 24 |       28.571 36 |      -
 15 2 |               - |       85.714 90 |       91.429 96 |       92.381 97 |      -
 15 3 |               - |      60.440 275 |      74.725 340 |      77.363 352 |      -
 15 4 |               - |      32.967 450 |      52.747 720 |      57.143 780 |      -
 16 2 |      93.333 112 |      86.667 104 |      93.333 112 |      93.333 112 | 93.333
 16 3 |      80.000 448 |      62.857 352 |      80.000 448 |      80.000 448 | 80.000
 16 4 |     61.538 1120 |      36.264 660 |     61.538 1120 |     61.538 1120 | 60.000
 17 2 |               - |      87.500 119 |      92.647 126 |      93.382 127 |      -
 17 3 |               - |      65.000 442 |      78.235 532 |      80.294 546 |      -
 17 4 |               - |      39.286 935 |     58.824 1400 |     62.353 1484 |      -
 32 2 |      96.774 480 |      93.548 464 |      96.774 480 |      96.774 480 | 96.774
 32 3 |     90.323 4480 |     81.290 4032 |     90.323 4480 |     90.323 4480 | 90.323
 32 4 |    80.979 29120 |    65.072 23400 |    80.979 29120 |    80.979 29120 | 80.645
 64 2 |     98.413 1984 |     96.825 1952 |     98.413 1984 |     98.413 1984 | 98.413
 64 3 |    95.238 39680 |    90.630 37760 |    95.238 39680 |    95.238 39680 | 95.238
 64 4 |   90.554 575360 |   81.864 520144 |   90.554 575360 |   90.554 575360 | 90.476
128 2 |     99.213 8064 |     98.425 8000 |     99.213 8064 |     99.213 8064 | 99.213
128 3 |   97.638 333312 |   95.313 325376 |   97.638 333312 |   97.638 333312 | 97.638
128 4 | 95.294 10166016 |  90.775 9683872 | 95.294 10166016 | 95.294 10166016 | 95.276
"""
THREE_REPLICAS = """
  8 2 |               - |      100.000 28 |      100.000 28 |      100.000 28
 16 2 |               - |     100.000 120 |     100.000 120 |     100.000 120
 32 2 |               - |     100.000 496 |     100.000 496 |     100.000 496
 64 2 |               - |    100.000 2016 |    100.000 2016 |    100.000 2016
128 2 |               - |    100.000 8128 |    100.000 8128 |    100.000 8128
  8 3 |               - |       85.714 48 |       89.286 50 |       94.643 53
  8 4 |               - |       54.286 38 |       64.286 45 |       78.571 55
  9 3 |       96.429 81 |       89.286 75 |       96.429 81 |       96.429 81
  9 4 |      85.714 108 |       64.286 81 |      85.714 108 |      85.714 108
 15 3 |      98.901 450 |      96.703 440 |      98.901 450 |      98.901 450
 15 4 |     95.604 1305 |     87.912 1200 |     95.604 1305 |     95.604 1305
 16 3 |               - |      97.143 544 |      98.571 552 |      98.929 554
 16 4 |               - |     89.451 1628 |     94.451 1719 |     95.769 1743
 32 3 |               - |     99.355 4928 |     99.718 4946 |     99.778 4949
 32 4 |               - |    97.508 35064 |    98.885 35559 |    99.113 35641
 64 3 |               - |    99.846 41600 |    99.942 41640 |    99.947 41642
 64 4 |               - |   99.396 631536 |   99.770 633915 |   99.789 634035
128 3 |               - |   99.963 341248 |   99.987 341330 |   99.987 341333
128 4 |               - | 99.851 10652128 | 99.946 10662255 | 99.950 10662625
"""


def table_rows(table: str, num_replicas: int) -> list[tuple[int, int, int, list[str]]]:
    rows = []
    for line in table.strip().splitlines():
        numbers, *cells = line.split("|")
        num_slots, num_lost = map(int, numbers.split())
        rows.append((num_replicas, num_slots, num_lost, [cell.strip() for cell in cells]))
    return rows


ROWS = table_rows(TWO_REPLICAS, 2) + table_rows(THREE_REPLICAS, 3)


@pytest.mark.parametrize(
    ("num_replicas", "num_slots", "num_lost", "cells"), ROWS, ids=["m{}-N{}-k{}".format(*row) for row in ROWS]
)
def test_every_number_of_the_tables(num_replicas: int, num_slots: int, num_lost: int, cells: list[str]) -> None:
    for strategy, cell in zip(Strategy, cells, strict=False):
        if cell == "-":
            with pytest.raises(ConfigurationError, match="leave"):
                build_placement(strategy, num_slots, num_replicas)
            continue
        percentage, survived = cell.split()
        placement = build_placement(strategy, num_slots, num_replicas)
        assert num_survivable_losses(placement, num_lost) == int(survived)
        probability = recovery_probability(placement, num_lost)
        assert probability == Fraction(int(survived), math.comb(num_slots, num_lost))
        assert f"{float(100 * probability):.3f}" == percentage
    for corollary in cells[len(Strategy) :]:
        if corollary == "-":
            with pytest.raises(ConfigurationError, match="divides"):
                corollary_1(num_slots, num_replicas, num_lost)
        else:
            assert f"{float(100 * corollary_1(num_slots, num_replicas, num_lost)):.3f}" == corollary


def test_the_papers_percentages_of_section_7_2() -> None:
    """Figure 9 draws the ring at k = 3 as 60 %: the union bound, which counts three lost in a row twice."""
    assert recovery_probability(group_placement(16, 2), 2) == Fraction(14, 15)
    assert recovery_probability(group_placement(16, 2), 3) == Fraction(4, 5)
    assert recovery_probability(ring_placement(16, 2), 3) == Fraction(352, 560)
    assert 1 - Fraction(16 * math.comb(14, 1), 560) == Fraction(3, 5)
    assert num_survivable_losses(group_placement(4, 2), 2) == 6 - 2
    assert num_survivable_losses(ring_placement(4, 2), 2) == 6 - 4


@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_corollary_1_is_exact_below_2m_and_a_lower_bound_beyond(
    num_replicas: int, num_groups: int, data: st.DataObject
) -> None:
    num_slots = num_replicas * num_groups
    num_lost = data.draw(st.integers(0, num_slots))
    exact = recovery_probability(group_placement(num_slots, num_replicas), num_lost)
    if num_lost < 2 * num_replicas:
        assert corollary_1(num_slots, num_replicas, num_lost) == exact
    else:
        assert corollary_1(num_slots, num_replicas, num_lost) < exact or exact == 0


@pytest.mark.parametrize(("num_slots", "num_lost"), [(16, 4), (8, 4), (128, 4)])
def test_corollary_1_is_strictly_below_where_two_groups_can_be_lost(num_slots: int, num_lost: int) -> None:
    exact = recovery_probability(group_placement(num_slots, 2), num_lost)
    assert exact == Fraction(math.comb(num_slots // 2, num_lost) * 2**num_lost, math.comb(num_slots, num_lost))
    assert corollary_1(num_slots, 2, num_lost) < exact


# Brute force


def survives(placement: Placement, lost: frozenset[int]) -> bool:
    return all(any(holder not in lost for holder in holders) for holders in placement.values())


def relabelled(placement: Placement, names: list[int]) -> Placement:
    return {names[slot]: tuple(names[holder] for holder in holders) for slot, holders in placement.items()}


@st.composite
def structured(draw: st.DrawFn) -> Placement:
    """A placement of some strategy, its slots permuted."""
    num_replicas = draw(st.integers(1, 4))
    num_slots = draw(st.integers(num_replicas, 10))
    strategy = draw(st.sampled_from([Strategy.RING, Strategy.MIXED, Strategy.SHARE]))
    names = draw(st.permutations(range(num_slots)))
    return relabelled(build_placement(strategy, num_slots, num_replicas), names)


@st.composite
def arbitrary(draw: st.DrawFn) -> Placement:
    """Any holders at all, also of different numbers, and not always itself."""
    num_slots = draw(st.integers(1, 9))
    holders = st.lists(st.integers(0, num_slots - 1), min_size=1, max_size=4, unique=True)
    return {slot: tuple(draw(holders)) for slot in range(num_slots)}


placements = st.one_of(structured(), arbitrary())


@given(placements)
def test_counts_are_what_brute_force_finds(placement: Placement) -> None:
    for num_lost in range(len(placement) + 1):
        found = sum(survives(placement, frozenset(lost)) for lost in combinations(placement, num_lost))
        assert num_survivable_losses(placement, num_lost) == found


@given(placements, st.floats(0, 1))
def test_independent_losses_are_what_brute_force_finds(placement: Placement, p: float) -> None:
    num_slots = len(placement)
    expected = sum(
        p**num_lost * (1 - p) ** (num_slots - num_lost) * num_survivable_losses(placement, num_lost)
        for num_lost in range(num_slots + 1)
    )
    assert recovery_probability_independent(placement, p) == pytest.approx(expected, abs=1e-12)


@given(placements, st.data())
def test_losses_of_domains_are_what_brute_force_finds(placement: Placement, data: st.DataObject) -> None:
    domains = {slot: data.draw(st.sampled_from("abcd"), label=f"domain of {slot}") for slot in placement}
    names = sorted(set(domains.values()))
    num_lost = data.draw(st.integers(0, len(names)))
    found = [
        survives(placement, frozenset(slot for slot in placement if domains[slot] in lost))
        for lost in combinations(names, num_lost)
    ]
    assert recovery_probability_domains(placement, domains, num_lost) == Fraction(sum(found), len(found))


# Large jobs


def shuffled(placement: Placement) -> Placement:
    names = list(placement)
    random.Random(len(names)).shuffle(names)
    return relabelled(placement, names)


@pytest.mark.parametrize("num_lost", [0, 1, 2, 3, 17, 100])
def test_ten_thousand_nodes_and_two_replicas_are_the_closed_forms(num_lost: int) -> None:
    def choices(num_pairs: int, lost: int) -> int:
        return math.comb(num_pairs, lost) * 2**lost if lost >= 0 else 0

    ring = 10_000 * math.comb(10_000 - num_lost, num_lost) // (10_000 - num_lost)
    pairs = choices(5_000, num_lost)
    # N = 10,001: 4,999 pairs, and three slots that are a ring (one may go) or a path (also both ends).
    mixed = choices(4_999, num_lost) + 3 * choices(4_999, num_lost - 1)
    share = mixed + choices(4_999, num_lost - 2)
    for placement, expected in [
        (group_placement(10_000, 2), pairs),
        (ring_placement(10_000, 2), ring),
        (mixed_placement(10_001, 2), mixed),
        (share_placement(10_001, 2), share),
    ]:
        assert num_survivable_losses(placement, num_lost) == expected
        assert num_survivable_losses(shuffled(placement), num_lost) == expected


@pytest.mark.parametrize("num_lost", [3, 4, 5, 100])
def test_ten_thousand_nodes_and_three_replicas(num_lost: int) -> None:
    n = 9_999
    group = num_survivable_losses(group_placement(n, 3), num_lost)
    assert group == sum(
        (-1) ** j * math.comb(n // 3, j) * math.comb(n - 3 * j, num_lost - 3 * j) for j in range(num_lost // 3 + 1)
    )
    ring = ring_placement(n, 3)
    survived = num_survivable_losses(ring, num_lost)
    assert survived == num_survivable_losses(shuffled(ring), num_lost)
    windows = n * math.comb(n - 3, num_lost - 3)
    if num_lost == 3:
        assert survived == math.comb(n, 3) - windows
    elif num_lost == 4:
        assert survived == math.comb(n, 4) - windows + n
    else:
        assert math.comb(n, num_lost) - windows < survived < group
    mixed, share = mixed_placement(n + 2, 3), share_placement(n + 2, 3)
    assert recovery_probability(ring_placement(n + 2, 3), num_lost) < recovery_probability(mixed, num_lost)
    assert recovery_probability(mixed, num_lost) < recovery_probability(share, num_lost)
    for placement in (mixed, share):
        assert num_survivable_losses(shuffled(placement), num_lost) == num_survivable_losses(placement, num_lost)


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_a_ring_is_its_line_less_what_the_closing_windows_lose(num_replicas: int) -> None:
    """Without the windows that close the circle a ring is a line, which is swept: another method, same answer."""
    n, num_lost = 60, 9
    line = {slot: tuple(range(slot, slot + num_replicas)) for slot in range(n - num_replicas + 1)}
    line |= {slot: line[n - num_replicas] for slot in range(n - num_replicas + 1, n)}
    runs_around = 0
    for run in range(num_replicas, 2 * num_replicas - 1):
        # A run of lost slots over the cut, ended by a survivor on either side, each part shorter than a window.
        splits = sum(1 for left in range(1, num_replicas) if 1 <= run - left < num_replicas)
        inner = n - run - 2
        runs_around += splits * num_line_survivable(inner, num_replicas, num_lost - run)
    assert num_survivable_losses(line, num_lost) == num_line_survivable(n, num_replicas, num_lost)
    ring = num_survivable_losses(ring_placement(n, num_replicas), num_lost)
    assert ring == num_survivable_losses(line, num_lost) - runs_around


def num_line_survivable(size: int, window: int, num_lost: int) -> int:
    """Ways to put `num_lost` losses into the gaps around the survivors, fewer than `window` into each."""
    ways = [1] + [0] * num_lost
    for _ in range(size - num_lost + 1):
        ways = [sum(ways[max(0, lost - window + 1) : lost + 1]) for lost in range(num_lost + 1)]
    return ways[num_lost]


def test_independent_losses_of_a_large_job() -> None:
    p = 0.015
    assert recovery_probability_independent(group_placement(10_000, 2), p) == pytest.approx((1 - p**2) ** 5_000)
    ring = ring_placement(800, 3)
    mixture = sum(
        math.comb(800, lost) * p**lost * (1 - p) ** (800 - lost) * recovery_probability(ring, lost)
        for lost in range(50)
    )
    assert recovery_probability_independent(shuffled(ring), p) == pytest.approx(float(mixture), rel=1e-9)


def test_racks_that_fail_whole() -> None:
    """Neighbours in one rack: every rack is fatal. Pairs across two racks: only the two together are."""
    placement = group_placement(10_000, 2)
    assert recovery_probability_domains(placement, {slot: slot // 20 for slot in placement}, 1) == 0
    across = {slot: (slot // 40, slot % 2) for slot in placement}
    assert recovery_probability_domains(placement, across, 1) == 1
    assert recovery_probability_domains(placement, across, 100) == recovery_probability(group_placement(500, 2), 100)


def entangled_placement(num_slots: int) -> Placement:
    chosen = random.Random(7)
    return {slot: (slot, *chosen.sample([p for p in range(num_slots) if p != slot], 2)) for slot in range(num_slots)}


def test_what_no_exact_method_covers_is_said_and_sent_to_monte_carlo() -> None:
    entangled = entangled_placement(200)
    with pytest.raises(NoExactMethodError, match="Monte Carlo") as refused:
        recovery_probability(entangled, 50)
    assert (refused.value.num_points, refused.value.num_sets) == (200, 200)
    with pytest.raises(NoExactMethodError, match="Monte Carlo"):
        recovery_probability_independent(entangled, 0.1)


def test_losses_of_up_to_m_are_exact_for_any_placement() -> None:
    entangled = entangled_placement(200)
    assert recovery_probability(entangled, 2) == 1
    assert num_survivable_losses(entangled, 3) == math.comb(200, 3) - 200


@pytest.mark.parametrize("num_racks", [12, 50])
def test_few_lost_racks_are_exact_however_the_groups_cross_them(num_racks: int) -> None:
    """With 12 racks the sweep has few states; with 50 it gives up, and the choices are enumerated."""
    chosen = random.Random(7)
    placement = group_placement(900, 3)
    racks: dict[int, int] = {}
    for members in replica_sets(placement):
        racks |= dict(zip(sorted(members), chosen.sample(range(num_racks), 3), strict=True))
    crossed = {frozenset(racks[slot] for slot in members) for members in replica_sets(placement)}
    fatal = {members | {rack} for members in crossed for rack in range(num_racks) if rack not in members}
    choices = math.comb(num_racks, 4)
    assert recovery_probability_domains(placement, racks, 4) == 1 - Fraction(len(fatal), choices)


# Rates and refusals


@pytest.mark.parametrize(("exposure_minutes", "every_days"), [(12, 533), (7, 914)])
def test_pairs_are_rarely_lost_when_failures_are_independent(exposure_minutes: int, every_days: int) -> None:
    """1.5 % of 1000 nodes fail a day (paper section 7.2); N L^2 W, and twice that for the ring."""
    failures_per_s = 0.015 / DAY_S
    group = set_loss_rate_per_s(group_placement(1_000, 2), failures_per_s, exposure_minutes * 60)
    ring = set_loss_rate_per_s(ring_placement(1_000, 2), failures_per_s, exposure_minutes * 60)
    assert group == pytest.approx(1_000 * failures_per_s**2 * exposure_minutes * 60)
    assert round(1 / (group * DAY_S)) == every_days
    assert ring == pytest.approx(2 * group)
    if exposure_minutes == 12:
        assert f"{group * DAY_S:.4f}" == "0.0019"


def test_a_rate_of_one_member_is_the_failure_rate_and_of_three_is_of_third_order() -> None:
    assert all_down_rate_per_s(1, 1e-6, 600) == 1e-6
    assert all_down_rate_per_s(3, 1e-6, 600) == pytest.approx(3e-6 * 6e-4**2)


@pytest.mark.parametrize(("rate", "exposure_s"), [(-1.0, 1.0), (1.0, -1.0)])
def test_negative_rates_are_refused(rate: float, exposure_s: float) -> None:
    with pytest.raises(ConfigurationError, match="neither can be negative"):
        set_loss_rate_per_s(ring_placement(4, 2), rate, exposure_s)


@pytest.mark.parametrize("num_lost", [-1, 5])
def test_impossible_losses_are_refused(num_lost: int) -> None:
    placement = ring_placement(4, 2)
    with pytest.raises(ConfigurationError, match=f"{num_lost} lost nodes is not possible: there are 4"):
        recovery_probability(placement, num_lost)
    with pytest.raises(ConfigurationError, match=f"{num_lost} lost nodes is not possible"):
        corollary_1(4, 2, num_lost)
    with pytest.raises(ConfigurationError, match=f"{num_lost} lost failure domains is not possible"):
        recovery_probability_domains(placement, dict.fromkeys(range(4), "rack"), num_lost)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_what_is_no_probability_is_refused(p: float) -> None:
    with pytest.raises(ConfigurationError, match="node_loss_probability is"):
        recovery_probability_independent(ring_placement(4, 2), p)


def test_a_slot_without_a_domain_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="slot 1 has no failure domain"):
        recovery_probability_domains(ring_placement(2, 2), {0: "rack"}, 1)
