"""Fixtures over `agent_harness`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from agent_harness import NODE, AgentProcess, Client, Coordinator, RunningAgent, eventually

from gemini_ft.agent.agent import Agent
from gemini_ft.agent.persistence import StateFolder
from gemini_ft.agent.records import NodeRecord
from gemini_ft.agent.replicas.service import LocalReplicaService
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.agent.settings import AgentSettings
from gemini_ft.localstack.nats import NatsServer


@pytest.fixture
async def start_client() -> AsyncIterator[Callable[[Path], Awaitable[Client]]]:
    clients: list[Client] = []

    async def start(socket_path: Path) -> Client:
        clients.append(await Client.start(socket_path))
        return clients[-1]

    yield start
    for client in clients:
        await client.close()


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gemini-ft-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


AgentFactory = Callable[..., Any]


@pytest.fixture
def run_agent(tmp_path: Path, memory_dir: Path) -> AgentFactory:
    @asynccontextmanager
    async def run(
        nats_url: str = "nats://127.0.0.1:9",
        node_id: str | None = NODE,
        heartbeat_interval_s: float = 0.05,
        **settings: Any,
    ) -> AsyncIterator[RunningAgent]:
        own = AgentSettings(
            nats_url=nats_url,
            state_dir=tmp_path / "state",
            memory_dir=memory_dir,
            heartbeat_interval=timedelta(seconds=heartbeat_interval_s),
            **{"close_grace": timedelta(milliseconds=100), **settings},
        )
        with StateFolder(own.state_dir) as state:
            if node_id is not None and state.load_node().node_id is None:
                state.save_node(NodeRecord(node_id=node_id))
            agent, stop = Agent(own, state, LocalReplicaService(ReplicaSettings(memory_dir))), asyncio.Event()
            task = asyncio.create_task(agent.run(stop))
            running = RunningAgent(agent, task, stop)
            try:
                await eventually("the agent to listen", lambda: agent.socket_path.is_socket() or task.done())
                yield running
            finally:
                await running.stop()

    return run


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def coordinator(nats_server: NatsServer) -> AsyncIterator[Coordinator]:
    coordinator = await Coordinator.connect(nats_server)
    yield coordinator
    await coordinator.connection.close()


@pytest.fixture
async def agent_process(
    tmp_path: Path, memory_dir: Path, nats_server: NatsServer
) -> AsyncIterator[Callable[[str], AgentProcess]]:
    agents: list[AgentProcess] = []

    def make(name: str) -> AgentProcess:
        agents.append(AgentProcess(tmp_path / name, memory_dir / name, nats_server))
        return agents[-1]

    yield make
    for agent in agents:
        await agent.close()
