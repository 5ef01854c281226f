"""Two agents, their launchers and ranks: checkpoints on request, and a job that is held, resumed and held again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from agent_harness import JOB, RunningAgent, eventually, start_job
from live_job import SCRIPT, Logs, Undisturbed

from gemini_ft.agent.agent import Agent
from gemini_ft.agent.persistence import StateFolder
from gemini_ft.agent.records import NodeRecord
from gemini_ft.agent.replicas.service import LocalReplicaService
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.agent.settings import AgentSettings
from gemini_ft.contracts.messages import (
    Assign,
    CheckpointNow,
    CloseJob,
    Fence,
    Hold,
    Inventory,
    JobOutcome,
    LauncherKind,
    Order,
    OrderDone,
    OrderRefused,
    OrderReply,
    RankState,
    RankStatus,
)

PATIENCE_S = 60.0


class Nodes:
    """Nodes with one rank each, which run generations of one job as the test says."""

    def __init__(self, folder: Path, agents: list[RunningAgent]) -> None:
        self.folder = folder
        self.agents = agents
        self.generation = 0

    async def order(self, order: Order) -> list[OrderReply]:
        return await asyncio.gather(*(agent.order(order) for agent in self.agents))

    async def start(self, checkpoint_interval_steps: int) -> None:
        await self.order(
            start_job(
                launcher=LauncherKind.MANAGED,
                command=(str(SCRIPT), str(self.folder)),
                environment={"OMP_NUM_THREADS": "1"},
                num_nodes=len(self.agents),
                num_replicas=2,
                checkpoint_interval_steps=checkpoint_interval_steps,
            )
        )

    async def begin_generation(self, restore_step: int | None) -> list[Inventory]:
        self.generation += 1
        inventories = await self.order(Fence(job_id=JOB, generation=self.generation))
        beats = [agent.heartbeat() for agent in self.agents]
        await self.order(
            Assign(
                job_id=JOB,
                generation=self.generation,
                slots={slot: beat.node_id for slot, beat in enumerate(beats)},
                addresses={beat.node_id: beat.address for beat in beats},
                placement={0: (0, 1), 1: (1, 0)},
                restore_step=restore_step,
                sources={} if restore_step is None else {r: tuple(beat.node_id for beat in beats) for r in (0, 1)},
            )
        )
        found = [inventory for inventory in inventories if isinstance(inventory, Inventory)]
        assert len(found) == len(self.agents), inventories
        return found

    @property
    def ranks(self) -> list[RankStatus]:
        """The ranks of the newest generation that are known."""
        statuses = [status for agent in self.agents for status in agent.heartbeat().ranks]
        return [status for status in statuses if status.generation == self.generation]

    @property
    def least_finished(self) -> int:
        finished = [-1 if rank.finished_step is None else rank.finished_step for rank in self.ranks]
        return min(finished) if len(finished) == len(self.agents) else -1

    async def finished(self, step: int) -> None:
        await eventually(f"step {step} on all ranks", lambda: self.least_finished >= step, PATIENCE_S)

    @property
    def _held_steps(self) -> list[int]:
        return [rank.held_step for rank in self.ranks if rank.held_step is not None]

    async def held(self) -> int:
        """The step at which all ranks are held."""
        await eventually("both ranks to be held", lambda: len(self._held_steps) == len(self.agents), PATIENCE_S)
        found = {(rank.held_step, rank.committed_step, rank.finished_step) for rank in self.ranks}
        assert len(found) == 1, found
        ((held_step, committed_step, finished_step),) = found
        assert held_step == committed_step == finished_step
        assert held_step is not None
        return held_step


@pytest.fixture
async def nodes(tmp_path: Path, memory_dir: Path) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        agents = []
        for name in ("node-0", "node-1"):
            settings = AgentSettings(
                nats_url="nats://127.0.0.1:9",
                state_dir=tmp_path / name,
                memory_dir=memory_dir / name,
                heartbeat_interval=timedelta(milliseconds=50),
            )
            state = stack.enter_context(StateFolder(settings.state_dir))
            state.save_node(NodeRecord(node_id=name))
            agent = Agent(settings, state, LocalReplicaService(ReplicaSettings(settings.memory_dir)))
            stop = asyncio.Event()
            running = RunningAgent(agent, asyncio.create_task(agent.run(stop)), stop)
            stack.push_async_callback(running.stop)
            await eventually(f"the agent of {name} to listen", agent.socket_path.is_socket)
            agents.append(running)
        nodes = Nodes(tmp_path / "job", agents)
        nodes.folder.mkdir()
        stack.push_async_callback(nodes.order, CloseJob(job_id=JOB, outcome=JobOutcome.STOPPED))
        yield nodes


@pytest.fixture
def undisturbed(tmp_path: Path) -> Iterator[Undisturbed]:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    run = Undisturbed(folder, 2)
    yield run
    run.close()


async def test_a_job_is_held_and_resumed_without_losing_a_step_or_a_bit(nodes: Nodes, undisturbed: Undisturbed) -> None:
    await nodes.start(checkpoint_interval_steps=100_000)
    await nodes.begin_generation(restore_step=None)
    await nodes.finished(2)
    await eventually("the first step to be committed", lambda: {rank.committed_step for rank in nodes.ranks} == {0})

    request = CheckpointNow(job_id=JOB, generation=1, request=1)
    assert isinstance(await nodes.agents[0].order(request), OrderDone)
    await nodes.finished(nodes.least_finished + 5)
    assert {rank.committed_step for rank in nodes.ranks} == {0}, "the other node has not been asked yet"
    await nodes.order(request)
    await eventually("a version on request", lambda: all(r.committed_step for r in nodes.ranks), PATIENCE_S)

    refusals = await nodes.order(Hold(job_id=JOB, generation=2))
    assert all(isinstance(refusal, OrderRefused) for refusal in refusals)
    # To one node only: the other one's rank hears of it from the agreement.
    hold = Hold(job_id=JOB, generation=1)
    assert isinstance(await nodes.agents[1].order(hold), OrderDone)
    first_held = await nodes.held()
    await nodes.order(hold)
    assert await nodes.held() == first_held

    launchers = [agent.heartbeat().launcher_pid for agent in nodes.agents]
    for inventory in await nodes.begin_generation(restore_step=first_held):
        assert {(0, first_held), (1, first_held)} <= {(copy.rank, copy.step) for copy in inventory.held}
    await nodes.finished(first_held + 3)
    assert {rank.restored_step for rank in nodes.ranks} == {first_held}
    assert [agent.heartbeat().launcher_pid for agent in nodes.agents] == launchers, "launchers stay parked"

    await nodes.order(Hold(job_id=JOB, generation=2))
    second_held = await nodes.held()
    killed = next(rank for rank in nodes.ranks if rank.rank == 1)
    os.kill(killed.pid, signal.SIGKILL)
    await eventually("the end of rank 1", lambda: RankState.EXITED in [rank.state for rank in nodes.ranks])
    assert [(rank.state, rank.held_step) for rank in nodes.ranks if rank.rank == 0] == [
        (RankState.RUNNING, second_held)
    ]
    await nodes.begin_generation(restore_step=second_held)
    await nodes.finished(second_held + 3)
    (nodes.folder / "end").touch()
    await eventually("the end of the job", lambda: all(a.heartbeat().finished for a in nodes.agents), PATIENCE_S)

    _check_log(nodes.folder, undisturbed, [first_held, second_held])


def _check_log(folder: Path, undisturbed: Undisturbed, held_steps: list[int]) -> None:
    lines = Logs(folder, 2).new_lines()
    for rank in (0, 1):
        mine = [line for line in lines if line.rank == rank]
        assert [line.step for line in mine if line.kind == "restored"] == [None, *held_steps]
        # A rank that is held never comes to write the line of that step.
        steps = [line.step for line in mine if line.kind == "step" or (line.kind == "restored" and line.generation > 1)]
        assert steps == list(range(len(steps))), "no step is done twice, none is left out"
        for line in mine:
            assert line.step is None or line.digest == undisturbed.digest(rank, line.step), line
