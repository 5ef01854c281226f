"""Bits that flip in memory: the next copy, then the version before, then a refusal that says so; never a bad load."""

from __future__ import annotations

import psutil
import pytest
from live_job import LiveJob
from replica_cluster import flip_bit

from gemini_ft.localstack.processes import kill_processes

pytestmark = pytest.mark.timeout(180)

KILL_TIMEOUT_S = 10.0
VICTIM = 0


def stop_ranks_at(job: LiveJob, point: str) -> list[psutil.Process]:
    """Let every rank stop at a fault point of the same step; returns their processes when they have."""
    processes = [job.rank_process(rank) for rank in range(job.num_ranks)]
    job.arm_ranks(dict.fromkeys(range(job.num_ranks), f"{point}=stop"))
    for rank, process in enumerate(processes):
        job.wait(f"rank {rank} to stop at {point}", lambda process=process: is_stopped(process))
    return processes


def is_stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def damage(job: LiveJob, node: str, rank: int, step: int) -> None:
    flip_bit(job.memory(node), rank, step)


def restart_with_rank_stopped_before_restore(job: LiveJob) -> psutil.Process:
    """Kill a rank; the victim is started again, and stops before it asks for its copy, which its agent has checked."""
    mark = job.mark()
    job.arm_rank_at_start(VICTIM, "rank.before_restore=stop")
    job.kill_rank(1 - VICTIM)
    job.wait_generation(mark, "the recovery to begin")
    process = job.rank_process(VICTIM)
    job.wait("the victim to stop before it restores", lambda: is_stopped(process))
    return process


def test_a_node_whose_whole_memory_rots_is_served_by_its_peer(job: LiveJob) -> None:
    mark, node = job.mark(), job.node_of(VICTIM)
    processes = [job.rank_process(rank) for rank in range(job.num_ranks)]
    job.stack.kill_server("coordinator")
    kill_processes(processes, KILL_TIMEOUT_S)
    for rank in range(job.num_ranks):
        for step in job.held_steps(node, rank):
            damage(job, node, rank, step)
    job.stack.start_server("coordinator")
    job.recovered(mark)
    assert job.restore_source(VICTIM) == "peer"
    assert job.restore_source(1 - VICTIM) == "local"


def test_a_copy_that_rots_after_it_was_checked_is_fetched_from_the_peer(job: LiveJob) -> None:
    mark = job.mark()
    victim = restart_with_rank_stopped_before_restore(job)
    damage(job, job.node_of(VICTIM), VICTIM, job.info.restored_step)
    victim.resume()
    assert job.recovered(mark) == mark.generation + 1
    assert job.restore_source(VICTIM) == "peer"


def test_when_both_copies_rot_the_version_before_is_restored(job: LiveJob) -> None:
    # Here the version before the committed one has not been given up yet.
    processes = stop_ranks_at(job, "rank.before_filling")
    mark, nodes = job.mark(), [job.node_of(rank) for rank in range(job.num_ranks)]
    committed = max(job.held_steps(nodes[0], VICTIM))
    for node in nodes:
        assert set(job.held_steps(node, VICTIM)) == {committed - 1, committed}
        damage(job, node, VICTIM, committed)
    kill_processes(processes, KILL_TIMEOUT_S)
    job.recovered(mark)
    assert job.info.restored_step == committed - 1


def test_when_no_version_is_left_a_person_decides(job: LiveJob) -> None:
    # Here the version before the committed one is being overwritten.
    processes = stop_ranks_at(job, "rank.after_fill_begun")
    mark, nodes = job.mark(), [job.node_of(rank) for rank in range(job.num_ranks)]
    (committed,) = job.held_steps(nodes[VICTIM], VICTIM)
    for node in nodes:
        damage(job, node, VICTIM, committed)
    kill_processes(processes, KILL_TIMEOUT_S)
    blocked = job.wait_phase("blocked")
    assert blocked.generation == mark.generation + 1
    assert f"no verified copy is left of the shards of rank {VICTIM}" in blocked.cause
    assert "decide `restart_from_zero` or `stop`" in blocked.cause
    job.decide("restart_from_zero")
    job.started_from_zero(mark)


def test_when_both_copies_rot_after_they_were_checked_there_is_no_endless_loop(job: LiveJob) -> None:
    mark = job.mark()
    victim = restart_with_rank_stopped_before_restore(job)
    step = job.info.restored_step
    for rank in range(job.num_ranks):
        damage(job, job.node_of(rank), VICTIM, step)
    victim.resume()
    job.wait_generation(mark, "another recovery", 2)
    job.wait("it to end", lambda: job.info.phase in ("blocked", "running"))
    assert job.generation == mark.generation + 2
    assert job.info.restored_step != step
    if job.info.phase == "blocked":
        job.decide("restart_from_zero")
        job.started_from_zero(mark)


def test_the_run_ends_as_if_nothing_had_happened(job: LiveJob) -> None:
    job.end()
