"""What one node's ranks import reaches the launchers of the others, through a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from agent_harness import JOB, eventually
from nats.aio.client import Client as NatsClient

from gemini_ft.agent.imports_exchange import JobImports, exchange_imports
from gemini_ft.agent.launcher.learning import read_names, write_names
from gemini_ft.contracts.subjects import IMPORTS_BUCKET
from gemini_ft.coordinator import broker
from gemini_ft.localstack.nats import NatsServer

NAMES = ["json", "torch.distributed"]


@pytest.fixture
async def connection(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    connection = await nats.connect(nats_server.url, token=nats_server.token)
    await broker.ensure_imports_bucket(connection)
    yield connection
    await connection.close()


def files_of(folder: Path, job_id: str = JOB) -> JobImports:
    folder.mkdir(exist_ok=True)
    return JobImports(job_id, folder / "learned.json", folder / "reported.json")


@asynccontextmanager
async def exchanging(connection: NatsClient, find_files: Callable[[], JobImports | None]) -> AsyncIterator[None]:
    task = asyncio.create_task(exchange_imports(connection, find_files))
    yield
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_standby_is_told_what_a_member_has_learned(connection: NatsClient, tmp_path: Path) -> None:
    member, standby = files_of(tmp_path / "member"), files_of(tmp_path / "standby")
    async with exchanging(connection, lambda: standby), exchanging(connection, lambda: member):
        write_names(member.learned, NAMES)
        await eventually("the standby to be told", standby.reported.exists)
    assert read_names(standby.reported) == NAMES
    assert not member.reported.exists()


async def test_another_job_is_told_nothing(connection: NatsClient, tmp_path: Path) -> None:
    member, stranger = files_of(tmp_path / "member"), files_of(tmp_path / "stranger", "job-2")
    told = files_of(tmp_path / "told")
    write_names(member.learned, NAMES)
    async with exchanging(connection, lambda: stranger), exchanging(connection, lambda: member):
        async with exchanging(connection, lambda: told):
            await eventually("the names to be there", told.reported.exists)
        assert not stranger.reported.exists()


async def test_a_damaged_entry_hurts_nobody(connection: NatsClient, tmp_path: Path) -> None:
    standby, current = files_of(tmp_path / "standby"), [JOB]
    bucket = await connection.jetstream().key_value(IMPORTS_BUCKET)
    await bucket.put(JOB, b'{"os": 1}')
    await bucket.put("job-3", b'["json"]')
    async with exchanging(connection, lambda: JobImports(current[0], standby.learned, standby.reported)):
        # The exchange of another job shows that it has gone past the damaged one.
        current[0] = "job-3"
        await eventually("the names of the other job", standby.reported.exists)
    assert read_names(standby.reported) == ["json"]
