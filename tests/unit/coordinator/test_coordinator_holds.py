"""Stop, resume, drain and checkpoint requests, as decisions about a model of the cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_world import JOB, NUM_NODES, SETTINGS, World

from gemini_ft.contracts.messages import CheckpointNow
from gemini_ft.coordinator import actions
from gemini_ft.coordinator.progress import held_step
from gemini_ft.coordinator.reconcile import decide
from gemini_ft.coordinator.state import HoldReason, JobPhase, NodeStatus


@pytest.fixture
def world() -> World:
    """A job that runs on node-0 to node-3, with node-4 as its standby and node-5 free."""
    found = World()
    found.settle()
    assert found.job.phase is JobPhase.RUNNING
    return found


def newest_step(world: World) -> int:
    return max(world.history)


def to_do(world: World) -> list[actions.Action]:
    """What is to be done now, but for noting commits."""
    decided = decide(world.view(), world.seen, world.now, SETTINGS)
    return [action for action in decided if not isinstance(action, actions.RecordVersion)]


def test_a_stopped_job_is_suspended_at_its_newest_step_and_resumes_from_it(world: World) -> None:
    world.stop()
    assert world.job.phase is JobPhase.STOPPING
    world.rounds(4)
    assert world.job.phase is JobPhase.SUSPENDED
    final = newest_step(world)
    assert world.job.final_step == final
    assert world.job.hold_reason is HoldReason.NONE
    members = world.view().jobs[JOB].members
    assert len(members) == NUM_NODES + 1
    assert {world.agents[node_id].ordered for node_id in members} == {world.job.generation}
    assert all(world.agents[node_id].assign is None for node_id in members)
    assert all((slot, final) in world.agents[node_id].copies for slot, node_id in world.view().jobs[JOB].slots.items())
    assert to_do(world) == []
    world.rounds(3)
    assert newest_step(world) == final
    world.resume()
    world.rounds(4)
    assert world.job.phase is JobPhase.RUNNING
    assert world.job.plan is not None
    assert world.job.plan.restore_step == final
    assert newest_step(world) > final


def test_a_job_whose_member_is_lost_while_it_is_suspended_resumes_like_after_any_loss(world: World) -> None:
    world.stop()
    world.rounds(4)
    final = newest_step(world)
    world.die(world.agents["node-2"])
    world.rounds(2)
    assert world.job.phase is JobPhase.SUSPENDED
    assert world.job.waiting_for == "a person to resume it; lost meanwhile: node-2 (slot 2)"
    world.resume()
    world.rounds(5)
    assert world.job.plan is not None
    assert world.job.plan.restore_step == final
    assert world.job.plan.slots[2] == "node-4"


def test_a_failure_while_stopping_is_recovered_and_the_job_is_held_again(world: World) -> None:
    world.stop()
    generation = world.job.generation
    world.exit_rank(world.agents["node-1"])
    world.rounds(1)
    assert (world.job.generation, world.job.phase) == (generation + 1, JobPhase.FENCING)
    world.rounds(8)
    assert world.job.phase is JobPhase.SUSPENDED
    assert world.job.final_step == newest_step(world)
    assert world.job.generation == generation + 2


def test_ranks_are_held_only_if_all_tell_the_same_committed_step(world: World) -> None:
    world.stop()
    world.rounds(1)
    agents = [world.agents[f"node-{slot}"] for slot in range(NUM_NODES)]
    for agent in agents:
        agent.held_step, agent.committed_step = 90, 90

    def held() -> int | None:
        for agent in agents:
            world.beat(agent)
        cluster = world.view()
        return held_step(cluster.jobs[JOB], cluster, world.seen)

    assert held() == 90
    agents[1].committed_step = 89
    assert held() is None
    agents[1].held_step = 89
    assert held() is None
    agents[1].held_step = None
    assert held() is None


def test_a_drained_node_is_replaced_without_losing_a_step_and_keeps_its_memory_until_it_is_not_needed(
    world: World,
) -> None:
    world.drain("node-1")
    world.rounds_until("the next plan", lambda: world.job.phase is JobPhase.ASSIGNED)
    newest = newest_step(world)
    assert world.job.cause == "drain of node-1"
    assert world.job.plan is not None
    assert world.job.plan.restore_step == newest
    assert world.job.plan.slots[1] == "node-4"
    assert "node-1" in world.job.plan.sources[1]
    drained = world.agents["node-1"]
    for agent in world.agents.values():
        agent.sealed_everywhere_step = None
    decided = to_do(world)
    assert not [action for action in decided if isinstance(action, actions.Dismiss)]
    assert drained.job is not None
    world.rounds(4)
    assert drained.job is None
    assert world.nodes["node-1"].job_id is None
    assert world.job.phase is JobPhase.RUNNING
    world.rounds(3)
    assert world.view().jobs[JOB].standbys == ("node-5",)


def test_both_holders_of_a_rank_can_be_drained_at_once(world: World) -> None:
    for node_id in ("node-0", "node-1"):
        world.set_node(node_id, cordoned=True, draining=True)
    world.rounds(12)
    assert set(world.view().jobs[JOB].slots.values()) == {"node-2", "node-3", "node-4", "node-5"}
    assert set(world.num_steps_lost.values()) == {0}


def test_a_node_that_nobody_can_replace_trains_on_until_somebody_can(world: World) -> None:
    for node_id in ("node-4", "node-5"):
        world.set_node(node_id, cordoned=True)
    world.drain("node-0")
    generation, step = world.job.generation, newest_step(world)
    world.rounds(4)
    assert world.job.waiting_for == "a standby or a free node to replace node-0 (slot 0), to be drained"
    assert world.view().jobs[JOB].standbys == ()
    assert (world.job.generation, newest_step(world)) == (generation, step + 4)
    world.uncordon("node-5")
    world.rounds(10)
    assert world.view().jobs[JOB].slots[0] == "node-5"
    assert world.job.waiting_for == ""


def test_a_drain_that_is_taken_back_while_the_ranks_are_held_costs_no_step(world: World) -> None:
    world.drain("node-2")
    world.rounds_until("the hold", lambda: world.job.hold_reason is not HoldReason.NONE)
    world.uncordon("node-2")
    world.rounds(8)
    assert world.job.phase is JobPhase.RUNNING
    assert world.job.cause == "the ranks were held for a drain that was taken back"
    assert world.view().jobs[JOB].slots[2] == "node-2"
    assert world.num_steps_lost == {2: 0}


def test_a_failure_during_a_drain_waits_for_the_leaving_nodes_copies(world: World) -> None:
    world.drain("node-1")
    world.rounds_until("the next plan", lambda: world.job.phase is JobPhase.ASSIGNED)
    newest = newest_step(world)
    for agent in world.agents.values():
        agent.sealed_everywhere_step = None
    world.die(world.agents["node-0"])
    world.agents["node-4"].copies.clear()
    for _ in range(3):
        world.turn()
        world.mail = [letter for letter in world.mail if letter[0] != "node-1"]
        while world.mail:
            world.deliver(0, lose_reply=False)
    assert world.job.phase is JobPhase.FENCING, "nobody else has the shards of ranks 0 and 1"
    world.rounds(6)
    assert world.job.phase is JobPhase.RUNNING
    assert world.job.plan is not None
    assert world.job.plan.restore_step == newest
    assert world.job.plan.sources[0] == ("node-1",)
    assert world.job.plan.slots[0] == "node-5"


def test_a_cordoned_standby_is_let_go_and_another_node_recruited(world: World) -> None:
    world.drain("node-4")
    world.rounds(3)
    assert world.view().jobs[JOB].standbys == ("node-5",)
    assert world.agents["node-4"].job is None
    assert world.job.generation == 1


def test_surplus_standbys_are_let_go(world: World) -> None:
    world.set_node("node-5", job_id=JOB)
    world.rounds(3)
    assert world.view().jobs[JOB].standbys == ("node-4",)


def test_a_checkpoint_request_is_passed_on_until_a_newer_version_is_committed(world: World) -> None:
    world.job = replace(world.job, checkpoint_requests=3, checkpoint_after_step=newest_step(world))
    sent = [action for action in to_do(world) if isinstance(action, actions.Send)]
    assert [action.order for action in sent] == [CheckpointNow(job_id=JOB, generation=1, request=3)] * NUM_NODES
    world.rounds(1)
    assert {world.agents[f"node-{slot}"].request for slot in range(NUM_NODES)} == {3}
    assert to_do(world) == [], "the request has arrived"
    world.rounds(3)
    world.restart_agent(world.agents["node-0"])
    world.beat(world.agents["node-0"])
    orders = [action.order for action in to_do(world) if isinstance(action, actions.Send)]
    assert not [order for order in orders if isinstance(order, CheckpointNow)], "it is answered"


def test_a_removed_node_is_lost_and_stays_so(world: World) -> None:
    world.set_node("node-3", removed=True, status=NodeStatus.FAILED, cordoned=True)
    world.rounds(6)
    assert world.view().jobs[JOB].slots[3] == "node-4"
    assert world.nodes["node-3"].status is NodeStatus.FAILED
