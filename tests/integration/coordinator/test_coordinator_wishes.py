"""What people wish and how the leader makes it true, against a real Postgres: stop, resume, drain, cordon, delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from coordinator_cluster import Running, SimulatedAgent, SimulatedCluster, eventually
from sqlalchemy import select

from gemini_ft.contracts.errors import ConflictError, NotFoundError
from gemini_ft.contracts.messages import Fence, JobOutcome, JobSpec
from gemini_ft.coordinator.state import Decision, HoldReason, JobPhase, JobView, NodeView
from gemini_ft.coordinator.tables import Event, Recovery, Version
from gemini_ft.coordinator.wishes import By

ALICE = By("alice")


class People:
    """Wish, and look at the database for what comes of it."""

    def __init__(self, running: Running) -> None:
        self.coordinator = running.coordinator
        self.wishes = running.coordinator.wishes

    async def create(self, **spec: Any) -> str:
        return await self.wishes.create_job(JobSpec(name="test", num_ranks_per_node=1, **spec), ALICE)

    async def job(self, job_id: str) -> JobView:
        return (await self.coordinator.store.load([job_id])).jobs[job_id]

    async def node(self, agent: SimulatedAgent) -> NodeView:
        assert agent.node_id is not None
        return (await self.coordinator.store.load()).nodes[agent.node_id]

    async def until(self, job_id: str, condition: Callable[[JobView], Any], what: str) -> JobView:
        async def there() -> JobView | None:
            job = await self.job(job_id)
            return job if condition(job) else None

        found = await eventually(there, f"{job_id} {what}")
        assert isinstance(found, JobView)
        return found

    async def until_phase(self, job_id: str, phase: JobPhase, generation: int = 0) -> JobView:
        what = f"to be {phase} at generation {generation}"
        return await self.until(job_id, lambda job: job.phase is phase and job.generation >= generation, what)

    async def trained(self, job_id: str, step: int) -> None:
        await self.until(
            job_id, lambda job: job.committed_step is not None and job.committed_step > step, f"to commit past {step}"
        )

    async def rows(self, query: Any) -> list[Any]:
        async with self.coordinator.engine.connect() as connection:
            return list((await connection.execute(query)).all())

    async def kinds(self, job_id: str) -> list[str]:
        return [
            row.kind for row in await self.rows(select(Event.kind).where(Event.job_id == job_id).order_by(Event.id))
        ]


@pytest.fixture
def people(running: Running) -> People:
    return People(running)


async def test_a_job_is_suspended_with_its_memory_and_resumes_from_exactly_that_step(
    people: People, cluster: SimulatedCluster
) -> None:
    agents = await cluster.add(3)
    job_id = await people.create(num_nodes=2, num_standbys=1)
    await people.until_phase(job_id, JobPhase.RUNNING)
    await people.trained(job_id, 3)
    await people.wishes.stop(job_id, by=ALICE)
    assert (await people.job(job_id)).phase in (JobPhase.STOPPING, JobPhase.SUSPENDED)
    job = await people.until_phase(job_id, JobPhase.SUSPENDED)
    final = job.final_step
    assert final is not None
    assert (job.generation, job.hold_reason, job.plan) == (2, HoldReason.NONE, None)
    await eventually(lambda: all(agent.ordered_generation == 2 for agent in agents), "all members to be fenced")
    assert all(agent.closed is None for agent in agents)
    assert all((rank, final) in agent.copies for agent in agents[:2] for rank in (0, 1))
    (version,) = await people.rows(select(Version.generation).where(Version.job_id == job_id, Version.step == final))
    assert version.generation == 1
    assert [agent.assigns[-1].generation for agent in agents[:2]] == [1, 1]
    for refused in (people.wishes.stop(job_id), people.wishes.checkpoint(job_id, final)):
        with pytest.raises(ConflictError, match="suspended"):
            await refused
    await people.wishes.resume(job_id, ALICE)
    job = await people.until_phase(job_id, JobPhase.RUNNING, 3)
    assert job.plan is not None
    assert job.plan.restore_step == final
    (recovery,) = await people.rows(select(Recovery.__table__).where(Recovery.job_id == job_id))
    assert (recovery.cause, recovery.outcome, recovery.num_steps_lost) == ("alice resumed the job", "completed", 0)
    assert (await people.job(job_id)).final_step is None
    await people.trained(job_id, final + 2)
    kinds = [kind for kind in await people.kinds(job_id) if kind.startswith(("audit", "job"))]
    assert kinds == [
        "job_created",
        "audit_create",
        "job_running",
        "job_stopping",
        "audit_stop",
        "job_suspended",
        "audit_resume",
        "job_running",
    ]
    with pytest.raises(ConflictError, match="not suspended"):
        await people.wishes.resume(job_id)


async def test_a_failure_while_stopping_recovers_and_is_held_again(people: People, cluster: SimulatedCluster) -> None:
    await cluster.add(2)
    job_id = await people.create(num_nodes=2)
    await people.until_phase(job_id, JobPhase.RUNNING)
    await people.trained(job_id, 2)
    cluster.paused = True
    await people.wishes.stop(job_id)
    await cluster.exit_rank(cluster.agents[0])
    job = await people.until_phase(job_id, JobPhase.ASSIGNED, 2)
    assert job.hold_reason is HoldReason.STOP
    await people.wishes.stop(job_id)
    cluster.paused = False
    job = await people.until_phase(job_id, JobPhase.SUSPENDED, 3)
    assert job.final_step == cluster.agents[0].held_step


async def test_a_drained_node_is_replaced_with_no_step_lost_and_keeps_out(
    people: People, cluster: SimulatedCluster
) -> None:
    agents = await cluster.add(3)
    job_id = await people.create(num_nodes=2)
    await people.until_phase(job_id, JobPhase.RUNNING)
    await people.trained(job_id, 3)
    drained, peer, spare = agents
    assert drained.node_id is not None
    await people.wishes.drain(drained.node_id, ALICE)
    job = await people.until_phase(job_id, JobPhase.RUNNING, 2)
    assert job.slots == {0: spare.node_id, 1: peer.node_id}
    assert job.plan is not None
    assert drained.node_id in job.plan.sources[0]
    (recovery,) = await people.rows(select(Recovery.__table__).where(Recovery.job_id == job_id))
    assert recovery.cause.startswith(f"drain of {drained.node_id}")
    assert recovery.num_steps_lost == 0
    await eventually(lambda: drained.closed, "the drained node to be told to close the job")

    async def let_go() -> bool:
        node = await people.node(drained)
        return node.job_id is None and node.cordoned and node.draining

    await eventually(let_go, "the drained node to be free")
    assert (await people.job(job_id)).standbys == ()
    other = await people.create(num_nodes=1, num_replicas=1)
    waiting = await people.until(other, lambda job: job.waiting_for, "to say what it waits for")
    assert waiting.waiting_for == "1 free nodes; 0 are ready"
    await people.wishes.uncordon(drained.node_id)
    await people.until_phase(other, JobPhase.RUNNING)


async def test_a_drain_waits_for_a_spare_and_training_goes_on(people: People, cluster: SimulatedCluster) -> None:
    (agent, _) = await cluster.add(2)
    job_id = await people.create(num_nodes=2)
    await people.until_phase(job_id, JobPhase.RUNNING)
    assert agent.node_id is not None
    await people.wishes.drain(agent.node_id)
    await people.until(job_id, lambda job: f"to replace {agent.node_id}" in job.waiting_for, "to wait for a spare")
    await people.trained(job_id, (await people.job(job_id)).committed_step or 0)
    assert (await people.job(job_id)).generation == 1
    await people.wishes.uncordon(agent.node_id)
    await people.until(job_id, lambda job: job.waiting_for == "", "to wait no more")


async def test_a_checkpoint_request_reaches_all_members(people: People, cluster: SimulatedCluster) -> None:
    agents = await cluster.add(2)
    job_id = await people.create(num_nodes=2)
    await people.until_phase(job_id, JobPhase.RUNNING)
    cluster.paused = True
    assert await people.wishes.checkpoint(job_id, 10**6) == 1
    await eventually(lambda: [agent.checkpoint_request for agent in agents] == [1, 1], "the request")
    assert await people.wishes.checkpoint(job_id, 10**6) == 2
    await eventually(lambda: [agent.checkpoint_request for agent in agents] == [2, 2], "the second request")


async def test_stopping_what_does_not_run(people: People, cluster: SimulatedCluster) -> None:
    pending = await people.create(num_nodes=2)
    with pytest.raises(ConflictError, match="only ranks that run"):
        await people.wishes.checkpoint(pending, None)
    await people.wishes.stop(pending)
    assert (await people.job(pending)).phase is JobPhase.STOPPED
    agents = await cluster.add(2)
    job_id = await people.create(num_nodes=2)
    await people.until_phase(job_id, JobPhase.RUNNING)
    agents[1].deaf_to = (Fence,)
    await cluster.exit_rank(agents[0])
    await people.until_phase(job_id, JobPhase.FENCING, 2)
    with pytest.raises(ConflictError, match="now=true"):
        await people.wishes.stop(job_id)
    await people.wishes.stop(job_id, now=True)
    await eventually(lambda: all(agent.closed for agent in agents), "all nodes to close the job")


async def test_deleted_jobs_are_gone_and_their_memory_is_free(people: People, cluster: SimulatedCluster) -> None:
    agents = await cluster.add(2)
    job_id = await people.create(num_nodes=2)
    await people.until_phase(job_id, JobPhase.RUNNING)
    with pytest.raises(ConflictError, match="force=true"):
        await people.wishes.delete(job_id)
    await people.wishes.stop(job_id)
    await people.until_phase(job_id, JobPhase.SUSPENDED)
    await people.wishes.delete(job_id)
    await eventually(lambda: all(agent.closed for agent in agents), "all nodes to close the job")
    assert {agent.closed.outcome for agent in agents if agent.closed} == {JobOutcome.STOPPED}
    assert (await people.job(job_id)).deleted
    for wish in (people.wishes.delete(job_id), people.wishes.resume(job_id), people.wishes.stop(job_id, now=True)):
        with pytest.raises(NotFoundError, match="there is no job"):
            await wish
    second = await people.create(num_nodes=2)
    await people.until_phase(second, JobPhase.RUNNING)
    await people.wishes.delete(second, force=True)
    assert (await people.job(second)).phase is JobPhase.STOPPED


async def test_a_decision_to_restart_forgets_that_the_job_was_to_stop(
    people: People, cluster: SimulatedCluster
) -> None:
    agents = await cluster.add(3)
    job_id = await people.create(num_nodes=2, num_standbys=1, num_replicas=1)
    await people.until_phase(job_id, JobPhase.RUNNING)
    await people.trained(job_id, 2)
    cluster.paused = True
    await people.wishes.stop(job_id)
    await cluster.lose(agents[0])
    await people.until_phase(job_id, JobPhase.BLOCKED)
    await people.wishes.decide(job_id, Decision.RESTART_FROM_ZERO, ALICE)
    cluster.paused = False
    job = await people.until_phase(job_id, JobPhase.RUNNING, 3)
    assert job.hold_reason is HoldReason.NONE
    with pytest.raises(ConflictError, match="not blocked"):
        await people.wishes.decide(job_id, Decision.STOP)


async def test_labels_of_operators_count_more_and_can_be_taken_back(people: People, cluster: SimulatedCluster) -> None:
    (agent,) = await cluster.add(1, rack="r1", zone="z1")
    assert agent.node_id is not None
    await people.wishes.relabel(agent.node_id, {"rack": "r9", "gpu": "h200"}, ALICE)
    assert dict((await people.node(agent)).labels) == {"rack": "r9", "zone": "z1", "gpu": "h200"}
    await agent.register()
    await people.wishes.relabel(agent.node_id, {"rack": None})
    assert dict((await people.node(agent)).labels) == {"rack": "r1", "zone": "z1", "gpu": "h200"}


async def test_holders_are_spread_over_racks(people: People, cluster: SimulatedCluster) -> None:
    first = await cluster.add(2, rack="r1")
    second = await cluster.add(2, rack="r2")
    job_id = await people.create(num_nodes=4)
    job = await people.until_phase(job_id, JobPhase.RUNNING)
    racks = {agent.node_id: agent.labels["rack"] for agent in (*first, *second)}
    assert racks[job.slots[0]] != racks[job.slots[1]]
    assert racks[job.slots[2]] != racks[job.slots[3]]


async def test_a_removed_node_is_forgotten_and_its_id_refused(people: People, cluster: SimulatedCluster) -> None:
    agents = await cluster.add(3)
    job_id = await people.create(num_nodes=2)
    await people.until_phase(job_id, JobPhase.RUNNING)
    member, spare = agents[0], agents[2]
    assert member.node_id is not None
    assert spare.node_id is not None
    with pytest.raises(ConflictError, match="drain it first"):
        await people.wishes.remove(member.node_id, is_silent=False)
    await member.sleep()
    await people.wishes.remove(member.node_id, is_silent=True)
    job = await people.until_phase(job_id, JobPhase.RUNNING, 2)
    assert job.slots[0] == spare.node_id
    assert member.node_id not in (await people.coordinator.store.load()).nodes
    with pytest.raises(NotFoundError, match="was removed from this cluster"):
        await member.register()
    with pytest.raises(NotFoundError, match="there is no node"):
        await people.wishes.cordon(member.node_id)


async def test_a_check_may_refuse_and_then_nothing_is_written(people: People) -> None:
    job_id = await people.create(num_nodes=2)

    def refuse(row: Any) -> None:
        raise ConflictError(f"{row.id} is {row.phase}")

    with pytest.raises(ConflictError, match="is pending"):
        await people.wishes.stop(job_id, by=By("bob", refuse))
    assert (await people.job(job_id)).phase is JobPhase.PENDING
    assert await people.kinds(job_id) == ["job_created", "audit_create"]
