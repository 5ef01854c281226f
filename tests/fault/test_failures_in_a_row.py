"""Failures of ranks, agents and the control plane, alone and on top of each other, in a training that goes on."""

from __future__ import annotations

import pytest
from live_job import LiveJob

from gemini_ft.localstack.processes import kill_processes

pytestmark = pytest.mark.timeout(180)

KILL_TIMEOUT_S = 10.0


def test_two_recoveries_in_a_row(job: LiveJob) -> None:
    for rank in (0, 1):
        mark = job.mark()
        job.kill_rank(rank)
        job.recovered(mark)


def test_a_rank_dies_as_soon_as_the_recovery_has_started_it(job: LiveJob) -> None:
    mark = job.mark()
    job.kill_rank(0)
    job.wait_generation(mark, "the recovery to begin")
    job.wait("a new rank 1", lambda: job.runs(1))
    again = job.mark()
    assert again.generation > mark.generation
    job.kill_rank(1)
    job.recovered(again)


def test_an_agent_dies_in_the_recovery_of_a_rank(job: LiveJob) -> None:
    mark, name = job.mark(), job.node_of(1)
    job.kill_rank(0)
    job.wait_generation(mark, "the recovery to begin")
    job.stack.kill_agent(name)
    job.stack.start_agent(name)
    job.recovered(mark)


def test_every_rank_of_every_node_dies_at_the_same_instant(job: LiveJob) -> None:
    mark = job.mark()
    processes = [job.rank_process(rank) for rank in range(job.num_ranks)]
    kill_processes(processes, KILL_TIMEOUT_S)
    job.recovered(mark)


def test_a_rank_dies_while_it_is_blocked_in_a_collective(job: LiveJob) -> None:
    mark = job.mark()
    with job.stack.stopped(job.rank_process(0)):
        job.wait_stuck(1)
        job.kill_rank(1)
        # Rank 0 is still stopped: only SIGKILL ends it.
        job.recovered(mark)


def test_an_agent_dies_and_training_does_not_notice(job: LiveJob) -> None:
    mark, name = job.mark(), job.node_of(1)
    job.stack.kill_agent(name)
    job.wait("steps without the agent", lambda: min(job.steps_since(mark)) >= 5)
    job.stack.start_agent(name)
    job.wait_calm()
    assert job.generation == mark.generation, f"there was a recovery: {job.info.cause}"
    job.check()


def test_nothing_but_a_recovery_needs_the_control_plane(job: LiveJob) -> None:
    mark = job.mark()
    job.stack.kill_control_plane()
    job.wait_steps(100, "steps and commits without a control plane")
    job.stack.start_control_plane()
    job.wait("the control plane to see the job run", lambda: job.members_are_heard)
    assert job.generation == mark.generation, f"there was a recovery: {job.info.cause}"
    job.kill_rank(0)
    job.recovered(mark)


@pytest.mark.parametrize("name", ["nats-server", "postgres", "coordinator", "failure-detector"])
def test_a_server_is_dead_when_a_rank_dies(job: LiveJob, name: str) -> None:
    mark, process = job.mark(), job.rank_process(0)
    job.stack.kill_server(name)
    job.wait_steps(3, f"steps and commits without {name}")
    kill_processes([process], KILL_TIMEOUT_S)
    job.stack.start_server(name)
    job.recovered(mark)


@pytest.mark.parametrize("name", ["nats-server", "postgres", "coordinator", "failure-detector"])
def test_a_server_dies_in_a_recovery(job: LiveJob, name: str) -> None:
    mark = job.mark()
    job.kill_rank(1)
    job.wait_generation(mark, "the recovery to begin")
    job.stack.kill_server(name)
    job.stack.start_server(name)
    job.recovered(mark)


def test_the_run_ends_as_if_nothing_had_happened(job: LiveJob) -> None:
    job.end()
