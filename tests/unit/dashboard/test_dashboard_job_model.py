"""What a job did when, and what of it was useful."""

from __future__ import annotations

from datetime import timedelta

import pytest
from api_examples import BEGIN, event, job, recovery

from gemini_ft.dashboard.job_model import Activity, account, timeline

STARTED = [
    event(1, "job_created", at_s=0),
    event(2, "generation_begun", at_s=1, generation=1),
    event(3, "job_running", at_s=3, generation=1),
]


def test_a_life_is_told_from_its_events() -> None:
    events = [
        *STARTED,
        event(4, "audit_checkpoint", at_s=5),
        event(5, "generation_begun", at_s=13, generation=2),
        event(6, "generation_begun", at_s=14, generation=3),
        event(7, "job_running", at_s=15, generation=3),
        event(8, "job_suspended", at_s=20, generation=4),
        event(9, "generation_begun", at_s=30, generation=5),
        event(10, "job_running", at_s=31, generation=5),
        event(11, "job_succeeded", at_s=41, generation=5),
    ]
    spans = timeline(events, BEGIN + timedelta(days=1))
    assert [(span.activity, span.length_s) for span in spans] == [
        (Activity.WAITING, 1),
        (Activity.STARTING, 2),
        (Activity.TRAINING, 10),
        (Activity.RECOVERING, 2),
        (Activity.TRAINING, 5),
        (Activity.SUSPENDED, 10),
        (Activity.RECOVERING, 1),
        (Activity.TRAINING, 10),
    ]
    assert [span.generation for span in spans][2:5] == [1, 2, 3]


def test_a_life_goes_on_until_now_even_if_this_clock_is_behind() -> None:
    assert timeline(STARTED, BEGIN + timedelta(seconds=7))[-1].length_s == 4
    assert timeline(STARTED, BEGIN)[-1].length_s == 0
    assert timeline([], BEGIN) == []


def test_an_account_adds_up() -> None:
    events = [
        *STARTED,
        event(5, "generation_begun", at_s=43, generation=2),
        event(7, "job_running", at_s=45, generation=2),
        event(8, "job_blocked", at_s=105, generation=2),
    ]
    spans = timeline(events, BEGIN + timedelta(seconds=115))
    recoveries = [recovery(2, num_steps_lost=10, phases_ms={"detect": 2000.0, "fence": 500.0})]
    found = account(job(finished_step=187), spans, recoveries, stall_s=3.0)
    # 100 s between the events, of which 2 s until the failure was noticed; 198 steps were done in the rest.
    assert found.recovering_s == pytest.approx(4.0)
    assert found.lost_work_s == pytest.approx(98 * 10 / 198)
    assert found.stall_s == 3.0
    assert found.waiting_s == pytest.approx(13.0)
    assert found.useful_s + found.wasted_s + found.waiting_s == pytest.approx(115.0)
    assert found.goodput == pytest.approx(found.useful_s / 102)


def test_nothing_is_useful_or_wasted_before_the_first_step() -> None:
    found = account(job(), timeline(STARTED[:2], BEGIN + timedelta(seconds=2)), [])
    assert found.goodput is None
    assert (found.useful_s, found.wasted_s, found.waiting_s) == (0.0, 0.0, 2.0)
