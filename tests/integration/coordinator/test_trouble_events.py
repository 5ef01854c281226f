"""The record of events: complete and in order for whoever reads it, however many write, and however readers behave."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import psutil
import pytest
from coordinator_cluster import API_TOKEN, Running, Stack, eventually
from coordinator_processes import Processes, api_of
from served_api import GOOD_JOB, add_events, following, served
from sqlalchemy import text

from gemini_ft.coordinator.api.streams import Streams
from gemini_ft.coordinator.transitions import record_event

_log = logging.getLogger(__name__)
NUM_WRITERS = 8
NUM_TRANSACTIONS = 28
NUM_EVENTS_EACH = 50


async def write_events(running: Running, writer: int) -> None:
    """Record events in many transactions, of which every tenth fails in the end; the first of each takes the lock."""
    for number in range(NUM_TRANSACTIONS):
        async with running.coordinator.engine.connect() as connection, connection.begin() as transaction:
            await record_event(connection, "test", f"{writer}.{number}")
            await connection.execute(
                text("INSERT INTO events (kind, message) SELECT 'test', :name FROM generate_series(2, :num_events)"),
                {"name": f"{writer}.{number}", "num_events": NUM_EVENTS_EACH},
            )
            if number % 10 == 9:
                await transaction.rollback()


async def history(api: httpx.AsyncClient, writing: asyncio.Future[Any]) -> list[Any]:
    """Read all events by cursor while they are written, and to the end afterwards."""
    found: list[Any] = []
    while True:
        is_last = writing.done()
        page = (await api.get("/v1/events", params={"after": found[-1]["id"] if found else 0, "limit": 300})).json()
        found += page["items"]
        if is_last and page["next_cursor"] is None:
            return found


async def interrupted_stream(api: httpx.AsyncClient, num_events: int) -> list[Any]:
    """Read `num_events` events from the first on as a stream that breaks again and again."""
    found: list[Any] = []
    while len(found) < num_events:
        begin = {"Last-Event-ID": str(found[-1]["id"])} if found else {}
        async with following(api, headers=begin, params={"after": 0}) as follower:
            wanted = min(700, num_events - len(found))
            found += await follower.has_read(wanted)
    return found


async def test_ten_thousand_events_of_concurrent_writers_are_read_without_gap_or_repetition(
    running: Running, stack: Stack
) -> None:
    num_events = NUM_WRITERS * NUM_EVENTS_EACH * sum(number % 10 != 9 for number in range(NUM_TRANSACTIONS))
    assert num_events >= 10_000
    async with served(running) as api, following(api, params={"after": 0}) as live:
        writing = asyncio.gather(*(write_events(running, writer) for writer in range(NUM_WRITERS)))
        by_cursor = asyncio.create_task(history(api, writing))
        by_streams = asyncio.create_task(interrupted_stream(api, num_events))
        await writing
        connection = await asyncpg.connect(stack.database_url)
        recorded = [row["id"] for row in await connection.fetch("SELECT id FROM events ORDER BY id")]
        await connection.close()
        assert len(recorded) == num_events
        for read in (await by_cursor, await by_streams, await live.has_read(num_events)):
            assert [event["id"] for event in read] == recorded


@contextmanager
def deaf_client(url: httpx.URL) -> Iterator[None]:
    """Ask for all events, and read nothing."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((url.host, url.port))
        request = f"GET /v1/events/stream?after=0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_TOKEN}\r\n\r\n"
        deaf.sendall(request.encode())
        yield


async def test_clients_that_never_read_cost_no_memory(processes: Processes, stack: Stack) -> None:
    process, ready = processes.start()
    async with await api_of(ready) as api:
        await add_events(stack, 10_000, size_bytes=4000)
        async with following(api, params={"after": 0}) as reader:  # whatever is loaded and kept for one is so now
            await reader.has_read(10_000)
        used_bytes = psutil.Process(process.pid).memory_info().rss
        with ExitStack() as deaf_clients:
            for _ in range(6):
                deaf_clients.enter_context(deaf_client(api.base_url))
            async with following(api, params={"after": 0}) as reader:
                await reader.has_read(10_000)
                added_bytes = psutil.Process(process.pid).memory_info().rss - used_bytes
    _log.info("six clients that do not read 40 MB each: %.1f MB more memory", added_bytes / 1e6)
    assert added_bytes < 6 * 10_000 * 4000 / 4


async def test_a_follower_that_is_behind_waits_for_the_database_without_haste(
    running: Running, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_reads = running.coordinator.queries.events, 0

    async def counted_read(after: int, *rest: Any, **more: Any) -> list[Any]:
        nonlocal num_reads
        num_reads += after == 0
        return await read(after, *rest, **more)

    async with served(running, Streams(ping_interval=timedelta(milliseconds=50))) as api, following(api) as live:
        await running.create(**GOOD_JOB)
        await live.has_read(2)
        await asyncio.to_thread(stack.postgres.kill)
        monkeypatch.setattr(running.coordinator.queries, "events", counted_read)
        async with following(api, params={"after": 0}) as late:
            num_pings = live.num_pings
            await eventually(lambda: live.num_pings > num_pings + 20, "a second to pass")
            assert 1 <= num_reads <= 10
            await asyncio.to_thread(stack.postgres.start)
            await late.has_read(2)
    assert late.events == live.events
