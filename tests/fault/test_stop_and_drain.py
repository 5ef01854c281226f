"""Planned interruptions of a real training: none of them costs a step.

Two slots and a standby. What the ranks write is compared with the undisturbed run throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fault_stack import FaultStack
from live_job import LiveJob

from gemini_ft.contracts.messages import JobSpec

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    with FaultStack(tmp_path_factory.mktemp("stack"), num_nodes=3) as stack:
        yield stack


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    return JobSpec(name="live", num_nodes=2, num_ranks_per_node=1, num_replicas=2, num_standbys=1)


def ask(job: LiveJob, path: str) -> dict[str, Any]:
    with job.stack.http() as http:
        answer: dict[str, Any] = http.post(path, json={}).raise_for_status().json()
    return answer


def suspend(job: LiveJob) -> int:
    """Stop the job gracefully; return the step that it holds."""
    ask(job, f"/jobs/{job.job_id}/stop")
    job.wait_phase("suspended")
    with job.stack.http() as http:
        return int(http.get(f"/jobs/{job.job_id}").raise_for_status().json()["final_step"])


def runs_nowhere(job: LiveJob) -> bool:
    return not any(node.ranks for node in job.members)


def test_a_stopped_job_keeps_its_last_step_in_memory_and_resumes_from_exactly_there(job: LiveJob) -> None:
    mark = job.mark()
    final = suspend(job)
    job.wait("all ranks to be gone", lambda: runs_nowhere(job))
    job.look()
    assert max(line.step for line in job.lines if line.step is not None) in (final - 1, final)
    for node in job.members:
        assert all(final in job.held_steps(node.name, rank) for rank in range(job.num_ranks))
    ask(job, f"/jobs/{job.job_id}/resume")
    generation = job.recovered(mark, most_steps_redone=0)
    assert generation == mark.generation + 2
    (recovery,) = (one for one in job.api.recoveries(job.job_id) if one.generation == generation)
    assert (recovery.restored_step, recovery.num_steps_lost) == (final, 0)
    assert [job.restore_source(rank) for rank in range(job.num_ranks)] == ["local", "local"]


def test_a_suspended_job_survives_the_restart_of_agents_and_coordinator(job: LiveJob) -> None:
    mark = job.mark()
    final = suspend(job)
    names = [node.name for node in job.members]
    job.stack.kill_server("coordinator")
    for name in names:
        job.stack.kill_agent(name)
    job.stack.start_dead()
    job.wait("all members to be heard", lambda: job.members_are_heard)
    ask(job, f"/jobs/{job.job_id}/resume")
    generation = job.recovered(mark, most_steps_redone=0)
    (recovery,) = (one for one in job.api.recoveries(job.job_id) if one.generation == generation)
    assert recovery.restored_step == final


def test_the_standby_takes_a_drained_nodes_slot_and_no_step_is_lost(job: LiveJob) -> None:
    job.wait("a standby", job.ready_standbys)
    (standby,) = job.ready_standbys()
    drained = job.members[1]
    mark = job.mark()
    ask(job, f"/nodes/{drained.node_id}/drain")
    generation = job.recovered(mark, most_steps_redone=0)
    assert generation == mark.generation + 1
    assert job.members[1].name == standby
    (recovery,) = (one for one in job.api.recoveries(job.job_id) if one.generation == generation)
    assert recovery.cause.startswith(f"drain of {drained.node_id}")
    assert recovery.num_steps_lost == 0
    assert [job.restore_source(rank) for rank in range(job.num_ranks)] == ["local", "peer"]
    job.wait("the drained node to be free", lambda: drained.name in job.free_nodes())
    job.wait("its memory to be free", lambda: not job.memory(drained.name).exists())
    assert job.info.standbys == []
    ask(job, f"/nodes/{drained.node_id}/uncordon")
    job.wait("the node to be a standby", lambda: job.ready_standbys() == [drained.name])
