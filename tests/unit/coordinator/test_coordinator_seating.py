"""Which nodes a job gets: labels it asks for, failure domains, cordons."""

from __future__ import annotations

from dataclasses import replace

from coordinator_world import JOB, SETTINGS, SPEC, World

from gemini_ft.coordinator import actions
from gemini_ft.coordinator.reconcile import decide
from gemini_ft.coordinator.state import JobPhase


def labelled(*racks: str) -> World:
    world = World()
    for node_id, rack in zip(world.nodes, racks, strict=True):
        world.set_node(node_id, labels={"rack": rack})
    return world


def rack_of(world: World, slot: int) -> str:
    return world.nodes[world.view().jobs[JOB].slots[slot]].labels["rack"]


def test_without_labels_nodes_are_seated_as_they_were_registered() -> None:
    world = World()
    world.rounds(2)
    assert dict(world.view().jobs[JOB].slots) == {slot: f"node-{slot}" for slot in range(4)}
    assert world.view().jobs[JOB].standbys == ("node-4",)


def test_holders_of_a_shard_are_in_different_racks() -> None:
    world = labelled("a", "a", "a", "b", "b", "b")
    world.rounds(2)
    assert rack_of(world, 0) != rack_of(world, 1)
    assert rack_of(world, 2) != rack_of(world, 3)


def test_a_spread_that_is_impossible_is_said() -> None:
    world = labelled("a", "a", "a", "a", "a", "b")
    for agent in world.agents.values():
        world.beat(agent)
    (admitted,) = [
        action for action in decide(world.view(), world.seen, world.now, SETTINGS) if isinstance(action, actions.Admit)
    ]
    assert "rack" in admitted.note


def test_a_lost_node_is_replaced_by_the_standby_of_the_better_rack() -> None:
    world = labelled("a", "b", "a", "b", "b", "a")
    world.job = replace(world.job, spec=SPEC.model_copy(update={"num_standbys": 2}))
    world.settle()
    lost = world.agents["node-0"]
    assert rack_of(world, 0) == "a"
    world.die(lost)
    world.rounds(5)
    assert world.view().jobs[JOB].slots[0] == "node-5"


def test_a_free_node_of_the_better_rack_is_recruited() -> None:
    world = labelled("a", "b", "a", "b", "b", "a")
    world.job = replace(world.job, spec=SPEC.model_copy(update={"num_standbys": 0}))
    world.settle()
    world.die(world.agents["node-2"])
    world.rounds(6)
    assert world.view().jobs[JOB].slots[2] == "node-5"


def test_only_nodes_with_the_labels_asked_for_are_given_to_a_job() -> None:
    world = labelled("a", "a", "b", "a", "a", "a")
    world.job = replace(world.job, spec=SPEC.model_copy(update={"node_selector": {"rack": "a"}}))
    world.settle()
    assert world.job.phase is JobPhase.RUNNING
    assert "node-2" not in world.view().jobs[JOB].members
    world.die(world.agents["node-0"])
    world.die(world.agents["node-1"])
    world.rounds(6)
    assert world.nodes["node-2"].job_id is None
    assert "node-2" not in world.view().jobs[JOB].members


def test_a_job_says_which_labels_it_waits_for_and_cordoned_nodes_are_not_ready() -> None:
    world = labelled("a", "a", "b", "a", "a", "a")
    world.job = replace(world.job, spec=SPEC.model_copy(update={"node_selector": {"rack": "a"}}))
    for node_id in ("node-3", "node-4"):
        world.set_node(node_id, cordoned=True)
    world.rounds(3)
    assert world.job.waiting_for == "4 free nodes with rack=a; 3 are ready"
