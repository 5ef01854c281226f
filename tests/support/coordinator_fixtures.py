"""Fixtures of the tests that need a coordinator: real Postgres and NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import asyncpg
import pytest
from coordinator_cluster import Running, SimulatedCluster, Stack, coordinating
from nats.js.errors import NotFoundError

from gemini_ft.contracts.subjects import VERDICT_STREAM
from gemini_ft.coordinator import broker
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.localstack.postgres import PostgresServer

__all__ = ["cluster", "running", "servers", "stack"]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PostgresServer, NatsServer]]:
    folder = tmp_path_factory.mktemp("coordinator-stack")
    # Killed processes lose nothing by this, only killed machines would.
    settings = {"fsync": "off"}
    with PostgresServer(folder / "postgres", settings=settings) as postgres, NatsServer(folder / "nats") as nats_server:
        yield postgres, nats_server


@pytest.fixture
async def stack(servers: tuple[PostgresServer, NatsServer], request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A database and a verdict stream of the test's own."""
    postgres, nats_server = servers
    name = f"test_{abs(hash(request.node.nodeid)):x}"
    connection = await asyncpg.connect(postgres.url)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    found = Stack(postgres, nats_server, postgres.url.rpartition("/")[0] + f"/{name}")
    client = await found.client()
    with suppress(NotFoundError):
        await client.jetstream().delete_stream(VERDICT_STREAM)
    await broker.ensure_verdict_stream(client)
    yield found
    await client.close()
    connection = await asyncpg.connect(postgres.url)
    await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await connection.close()


@pytest.fixture
async def running(stack: Stack) -> AsyncIterator[Running]:
    async with coordinating(stack) as found:
        yield found


@pytest.fixture
async def cluster(stack: Stack) -> AsyncIterator[SimulatedCluster]:
    client = await stack.client()
    found = SimulatedCluster(client)
    training = asyncio.create_task(found.train_forever())
    yield found
    training.cancel()
    for agent in found.agents:
        await agent.sleep()
    await client.close()
    if training.done() and not training.cancelled():
        training.result()
