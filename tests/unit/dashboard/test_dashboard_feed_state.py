"""What is known, after one answer and the next."""

from __future__ import annotations

from api_examples import cluster, event, job, node, rank

from gemini_ft.contracts.errors import AuthenticationError, UnavailableError
from gemini_ft.dashboard.feed_state import FeedState, Freshness
from gemini_ft.dashboard.frame import stale_sentence

JOB = job()
DOWN = UnavailableError("the API cannot be reached")


def test_data_grow_old_while_the_api_does_not_answer_and_are_kept() -> None:
    state = FeedState()
    state.renew(cluster(num_nodes=1), [node(1)], [JOB], now_s=100.0)
    assert stale_sentence(state.freshness(102.0)) == ""
    state.fail(DOWN)
    assert stale_sentence(state.freshness(102.0)) == ""
    assert stale_sentence(state.freshness(107.4)) == "Data are 7 s old: the API cannot be reached"
    assert list(state.nodes) == [node(1).node_id]
    state.renew(cluster(), [], [], now_s=110.0)
    assert state.freshness(110.0) == Freshness(0.0, "")


def test_before_the_first_answer_there_are_no_data() -> None:
    state = FeedState()
    assert stale_sentence(state.freshness(5.0)) == ""
    state.fail(DOWN)
    assert stale_sentence(state.freshness(5.0)) == "There are no data yet: the API cannot be reached"


def test_everything_that_pages_show_raises_the_version() -> None:
    state = FeedState()
    versions = [state.version]
    for change in (
        lambda: state.renew(cluster(), [], [], now_s=0.0),
        lambda: state.fail(DOWN),
        lambda: state.happen(event(1, "job_created")),
        lambda: state.learn(JOB.job_id, []),
        lambda: state.refuse(AuthenticationError("revoked")),
    ):
        change()
        versions.append(state.version)
    assert versions == sorted(set(versions))
    assert state.refusal == "revoked"


def test_an_event_that_comes_twice_happened_once() -> None:
    state = FeedState()
    for number in (1, 2, 2, 1, 3):
        state.happen(event(number, "job_created"))
    assert [one.id for one in state.events] == [1, 2, 3]
    assert state.newest_event_id == 3


def test_a_jobs_events_are_its_history_and_then_what_happens() -> None:
    state = FeedState()
    assert state.events_of(JOB.job_id) is None
    for number in (5, 6):
        state.happen(event(number, "job_running"))
    state.learn(JOB.job_id, [event(number, "job_created") for number in (1, 5)])
    state.happen(event(7, "job_running", job_id="job-00000000ff"))
    state.happen(event(8, "job_running"))
    assert [one.id for one in state.events_of(JOB.job_id) or ()] == [1, 5, 6, 8]


def test_only_the_newest_events_are_kept() -> None:
    state = FeedState()
    for number in range(1, 3001):
        state.happen(event(number, "job_running"))
    assert [state.events[0].id, state.events[-1].id] == [1001, 3000]


def test_open_jobs_have_samples_until_they_are_gone() -> None:
    state = FeedState()
    member = node(1, job_id=JOB.job_id, slot=0, ranks=[rank(0, stall_us=2_000_000)])
    for second in range(1000):
        state.renew(cluster(), [member], [job(finished_step=second)], now_s=float(second))
    samples = state.samples(JOB.job_id)
    assert len(samples) == 900
    assert (samples[-1].finished_step, samples[-1].stall_s) == (999, 2.0)
    state.renew(cluster(), [], [job(phase="succeeded")], now_s=1001.0)
    assert len(state.samples(JOB.job_id)) == 900
    state.renew(cluster(), [], [], now_s=1002.0)
    assert state.samples(JOB.job_id) == ()


def test_members_come_by_slot_and_standbys_last() -> None:
    state = FeedState()
    nodes = [node(number, job_id=JOB.job_id, slot=slot) for number, slot in ((1, None), (2, 1), (3, 0))]
    state.renew(cluster(), [*nodes, node(4)], [JOB], now_s=0.0)
    assert [one.slot for one in state.members(JOB.job_id)] == [0, 1, None]
