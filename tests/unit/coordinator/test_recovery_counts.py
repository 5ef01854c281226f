"""Causes are sentences for people; each kind is recognised in the words of whoever says them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from gemini_ft.contracts.errors import NoVersionError
from gemini_ft.contracts.messages import Address, Heartbeat, JobSpec, RankState, RankStatus
from gemini_ft.coordinator.actions import AssignPlan, BeginGeneration, CompleteRecovery
from gemini_ft.coordinator.observations import Observations
from gemini_ft.coordinator.reconcile import decide
from gemini_ft.coordinator.recovery_counts import Cause, RecoveryCounts, cause_of
from gemini_ft.coordinator.settings import CoordinatorSettings
from gemini_ft.coordinator.state import (
    Cluster,
    HoldReason,
    JobPhase,
    JobView,
    NodeStatus,
    NodeView,
    StoredPlan,
)
from gemini_ft.failure_detector.judge import Judge
from gemini_ft.failure_detector.settings import DetectorSettings

JOB = "job-1"
INCARNATION = "0" * 32
ADDRESS = Address(host="127.0.0.1", port=1)
RANK: dict[str, Any] = {"rank": 0, "generation": 1, "pid": 7, "state": RankState.RUNNING, "finished_step": 5}
BEAT: dict[str, Any] = {
    "node_id": "node-0",
    "incarnation": INCARNATION,
    "address": ADDRESS,
    "interval_s": 1.0,
    "job_id": JOB,
    "ordered_generation": 1,
    "assigned_generation": 1,
    "hang_timeout_s": 5.0,
    "launcher_connected": True,
}


def beat(sequence: int = 1, rank: dict[str, Any] | None = None, **facts: Any) -> Heartbeat:
    return Heartbeat(**(BEAT | {"sequence": sequence, "ranks": (RankStatus(**(RANK | (rank or {}))),)} | facts))


def cluster(node: dict[str, Any] | None = None, job: dict[str, Any] | None = None) -> Cluster:
    spec = JobSpec(name="test", num_nodes=1, num_ranks_per_node=1, num_replicas=1)
    known: dict[str, Any] = {
        "node_id": "node-0",
        "incarnation": INCARNATION,
        "hostname": "host",
        "labels": {},
        "address": ADDRESS,
        "status": NodeStatus.ALIVE,
        "judged_sequence": 9,
        "job_id": JOB,
        "slot": 0,
        "registered_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    view: dict[str, Any] = {
        "job_id": JOB,
        "spec": spec,
        "job_key": "key",
        "phase": JobPhase.RUNNING,
        "generation": 1,
        "zero_generation": 1,
        "from_zero": False,
        "waiting_for": "",
        "cause": "",
        "blocked_by": (),
        "num_fruitless_recoveries": 0,
        "progress_step": None,
        "committed_step": 4,
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
        "slots": {0: "node-0"},
        "plan": StoredPlan(slots={0: "node-0"}, placement={0: (0,)}, restore_step=None),
    }
    return Cluster({JOB: JobView(**(view | (job or {})))}, {"node-0": NodeView(**(known | (node or {})))})


def causes(seen: Observations, found: Cluster, now: float) -> Iterator[str]:
    for action in decide(found, seen, now, CoordinatorSettings()):
        if isinstance(action, BeginGeneration):
            yield action.cause


def the_cause(heartbeat: Heartbeat, found: Cluster | None = None, wait_s: float = 0.0) -> Cause:
    """What the coordinator says after a heartbeat and some time."""
    now = 1000.0
    seen = Observations(lambda: now)
    seen.hear(heartbeat)
    seen.note_phase(JOB, 1, JobPhase.RUNNING)
    now += wait_s
    (sentence,) = causes(seen, found or cluster(), now)
    return cause_of(sentence)


def judged_cause(*beats: Heartbeat, silent_s: float) -> Cause:
    """What the coordinator says after a verdict of the detector."""
    settings, now = DetectorSettings(), 1000.0
    judge = Judge(settings, now)
    verdicts = [verdict for heartbeat in beats for verdict in judge.hear(heartbeat, now)]
    end = now + silent_s
    while now < end and not verdicts:
        now += settings.tick_s
        judge.echo(now)
        # It lives and makes no progress.
        verdicts += judge.hear(beat(sequence=round(now * 100)), now)
        verdicts += judge.tick(now)
    seen = Observations(lambda: now)
    seen.hear_rank_verdict(verdicts[0])
    (sentence,) = causes(seen, cluster(), now)
    return cause_of(sentence)


def test_a_rank_that_ended() -> None:
    ended = beat(rank={"state": RankState.EXITED, "exit_code": -9, "detail": "Traceback\nnode-1 has failed"})
    assert judged_cause(ended, silent_s=0.0) is Cause.RANK_EXITED


def test_a_rank_that_hangs() -> None:
    assert judged_cause(beat(), silent_s=30.0) is Cause.RANK_HUNG


def test_a_node_that_failed() -> None:
    assert the_cause(beat(), cluster(node={"status": NodeStatus.FAILED})) is Cause.NODE_FAILED
    assert the_cause(beat(job_id=None, ranks=())) is Cause.NODE_FAILED


def test_a_restore_that_failed() -> None:
    error = NoVersionError("no good copy is left", rank=0, step=4).to_wire()
    assert the_cause(beat(rank={"restore_error": error})) is Cause.RESTORE_FAILED


def test_a_launcher_that_is_gone() -> None:
    assert the_cause(beat(launcher_connected=False), wait_s=60.0) is Cause.LAUNCHER_GONE


@pytest.mark.parametrize("draining", [True, False])
def test_a_drain(draining: bool) -> None:
    held = beat(rank={"held_step": 5, "committed_step": 5})
    found = cluster({"cordoned": draining, "draining": draining}, {"hold_reason": HoldReason.DRAIN})
    assert the_cause(held, found) is Cause.DRAIN


@pytest.mark.parametrize("sentence", ["", "a person decided to restart from zero", "node-1, which was lost, is back"])
def test_all_else(sentence: str) -> None:
    assert cause_of(sentence) is Cause.OTHER


PLAN = StoredPlan(slots={0: "node-0"}, placement={0: (0,)}, restore_step=4)


def samples(counts: RecoveryCounts) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in counts.collect()
        for sample in metric.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_a_recovery_is_counted_once_with_all_its_phases() -> None:
    counts = RecoveryCounts()
    counts.note(BeginGeneration(JOB, 1, JobPhase.RUNNING, "", 1, None, None, detect_s=0.25))
    counts.note(AssignPlan(JOB, 2, JobPhase.FENCING, PLAN, "tok resumed the job", {"fence": 0.5}))
    counts.add_phases(2, {"plan": 0.125})
    counts.note(CompleteRecovery(JOB, 2, JobPhase.ASSIGNED, {"load": 2.0, "a rank's own": 3.0}))
    found = samples(counts)
    assert found.pop(("gemini_ft_recoveries_total", "resume")) == 1
    assert not any(found.pop(("gemini_ft_recoveries_total", cause)) for cause in set(Cause) - {Cause.RESUME})
    sums = {"detect": 0.25, "fence": 0.5, "plan": 0.125, "load": 2.0, "other": 3.0}
    for phase, seconds in sums.items():
        assert found.pop(("gemini_ft_recovery_phase_seconds_sum", phase)) == seconds
        assert found.pop(("gemini_ft_recovery_phase_seconds_count", phase)) == 1
    assert not found


def test_the_start_of_a_job_is_no_recovery() -> None:
    counts = RecoveryCounts()
    counts.note(AssignPlan(JOB, 1, JobPhase.FENCING, PLAN, "the job starts", {"fence": 0.5}))
    counts.add_phases(1, {"plan": 0.1})
    counts.note(CompleteRecovery(JOB, 1, JobPhase.ASSIGNED, {"load": 2.0}))
    assert set(samples(counts).values()) == {0.0}
