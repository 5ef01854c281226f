"""How things are written, and that text stays text."""

from __future__ import annotations

import pytest
from api_examples import event, job, node

from gemini_ft.contracts.api import JobPhase, NodeModel
from gemini_ft.dashboard.actions import job_actions, node_actions
from gemini_ft.dashboard.events import matching
from gemini_ft.dashboard.tables import Markup, figures, plain_table
from gemini_ft.dashboard.words import PHASE_SIGNS, duration, memory, node_name, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (59.94, "59.9 s"), (61, "1 min 1 s"), (7265, "2 h 1 min")],
)
def test_durations_are_told_in_the_unit_that_people_would_choose(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 40, "3 TiB"), (1 << 60, "1.05e+06 TiB")]
)
def test_sizes_have_binary_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_memory_is_told_against_the_plan_if_there_is_one() -> None:
    assert memory(node(1, store_used_bytes=1024)) == "1 KiB"
    assert memory(node(1, store_used_bytes=1024, store_capacity_bytes=4096)) == "1 KiB of 4 KiB (25.0 %)"


def test_nodes_are_called_what_people_call_them() -> None:
    assert node_name(node(1, labels={"local-node": "n1"})) == "n1"
    assert node_name(node(1)) == "host1"


def test_each_phase_is_told_by_a_sign_as_well() -> None:
    assert set(PHASE_SIGNS) == set(JobPhase)
    signs = {PHASE_SIGNS[phase] for phase in JobPhase if phase is not JobPhase.ASSIGNED}
    assert len(signs) == len(JobPhase) - 1, "only the two halves of a recovery look alike"


def test_what_comes_from_outside_is_text() -> None:
    bad = "<b>\"'&"
    table = plain_table(bad, (bad,), [(bad, Markup.link(f'/x"{bad}', bad))])
    assert "<b>" not in table + figures({bad: bad})
    assert table.count("&lt;b&gt;&quot;&#x27;&amp;") == 5
    assert '<td colspan="2">nothing</td>' in plain_table("", ("a", "b"), (), empty="nothing")


def test_events_are_found_by_kind_job_and_text() -> None:
    events = [event(1, "job_created"), event(2, "node_failed", job_id=None, node_id="node-0f"), event(3, "job_running")]
    assert [one.id for one in matching(events, kind="", job="", text="")] == [3, 2, 1]
    assert [one.id for one in matching(events, kind="node_failed", job="", text="")] == [2]
    assert [one.id for one in matching(events, kind="", job=job().job_id, text="RUN")] == [3]
    assert [one.id for one in matching(events, kind="", job="", text="node-0F")] == [2]


@pytest.mark.parametrize(
    ("phase", "labels"),
    [
        ("pending", ["Stop at once", "Delete"]),
        ("fencing", ["Stop at once"]),
        ("running", ["Checkpoint now", "Stop", "Stop at once"]),
        ("stopping", ["Stop at once"]),
        ("suspended", ["Resume", "Stop at once", "Delete"]),
        ("blocked", ["Restart from zero", "Stop at once"]),
        ("failed", ["Delete"]),
    ],
)
def test_a_job_offers_what_its_phase_allows(phase: str, labels: list[str]) -> None:
    assert [action.label for action in job_actions(job(phase=phase))] == labels


@pytest.mark.parametrize(
    ("shown", "labels"),
    [
        (node(1), ["Drain", "Cordon", "Remove"]),
        (node(1, job_id="job-0000000001", slot=0), ["Drain", "Cordon"]),
        (node(1, job_id="job-0000000001", slot=0, cordoned=True, draining=True), ["Uncordon"]),
        (node(1, cordoned=True), ["Drain", "Uncordon", "Remove"]),
        (node(1, status="failed"), ["Remove"]),
    ],
)
def test_a_node_offers_what_its_state_allows(shown: NodeModel, labels: list[str]) -> None:
    assert [action.label for action in node_actions(shown)] == labels
