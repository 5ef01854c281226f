"""Samples of a job, and rates from them."""

from __future__ import annotations

import pytest
from api_examples import job, node, rank

from gemini_ft.dashboard.history import Sample, sample_of, step_rate, step_rates
from gemini_ft.dashboard.job_charts import progress_options, thinned


def sample(at_s: float, finished: int | None, generation: int = 1) -> Sample:
    return Sample(at_s, generation, finished, None if finished is None else finished - 1, finished, stall_s=0.0)


def test_a_sample_counts_the_ranks_of_the_newest_generation_only() -> None:
    shown = job(generation=2, finished_step=9, committed_step=7)
    members = [
        node(0, ranks=[rank(0, 2, sealed_everywhere_step=9, stall_us=3_000_000), rank(0, 1, sealed_everywhere_step=1)]),
        node(1, ranks=[rank(1, 2, sealed_everywhere_step=8, stall_us=1_000_000)]),
    ]
    taken = sample_of(shown, members, 5.0)
    assert (taken.sealed_step, taken.stall_s) == (8, 3.0)
    assert (taken.lag_steps, taken.commit_lag_steps) == (1, 2)


def test_replication_is_behind_by_every_step_until_each_rank_has_sealed_one() -> None:
    members = [node(0, ranks=[rank(0, sealed_everywhere_step=2)]), node(1, ranks=[rank(1)])]
    taken = sample_of(job(finished_step=2), members, 0.0)
    assert (taken.lag_steps, taken.commit_lag_steps) == (3, 3)
    unknown = sample_of(job(), [], 0.0)
    assert (unknown.lag_steps, unknown.commit_lag_steps) == (None, None)


def test_the_rate_is_of_the_newest_window() -> None:
    samples = [sample(float(second), 10 * second) for second in range(50)]
    samples += [sample(50.0 + second, 490 + 2 * second) for second in range(21)]
    assert step_rate(samples) == pytest.approx(2.0)
    assert step_rate(samples[:50]) == pytest.approx(10.0)


def test_a_new_generation_begins_a_new_rate() -> None:
    samples = [sample(0.0, 100), sample(1.0, 101), sample(2.0, 50, generation=2), sample(3.0, 54, generation=2)]
    assert step_rates(samples) == [None, 1.0, None, 4.0]


def test_what_is_not_known_has_no_rate() -> None:
    assert step_rate([]) is None
    assert step_rate([sample(0.0, 3)]) is None
    assert step_rates([sample(0.0, None), sample(1.0, 4), sample(2.0, None), sample(3.0, 8)]) == [None, None, None, 2.0]


def test_a_chart_has_a_bounded_number_of_points_and_the_newest_among_them() -> None:
    samples = [sample(float(second), second) for second in range(900)]
    points = thinned(samples, 180)
    assert len(points) == 180
    assert points[-1] == (samples[-1], 1.0)
    finished = progress_options(samples)["series"][0]["data"]
    assert finished[-1] == [0.0, 899]
    assert len(finished) == 180
    assert progress_options([])["series"][0]["data"] == []
