"""Means over seeds and their intervals."""

from __future__ import annotations

import pytest

from gemini_ft.planning.simulation.results import Cause, RunResult, Tier, estimate, summarize


@pytest.mark.parametrize(
    ("num_values", "quantile"),
    [(2, 12.706), (3, 4.303), (4, 3.182), (6, 2.571), (11, 2.228), (31, 2.042), (121, 1.980)],
)
def test_intervals_are_students(num_values: int, quantile: float) -> None:
    values = [float(number % 2) for number in range(num_values)]
    mean = sum(values) / num_values
    error = (sum((value - mean) ** 2 for value in values) / (num_values - 1) / num_values) ** 0.5
    made = estimate(values)
    assert made.mean == pytest.approx(mean)
    assert made.high is not None
    assert made.low is not None
    assert made.high - mean == pytest.approx(quantile * error, rel=0.01)
    assert mean - made.low == pytest.approx(made.high - mean)


def test_one_value_has_no_interval() -> None:
    made = estimate([3.0])
    assert (made.mean, made.low, made.high) == (3, None, None)


def result(seed: int, useful_us: int, num_software: int, wasted_us: dict[Cause, int]) -> RunResult:
    return RunResult(
        seed=seed,
        total_us=10_000_000,
        useful_us=useful_us,
        wasted_us=dict.fromkeys(Cause, 0) | wasted_us,
        recoveries=dict.fromkeys(Tier, 0) | {Tier.LOCAL: num_software},
        num_failures={"software": num_software, "hardware": 0},
        num_restarted_recoveries=0,
        num_lost_sets=0,
    )


def test_shares_add_up_to_one_and_stalls_are_no_cost_of_failures() -> None:
    summary = summarize(
        "two",
        [
            result(0, 6_000_000, 3, {Cause.STALL: 1_000_000, Cause.WARM_UP: 3_000_000}),
            result(1, 8_000_000, 1, {Cause.STALL: 1_000_000, Cause.LOST_WORK: 1_000_000}),
        ],
    )
    shares = sum(share.mean for share in summary.wasted_shares.values())
    assert summary.effective_time_ratio.mean + shares == pytest.approx(1)
    assert summary.wasted_s_per_failure == pytest.approx((3 + 1) / 4)
    assert summary.recoveries[Tier.LOCAL].mean == summary.num_failures["software"].mean == 2
    assert summary.duration_s == 10


def test_without_failures_there_is_no_cost_of_one() -> None:
    summary = summarize("none", [result(0, 10_000_000, 0, {})])
    assert summary.wasted_s_per_failure is None
    assert summary.effective_time_ratio.mean == 1
