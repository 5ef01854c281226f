"""Events as they happen, over real connections: complete, resumable, limited, and ended with the service."""

from __future__ import annotations

import asyncio
import signal
import socket
from datetime import timedelta

import httpx
import pytest
from coordinator_cluster import API_TOKEN, Running, Stack, eventually
from coordinator_processes import Processes
from served_api import GOOD_JOB, add_events, bearer, following, new_token, served

from gemini_ft.coordinator.api.streams import Streams


async def test_what_happens_is_streamed_to_everybody_in_order(running: Running) -> None:
    await running.create(**GOOD_JOB | {"name": "before"})
    async with served(running) as api, following(api) as one, following(api) as other:
        job_ids = [await running.create(**GOOD_JOB) for _ in range(3)]
        for follower in (one, other):
            events = await follower.has_read(6)
            assert [event["job_id"] for event in events if event["kind"] == "job_created"] == job_ids
            assert follower.ids == [str(event["id"]) for event in events]
        assert events == (await running.items("/v1/events"))[-6:]


async def test_a_stream_goes_on_after_the_last_event_id(running: Running) -> None:
    for _ in range(3):
        await running.create(**GOOD_JOB)
    known = await running.items("/v1/events", limit=1000)
    seen = known[2]["id"]
    async with served(running) as api:
        async with following(api, headers={"Last-Event-ID": str(seen)}, params={"after": 0}) as follower:
            assert await follower.has_read(len(known) - 3) == known[3:]
        async with following(api, params={"after": seen}) as follower:
            assert await follower.has_read(len(known) - 3) == known[3:]
            await running.create(**GOOD_JOB)
            assert (await follower.has_read(len(known) - 1))[-1]["kind"] == "audit_create"


async def test_ten_thousand_events_reach_a_follower_once_each(running: Running, stack: Stack) -> None:
    async with served(running) as api, following(api) as live:
        await add_events(stack, 10_000)
        events = await live.has_read(10_000)
        async with following(api, params={"after": 0}) as late:
            assert await late.has_read(10_000) == events
    ids = [event["id"] for event in events]
    assert ids == list(range(ids[0], ids[0] + 10_000))


async def test_a_stream_can_be_of_one_job_and_kind(running: Running) -> None:
    job_id = await running.create(**GOOD_JOB)
    async with served(running) as api, following(api, params={"job_id": job_id, "kind": "job_stopped"}) as follower:
        other = await running.create(**GOOD_JOB)
        for one in (other, job_id):
            await running.api.post(f"/v1/jobs/{one}/stop")
        assert [event["job_id"] for event in await follower.has_read(1)] == [job_id]


async def test_a_token_bound_to_jobs_hears_of_no_others(running: Running) -> None:
    mine = await running.create(**GOOD_JOB)
    token = await new_token(running, "bound", "viewer", job_ids=[mine])
    async with served(running) as api, following(api, headers=bearer(token)) as follower:
        other = await running.create(**GOOD_JOB)
        for one in (other, mine):
            await running.api.post(f"/v1/jobs/{one}/stop")
        assert {event["job_id"] for event in await follower.has_read(2)} == {mine}


async def test_a_quiet_stream_is_kept_alive(running: Running) -> None:
    streams = Streams(ping_interval=timedelta(milliseconds=50))
    async with served(running, streams) as api, following(api) as follower:
        await eventually(lambda: follower.num_pings > 3, "pings")
        assert follower.events == []


async def test_streams_are_limited_by_token_and_in_all(running: Running) -> None:
    streams = Streams(num_in_all=3, num_a_token=2)
    token = await new_token(running, "other", "viewer")
    async with served(running, streams) as api, following(api):
        async with following(api), following(api, headers=bearer(token)):
            for headers, named in (({}, "token 'bootstrap'"), (bearer(token), "this coordinator")):
                refused = await api.get("/v1/events/stream", headers=headers)
                assert refused.status_code == 429
                assert refused.json()["type"] == "urn:gemini-ft:problem:too-many-streams"
                assert refused.headers["retry-after"] == "5"
                assert named in refused.json()["detail"]
        await eventually(lambda: streams.num_open == 1, "closed streams not to count any more")
        async with following(api):
            pass


async def test_a_client_that_never_reads_is_dropped_and_disturbs_nobody(running: Running, stack: Stack) -> None:
    streams = Streams()
    async with served(running, streams, unread_limit=timedelta(seconds=1)) as api, following(api) as reader:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((api.base_url.host, api.base_url.port))
        head = f"GET /v1/events/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_TOKEN}\r\n\r\n"
        deaf.sendall(head.encode())
        await eventually(lambda: streams.num_open == 2, "the deaf client's stream to begin")
        await add_events(stack, 10_000, size_bytes=1000)
        await reader.has_read(10_000)
        await eventually(lambda: streams.num_open == 1, "the deaf client to be dropped", 20)
        deaf.close()
        await eventually(lambda: running.coordinator.engine.pool.checkedout() == 0, "no connection to be in use")


async def test_a_stream_lives_through_a_restart_of_postgres(running: Running, stack: Stack) -> None:
    async with served(running) as api, following(api) as follower:
        await running.create(**GOOD_JOB)
        await follower.has_read(2)
        await asyncio.to_thread(stack.postgres.kill)
        await asyncio.to_thread(stack.postgres.start)

        async def created() -> bool:
            return (await running.api.post("/v1/jobs", json=GOOD_JOB)).status_code == 201

        await eventually(created, "the database to take writes again", 20)
        events = await follower.has_read(4)
        assert [event["kind"] for event in events] == ["job_created", "audit_create"] * 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_streams_end_with_the_process(processes: Processes, how: signal.Signals) -> None:
    process, ready = processes.start()
    await eventually(ready.exists, "the coordinator to be ready", 30)
    url = await asyncio.to_thread(lambda: ready.read_text().strip())
    async with httpx.AsyncClient(base_url=url, headers=bearer(API_TOKEN)) as api, following(api) as follower:
        process.send_signal(how)
        async with asyncio.timeout(10):
            await follower.reading
    assert await asyncio.to_thread(process.wait, 10) == 0
