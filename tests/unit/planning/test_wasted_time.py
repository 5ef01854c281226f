"""Wasted time in closed form against the paper's figures (sections 2.1, 7.2 and 7.3)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.wasted_time import (
    CheckpointCosts,
    average_wasted_time_s,
    best_wasted_time_s,
    effective_time_ratio,
    max_frequency_per_s,
    renewal_effective_time_ratio,
    transfer_time_s,
    worst_wasted_time_s,
)

GEMINI = CheckpointCosts(iteration_s=62, interval_s=62, write_s=62, retrieval_s=0, recovery_s=15 + 162 + 253)
HIGH_FREQ = CheckpointCosts(
    iteration_s=62, interval_s=558, write_s=480, retrieval_s=480, serialization_s=81, recovery_s=15 + 253
)
STRAWMAN = CheckpointCosts(iteration_s=62, interval_s=10_800, write_s=480, retrieval_s=480, recovery_s=15 + 253)


def test_average_wasted_time_is_that_of_figure_10() -> None:
    assert average_wasted_time_s(GEMINI) == 93
    assert average_wasted_time_s(HIGH_FREQ) == 1320
    assert average_wasted_time_s(STRAWMAN) == 106 * 60
    # The figure's 98 minutes for Strawman leave the retrieval out.
    assert average_wasted_time_s(STRAWMAN) - STRAWMAN.retrieval_s == 98 * 60
    assert average_wasted_time_s(HIGH_FREQ) / average_wasted_time_s(GEMINI) > 13


@pytest.mark.parametrize(
    ("costs", "failures_per_day", "ratio"),
    [
        (GEMINI, 8, 0.952),
        (GEMINI, 15, 0.909),
        (HIGH_FREQ, 1, 0.836),
        (HIGH_FREQ, 3, 0.800),
        (HIGH_FREQ, 8, 0.708),
        (HIGH_FREQ, 15, 0.579),
        (STRAWMAN, 1, 0.923),
        (STRAWMAN, 8, 0.386),
        (STRAWMAN, 13.5, 0.0),
    ],
)
def test_linear_ratio_is_that_of_figure_15(costs: CheckpointCosts, failures_per_day: float, ratio: float) -> None:
    assert effective_time_ratio(costs, failures_per_day) == pytest.approx(ratio, abs=5e-4)


def test_renewal_ratio_lets_a_run_that_fails_often_be_slow_but_not_stand_still() -> None:
    assert effective_time_ratio(STRAWMAN, 15) == 0
    assert renewal_effective_time_ratio(STRAWMAN, 15) == pytest.approx(0.274, abs=5e-4)
    assert renewal_effective_time_ratio(GEMINI, 15) == pytest.approx(effective_time_ratio(GEMINI, 15), rel=0.005)


def test_a_checkpoint_takes_as_long_as_its_bytes() -> None:
    assert transfer_time_s(75.2e9, 2.5e9, num_senders=16) == pytest.approx(480, rel=0.005)
    assert transfer_time_s(75.2e9, 400e9 / 8) == pytest.approx(1.504)


def test_frequency_is_bounded_by_write_and_iteration() -> None:
    assert max_frequency_per_s(480, 62) == 1 / 480
    assert max_frequency_per_s(2.5, 62) == 1 / 62


times = st.floats(0, 1e4)


@given(iteration_s=times, write_s=times, more_s=st.floats(0.1, 1e4), share=st.floats(0, 0.9), retrieval_s=times)
def test_best_average_and_worst_are_half_an_interval_apart(
    iteration_s: float, write_s: float, more_s: float, share: float, retrieval_s: float
) -> None:
    interval_s = max(iteration_s, write_s) + more_s
    costs = CheckpointCosts(iteration_s, interval_s, write_s, retrieval_s, serialization_s=share * interval_s)
    best, average, worst = best_wasted_time_s(costs), average_wasted_time_s(costs), worst_wasted_time_s(costs)
    assert average - best == pytest.approx(interval_s / 2)
    assert worst - average == pytest.approx(interval_s / 2)


@given(
    interval_s=st.floats(1, 1e4),
    write_share=st.floats(0, 1),
    share=st.floats(0, 0.9),
    retrieval_s=times,
    recovery_s=times,
    cost_share=st.floats(1e-5, 1e-3),
)
def test_both_accounts_agree_when_a_failure_costs_little_against_the_time_between_two(
    interval_s: float, write_share: float, share: float, retrieval_s: float, recovery_s: float, cost_share: float
) -> None:
    costs = CheckpointCosts(
        0, interval_s, write_share * interval_s, retrieval_s, serialization_s=share * interval_s, recovery_s=recovery_s
    )
    cost_s = worst_wasted_time_s(costs) + recovery_s
    failures_per_day = cost_share / cost_s * 86_400
    linear = effective_time_ratio(costs, failures_per_day)
    renewal = renewal_effective_time_ratio(costs, failures_per_day)
    # Up to second order they differ by the stalls in lost time, which the linear account counts twice, and by the
    # serialisation in t_ckpt, which is no part of what the exact one loses.
    assert abs(renewal - linear) <= 2 * share * cost_share + cost_share**2 + 1e-12


@given(st.floats(0, 100), st.floats(0.01, 100))
def test_more_failures_never_make_a_run_faster(few: float, more: float) -> None:
    for costs in (GEMINI, HIGH_FREQ, STRAWMAN):
        for ratio in (effective_time_ratio, renewal_effective_time_ratio):
            assert 0 <= ratio(costs, few + more) <= ratio(costs, few) <= 1


def test_without_failures_only_serialisation_costs() -> None:
    for ratio in (effective_time_ratio, renewal_effective_time_ratio):
        assert ratio(HIGH_FREQ, 0) == pytest.approx(1 - 81 / 558)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"interval_s": 400}, "at least 480"),
        ({"interval_s": 0, "write_s": 0, "iteration_s": 0}, "above 0"),
        ({"iteration_s": 700}, "at least 700"),
        ({"serialization_s": 558}, "longer interval_s"),
        ({"retrieval_s": -1}, "retrieval_s is -1"),
        ({"recovery_s": math.nan}, "recovery_s is nan"),
    ],
)
def test_impossible_costs_are_refused_with_a_sentence(values: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        CheckpointCosts(**({"iteration_s": 62, "interval_s": 558, "write_s": 480, "retrieval_s": 480} | values))


def test_impossible_numbers_are_refused_with_a_sentence() -> None:
    for ratio in (effective_time_ratio, renewal_effective_time_ratio):
        with pytest.raises(ConfigurationError, match="failures_per_day is -1"):
            ratio(GEMINI, -1)
    with pytest.raises(ConfigurationError, match="bandwidth_bytes_per_s is 0"):
        transfer_time_s(1, 0)
    with pytest.raises(ConfigurationError, match="neither may be negative"):
        transfer_time_s(-1, 1)
    with pytest.raises(ConfigurationError, match="nor both 0"):
        max_frequency_per_s(0, 0)
