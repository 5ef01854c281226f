"""The coordinator's API behind a real server, and what its tests send to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
from coordinator_cluster import API_TOKEN, Running, Stack, eventually

from gemini_ft.coordinator.api.streams import Streams
from gemini_ft.coordinator.server import bind, make_server

GOOD_JOB: dict[str, Any] = {"name": "job", "num_nodes": 2, "num_ranks_per_node": 1}


def bearer(token: str) -> dict[str, str]:
    """Headers with a token."""
    return {"Authorization": f"Bearer {token}"}


@asynccontextmanager
async def served(
    running: Running, streams: Streams | None = None, unread_limit: timedelta = timedelta(seconds=20)
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the API of a running coordinator, and yield an operator's client of it."""
    listening, url = bind("127.0.0.1:0", unread_limit)
    server = make_server(running.coordinator, API_TOKEN, url, streams=streams)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await eventually(lambda: server.started, "the server to listen")
        async with httpx.AsyncClient(base_url=url, headers=bearer(API_TOKEN), timeout=10) as api:
            yield api
    finally:
        server.should_exit = True
        await serving


async def new_token(running: Running, name: str, role: str, **more: Any) -> str:
    """Make a token and return its secret."""
    made = await running.api.post("/v1/tokens", json={"name": name, "role": role} | more)
    assert made.status_code == 201, made.text
    return str(made.json()["token"])


async def add_events(stack: Stack, num_events: int, *, size_bytes: int = 10) -> None:
    """Record events in one transaction."""
    connection = await asyncpg.connect(stack.database_url)
    await connection.execute(
        "INSERT INTO events (kind, message) SELECT 'test', repeat('x', $2) FROM generate_series(1, $1)",
        num_events,
        size_bytes,
    )
    await connection.close()


class Follower:
    """A client of a stream of server-sent events that keeps what it has read."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self.events: list[Any] = []
        self.ids: list[str] = []
        self.num_pings = 0
        self.reading = asyncio.create_task(self._read(lines))

    async def _read(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            field, _, value = line.partition(": ")
            match field:
                case "data":
                    self.events.append(json.loads(value))
                case "id":
                    self.ids.append(value)
                case "":
                    self.num_pings += bool(value)

    async def has_read(self, num_events: int) -> list[Any]:
        await eventually(lambda: len(self.events) >= num_events, f"{num_events} events to be read")
        return self.events


@asynccontextmanager
async def following(api: httpx.AsyncClient, path: str = "/v1/events/stream", **request: Any) -> AsyncIterator[Follower]:
    """Follow a stream from its beginning to the end of the context."""
    async with api.stream("GET", path, timeout=httpx.Timeout(10, read=None), **request) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        follower = Follower(answer.aiter_lines())
        await eventually(lambda: follower.num_pings, "the stream to begin")
        try:
            yield follower
        finally:
            follower.reading.cancel()
            await asyncio.wait((follower.reading,))
