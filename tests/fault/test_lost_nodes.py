"""Machines that are lost with their memory, one after another and together, and one that was only asleep.

Four slots in two groups, {0, 1} and {2, 3}, a standby, and a free node. Nothing is shared but the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from fault_stack import FaultStack
from live_job import LiveJob

from gemini_ft.contracts.messages import JobSpec

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    # Patience with a silent agent costs nothing but time, which a test has not got.
    env = {"GEMINI_FT_DETECTOR_PATIENCE_S": "6"}
    with FaultStack(tmp_path_factory.mktemp("stack"), num_nodes=6, env=env) as stack:
        yield stack


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    return JobSpec(name="live", num_nodes=4, num_ranks_per_node=1, num_replicas=2, num_standbys=1)


class Spare(NamedTuple):
    standby: str
    free: str


@pytest.fixture(autouse=True)
def spare(job: LiveJob) -> Spare:
    """Names of the nodes that can take a slot, once all lost machines are back as new ones."""
    job.stack.start_dead()
    job.wait("a standby and a free node", lambda: job.ready_standbys() and job.free_nodes())
    return Spare(*job.ready_standbys(), *job.free_nodes())


def lose(job: LiveJob, *slots: int) -> list[str]:
    """Machines fail at the same instant, and their memory is gone."""
    names = [job.members[slot].name for slot in slots]
    job.stack.kill_node_processes(*names)
    for name in names:
        job.stack.kill_node(name)
    return names


def test_two_machines_of_different_groups_fail_at_once(job: LiveJob, spare: Spare) -> None:
    mark = job.mark()
    lose(job, 1, 2)
    job.recovered(mark)
    assert [job.members[slot].name for slot in (1, 2)] == [spare.standby, spare.free]
    assert [job.restore_source(rank) for rank in range(4)] == ["local", "peer", "peer", "local"]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("receiver.after_chunk_digest:20=kill", id="while it fetches its shard"),
        pytest.param("receiver.before_sealed:2=kill", id="while its peer re-replicates to it"),
    ],
)
def test_the_standby_fails_as_well(job: LiveJob, spare: Spare, fault: str) -> None:
    job.arm_agent(spare.standby, fault)
    mark = job.mark()
    lose(job, 3)
    job.stack.wait_agent_killed(spare.standby, "the standby's agent to be killed")
    mark = job.wait_generation(mark, "the standby to be judged", 2)
    job.recovered(mark)
    assert job.members[3].name == spare.free


def test_a_machine_that_was_only_asleep_has_no_say_any_more(job: LiveJob) -> None:
    mark, name = job.mark(), job.node_of(3)
    rank = job.rank_process(3)
    # In the middle of a write: when it wakes up it goes on with it.
    job.arm_rank(3, "rank.before_sealed=stop")
    job.wait("rank 3 to stop in the middle of a version", lambda: rank.status() == "stopped")
    asleep = job.stack.node_processes(name)
    with job.stack.stopped(*asleep):
        job.recovered(mark)
        assert job.node_of(3) != name
    agent = job.stack.nodes[name].agent
    job.wait(
        "what the job had started there to be ended",
        lambda: not [process for process in asleep if process.pid != agent.pid and process.is_running()],
    )
    job.wait("the machine to be spare", lambda: name in (*job.ready_standbys(), *job.free_nodes()))
    # Nothing that it wrote can be read.
    mark = job.mark()
    job.kill_rank(2)
    job.recovered(mark)


def test_a_group_that_fails_as_a_whole_blocks_the_job_until_a_person_decides(job: LiveJob) -> None:
    mark = job.mark()
    lost_ids = [job.members[slot].node_id for slot in (0, 1)]
    lose(job, 0, 1)
    blocked = job.wait_phase("blocked")
    assert "no verified copy is left of the shards of rank 0, 1" in blocked.cause
    assert f"lost nodes: {lost_ids[0]} (slot 0), {lost_ids[1]} (slot 1)" in blocked.cause
    assert blocked.generation == mark.generation + 1
    job.decide("restart_from_zero")
    job.started_from_zero(mark)


def test_a_person_may_also_decide_to_stop(job: LiveJob) -> None:
    lose(job, 2, 3)
    job.wait_phase("blocked")
    job.decide("stop")
    job.wait_phase("stopped")
    job.wait("all nodes to be free", lambda: all(node.job_id is None for node in job.api.nodes() if node.is_alive))
