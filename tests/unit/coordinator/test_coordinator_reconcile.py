"""Decisions under random orders of events: agents, messages, restarts and failures are modelled, time is injected."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from coordinator_world import JOB, SETTINGS, SPEC, World
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_ft.contracts.messages import (
    StartJob,
    VerdictKind,
)
from gemini_ft.coordinator import actions
from gemini_ft.coordinator.observations import Observations
from gemini_ft.coordinator.reconcile import decide
from gemini_ft.coordinator.state import Cluster, JobPhase

EVENTS = (
    ["turn", "beat", "deliver", "train"] * 6
    + ["lose reply", "late heartbeat", "advance"] * 2
    + ["exit rank", "die", "false verdict", "come back", "restart agent", "restart coordinator"]
    + ["stop", "resume", "drain", "uncordon"]
)


def happen(world: World, event: str, choice: random.Random) -> None:
    agent = choice.choice(list(world.agents.values()))
    match event:
        case "turn":
            world.turn()
        case "beat":
            for one in world.agents.values():
                world.beat(one)
        case "deliver" | "lose reply":
            for _ in range(len(world.mail)):
                world.deliver(choice.randrange(1000), lose_reply=event == "lose reply")
        case "train":
            world.train()
        case "late heartbeat":
            if world.late:
                world.seen.hear(choice.choice(world.late))
        case "advance":
            world.now += 0.5
        case "exit rank":
            world.exit_rank(agent)
        case "die":
            world.die(agent)
        case "false verdict":
            world.verdict(agent, VerdictKind.FAILED)
        case "come back":
            world.come_back(agent)
        case "restart agent":
            world.restart_agent(agent)
        case "stop":
            world.stop()
        case "resume":
            world.resume()
        case "drain":
            world.drain(agent.node_id)
        case "uncordon":
            world.uncordon(agent.node_id)
        case "restart coordinator":
            world.seen = Observations(lambda: world.now)


@settings(max_examples=100, deadline=None)
@given(st.booleans(), st.integers(0, 2**32))
def test_whatever_happens_the_job_runs_in_the_end_or_says_what_is_lost(running: bool, seed: int) -> None:
    world = World()
    choice = random.Random(seed)
    if running:
        world.settle()
    for _ in range(250):
        happen(world, choice.choice(EVENTS), choice)
    world.settle()
    if world.job.phase is JobPhase.BLOCKED:
        assert "shard" in world.job.cause
        return
    assert world.job.phase is JobPhase.RUNNING, world.job
    assert not [node for node in world.nodes.values() if node.draining and node.job_id is not None]
    finished = {agent.finished_step for agent in world.agents.values() if agent.slot is not None}
    assert len(finished) == 1
    (step,) = finished
    assert step is not None
    assert step > (world.job.plan.restore_step or 0) if world.job.plan else False


def test_nothing_is_done_when_all_is_well() -> None:
    world = World()
    world.settle()
    assert world.job.phase is JobPhase.RUNNING
    actions_left = decide(world.view(), world.seen, world.now, SETTINGS)
    assert [action for action in actions_left if not isinstance(action, actions.RecordVersion)] == []


def test_an_unknown_job_on_a_node_is_left_alone() -> None:
    world = World()
    agent = world.agents["node-0"]
    agent.job = StartJob(job_id=JOB, job_key="00", spec=SPEC)
    world.beat(agent)
    cluster = Cluster({}, dict(world.nodes))
    assert decide(cluster, world.seen, world.now, SETTINGS) == []


def test_free_nodes_are_given_out_once() -> None:
    world = World()
    for agent in world.agents.values():
        world.beat(agent)
    jobs = {
        f"job-{number}": replace(world.job, job_id=f"job-{number}", spec=SPEC.model_copy(update={"num_nodes": 3}))
        for number in range(3)
    }
    for job_id, job in jobs.items():
        world.seen.note_phase(job_id, job.generation, job.phase)
    world.now += 1.0
    decided = decide(Cluster(jobs, dict(world.nodes)), world.seen, world.now, SETTINGS)
    admitted = [action for action in decided if isinstance(action, actions.Admit)]
    taken = list(itertools.chain.from_iterable((*one.slots.values(), *one.standbys) for one in admitted))
    assert len(admitted) == 1
    assert len(taken) == len(set(taken)) == 4
    explained = [action.waiting_for for action in decided if isinstance(action, actions.Explain)]
    assert explained == ["3 free nodes; 2 are ready"] * 2
