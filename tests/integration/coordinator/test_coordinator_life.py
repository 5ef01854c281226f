"""The life of a job: start, recoveries, decisions, end."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_cluster import FAST, Running, SimulatedAgent, SimulatedCluster, Stack, coordinating, eventually

from gemini_ft.contracts.errors import ConflictError, NotFoundError, NoVersionError
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import Address, Fence, JobOutcome, VerdictKind


async def trains_past(running: Running, job_id: str, step: int) -> None:
    async def far_enough() -> bool:
        return ((await running.job(job_id))["committed_step"] or 0) > step

    await eventually(far_enough, f"{job_id} to commit a step above {step}")


async def test_a_job_waits_for_nodes_trains_succeeds_and_lets_go(running: Running, cluster: SimulatedCluster) -> None:
    job_id = await running.create(num_nodes=4, num_standbys=1)

    async def explained() -> bool:
        return bool((await running.job(job_id))["waiting_for"] == "4 free nodes; 0 are ready")

    await eventually(explained, "the pending job to say what it waits for")
    await cluster.add(5)
    job = await running.until(job_id, "running", 1)
    assert sorted(job["slots"]) == ["0", "1", "2", "3"]
    assert job["restored_step"] is None
    await eventually(lambda: sum(agent.job is not None for agent in cluster.agents) == 5, "the standby to know the job")
    await trains_past(running, job_id, 3)
    placement = await running.get(f"/v1/jobs/{job_id}/placement")
    assert placement["placement"] == {"0": [0, 1], "1": [1, 0], "2": [2, 3], "3": [3, 2]}
    for agent in cluster.agents:
        agent.finished = agent.slot is not None
    await running.until(job_id, "succeeded")
    await eventually(lambda: all(agent.closed for agent in cluster.agents), "all nodes to close the job")
    assert {agent.closed.outcome for agent in cluster.agents if agent.closed} == {JobOutcome.SUCCEEDED}
    assert await running.items(f"/v1/jobs/{job_id}/versions")
    second = await running.create(num_nodes=5)
    await running.until(second, "running", 1)


async def test_a_dead_rank_costs_a_generation_and_at_most_two_steps(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(4)
    job_id = await running.create(num_nodes=4)
    await running.until(job_id, "running", 1)
    await trains_past(running, job_id, 3)
    await cluster.exit_rank(cluster.agents[2])
    job = await running.until(job_id, "running", 2)
    assert job["restored_step"] >= 3
    (recovery,) = await running.items(f"/v1/jobs/{job_id}/recoveries")
    assert recovery["outcome"] == "completed"
    assert recovery["num_steps_lost"] <= 2
    assert "ended by signal 9" in recovery["cause"]
    assert set(recovery["phases_ms"]) == {"detect", "fence", "plan", "re_rendezvous", "fetch", "load", "first_step"}
    before = job["restored_step"]
    await trains_past(running, job_id, before + 1)
    await cluster.exit_rank(cluster.agents[0])
    job = await running.until(job_id, "running", 3)
    assert job["restored_step"] > before


async def test_a_lost_node_is_replaced_by_the_standby_and_closed_when_it_wakes(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(5)
    job_id = await running.create(num_nodes=4, num_standbys=1)
    await running.until(job_id, "running", 1)
    await trains_past(running, job_id, 3)
    lost, standby = cluster.agents[1], cluster.agents[4]
    await cluster.lose(lost)
    job = await running.until(job_id, "running", 2)
    assert job["slots"]["1"] == standby.node_id
    assert standby.assign is not None
    assert standby.assign.sources[1] == (cluster.agents[0].node_id,)
    (recovery,) = await running.items(f"/v1/jobs/{job_id}/recoveries")
    assert recovery["phases_ms"]["detect"] == 500.0
    assert f"{standby.node_id} replaces {lost.node_id} in slot 1" in recovery["cause"]
    await lost.wake()
    await eventually(lambda: lost.closed, "the replaced node to be told to close the job")

    async def recruited() -> bool:
        return bool((await running.job(job_id))["standbys"] == [lost.node_id])

    await eventually(recruited, "the replaced node to become the standby")


async def test_a_lost_node_without_standby_is_replaced_by_a_free_node(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    await trains_past(running, job_id, 1)
    await cluster.lose(cluster.agents[0])
    await running.until(job_id, "fencing", 2)
    (newcomer,) = await cluster.add(1)
    job = await running.until(job_id, "running", 2)
    assert job["slots"]["0"] == newcomer.node_id


async def test_an_agents_restart_is_no_recovery_but_readdresses_everybody(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    moved, peer = cluster.agents
    await moved.sleep()
    moved.address = Address(host="127.0.0.1", port=31_000)
    await moved.restart(memory=True)
    assert moved.node_id is not None

    def readdressed() -> bool:
        return peer.assign is not None and peer.assign.addresses[str(moved.node_id)] == moved.address

    await eventually(readdressed, "the peer to learn the new address")
    assert (await running.job(job_id))["generation"] == 1


async def test_an_agent_that_comes_back_without_its_memory_restores_from_its_peer(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    await trains_past(running, job_id, 2)
    wiped, peer = cluster.agents
    await wiped.restart(memory=False)
    job = await running.until(job_id, "running", 2)
    assert job["restored_step"] is not None
    assert "memory is lost" in job["cause"]
    assert wiped.assign is not None
    assert wiped.assign.sources[0] == (peer.node_id,)


async def test_a_job_whose_shards_are_lost_blocks_until_a_person_decides(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(6)
    job_id = await running.create(num_nodes=4, num_standbys=2)
    await running.until(job_id, "running", 1)
    await trains_past(running, job_id, 2)
    cluster.paused = True
    for agent in cluster.agents[:2]:
        await cluster.lose(agent)
    job = await running.until(job_id, "blocked", 2)
    assert "no verified copy is left of the shards of rank 0, 1" in job["cause"]
    refused = await running.api.post(f"/v1/jobs/{job_id}/decision", json={"decision": "hope"})
    assert refused.status_code == 422
    answer = await running.api.post(f"/v1/jobs/{job_id}/decision", json={"decision": "restart_from_zero"})
    assert answer.status_code == 200
    cluster.paused = False
    job = await running.until(job_id, "running", 3)
    assert job["restored_step"] is None
    await trains_past(running, job_id, 0)
    await cluster.exit_rank(cluster.agents[2])
    job = await running.until(job_id, "running", 4)
    assert job["restored_step"] is not None


async def test_a_blocked_job_goes_on_when_the_lost_memory_comes_back(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2, num_replicas=1)
    await running.until(job_id, "running", 1)
    await trains_past(running, job_id, 2)
    away = cluster.agents[1]
    await away.sleep()
    await cluster.verdict(away, VerdictKind.FAILED, detail="silent")
    await running.until(job_id, "blocked", 2)
    await away.wake()
    job = await running.until(job_id, "running", 3)
    assert job["restored_step"] is not None


async def test_a_failure_during_a_recovery_begins_the_next_generation(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(3)
    job_id = await running.create(num_nodes=2, num_standbys=1)
    await running.until(job_id, "running", 1)
    await trains_past(running, job_id, 2)
    cluster.paused = True
    await cluster.exit_rank(cluster.agents[0])
    await running.until(job_id, "assigned", 2)
    await cluster.lose(cluster.agents[0])
    cluster.paused = False
    job = await running.until(job_id, "running", 3)
    assert job["slots"]["0"] == cluster.agents[2].node_id
    outcomes = [recovery["outcome"] for recovery in await running.items(f"/v1/jobs/{job_id}/recoveries")]
    assert outcomes == ["completed", "superseded"]


async def test_recoveries_without_progress_end_the_job_with_the_last_cause(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2, max_recoveries_without_progress=2)
    await running.until(job_id, "running", 1)
    cluster.paused = True
    agent = cluster.agents[0]
    for generation in (1, 2):
        await eventually(lambda g=generation: agent.trains_in == g, f"the ranks to run in generation {generation}")
        await cluster.exit_rank(agent)
        await running.until(job_id, "assigned", generation + 1)
    await eventually(lambda: agent.trains_in == 3, "the ranks to run in generation 3")
    agent.restore_error = NoVersionError("no copy of step 5 is left").to_wire()
    job = await running.until(job_id, "failed")
    assert "2 recoveries in a row" in job["cause"]
    assert "no copy of step 5 is left" in job["cause"]
    await eventually(lambda: all(one.closed for one in cluster.agents), "all nodes to close the job")


async def test_a_member_that_does_not_answer_the_fence_is_waited_for_by_name(
    running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    deaf, other = cluster.agents
    deaf.deaf_to = (Fence,)
    await cluster.exit_rank(other)

    async def waiting() -> bool:
        return f"the inventory of {deaf.node_id} (slot 0)" in (await running.job(job_id))["waiting_for"]

    await eventually(waiting, "the job to say whom it waits for")
    deaf.deaf_to = ()
    await running.until(job_id, "running", 2)


async def test_a_launcher_that_stays_away_is_a_failure(running: Running, cluster: SimulatedCluster) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    bereft = cluster.agents[1]
    bereft.launcher_pid = None
    await eventually(lambda: bereft.ordered_generation == 2, "the fence of generation 2")
    bereft.launcher_pid = 78
    job = await running.until(job_id, "running", 2)
    assert "launcher" in job["cause"]


async def test_a_heartbeat_contradicts_an_older_verdict(running: Running, cluster: SimulatedCluster) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    agent = cluster.agents[0]
    stale = agent.sent_sequence - 1
    await agent.beat()
    agent.sent_sequence = stale
    await cluster.verdict(agent, VerdictKind.FAILED, detail="too hasty")
    await trains_past(running, job_id, (await running.job(job_id))["committed_step"] + 10)
    assert (await running.job(job_id))["generation"] == 1


async def test_a_job_can_be_stopped_once(running: Running, cluster: SimulatedCluster) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    assert (await running.api.post(f"/v1/jobs/{job_id}/stop", json={"now": True})).json()["phase"] == "stopped"
    await eventually(lambda: all(agent.closed for agent in cluster.agents), "all nodes to close the job")
    again = await running.api.post(f"/v1/jobs/{job_id}/stop", json={"now": True})
    assert again.status_code == 409
    assert again.json()["type"] == "urn:gemini-ft:problem:conflict"


async def test_identities(running: Running, cluster: SimulatedCluster) -> None:
    first, second = await cluster.add(2)
    assert first.hostname == second.hostname
    assert first.node_id != second.node_id
    known = first.node_id
    await first.register()
    assert first.node_id == known
    thief = SimulatedAgent(cluster.client, Address(host="127.0.0.1", port=9), hostname="copy", node_id=known)
    with pytest.raises(ConflictError, match=r"host at 127\.0\.0\.1:20000.*copy at 127\.0\.0\.1:9"):
        await thief.register()
    await first.sleep()
    await thief.register()
    stranger = SimulatedAgent(cluster.client, Address(host="127.0.0.1", port=9), node_id="node-unknown")
    with pytest.raises(NotFoundError, match=r"remove node\.json"):
        await stranger.register()


async def test_a_restart_from_the_same_address_needs_no_silence(stack: Stack, cluster: SimulatedCluster) -> None:
    async with coordinating(stack, FAST):
        (agent,) = await cluster.add(1)
        known = agent.node_id
        agent.incarnation = new_incarnation()
        await agent.register()
        assert agent.node_id == known


async def test_events_can_be_followed_by_cursor(running: Running, cluster: SimulatedCluster) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    events: list[Any] = []
    after = 0
    while page := await running.items("/v1/events", after=after, limit=2):
        events += page
        after = page[-1]["id"]
    kinds = [event["kind"] for event in events]
    assert kinds[:2] == ["node_registered", "node_registered"]
    assert [kind for kind in kinds if kind.startswith(("job_", "gen"))] == [
        "job_created",
        "generation_begun",
        "generation_assigned",
        "job_running",
    ]
