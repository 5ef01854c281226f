"""Postgres in trouble: requests are answered in bounded time, nothing leaks, and all is well at once afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import asyncpg
import httpx
import pytest
from coordinator_cluster import FAST, Running, SimulatedCluster, Stack, coordinating, eventually
from served_api import GOOD_JOB, bearer, new_token, served
from tcp_proxy import proxy_of

IMPATIENT = replace(FAST, num_api_connections=3, database_timeout=timedelta(milliseconds=500))


async def start_job(running: Running, cluster: SimulatedCluster) -> str:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    return job_id


def check_is_unavailable(answer: httpx.Response) -> str:
    """The answer tells the client to come again, and tells it nothing else; return its detail."""
    assert answer.status_code == 503, answer.text
    assert answer.json()["type"] == "urn:gemini-ft:problem:unavailable"
    assert answer.headers["retry-after"] == "1"
    detail = str(answer.json()["detail"])
    assert "[SQL" not in detail
    assert "INSERT INTO" not in detail
    return detail


async def is_ready(running: Running) -> bool:
    return (await running.api.get("/readyz")).status_code == 200


async def is_at_rest(running: Running, stack: Stack) -> bool:
    """No request has a connection, and no session of the server has been left in a transaction."""
    async with session(stack.database_url) as admin:
        num_left = await admin.fetchval(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND xact_start IS NOT NULL AND pid != pg_backend_pid()"
        )
    return running.coordinator.num_database_connections()["in_use"] == num_left == 0


@asynccontextmanager
async def session(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def read_only(stack: Stack) -> AsyncIterator[None]:
    """All sessions of the server, those that are open too, are read-only."""
    async with session(stack.postgres.url) as admin:
        try:
            await admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            await admin.execute("SELECT pg_reload_conf()")
            yield
        finally:
            await admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
            await admin.execute("SELECT pg_reload_conf()")


@asynccontextmanager
async def no_event_can_be_recorded(stack: Stack) -> AsyncIterator[None]:
    """Everything that records an event waits."""
    async with session(stack.database_url) as blocker, blocker.transaction():
        await blocker.execute("LOCK TABLE events IN EXCLUSIVE MODE")
        yield


async def test_a_read_only_database_is_read_and_nobody_leads_until_it_takes_writes_again(
    running: Running, stack: Stack, cluster: SimulatedCluster
) -> None:
    job_id = await start_job(running, cluster)
    viewer = bearer(await new_token(running, "viewer", "viewer"))
    async with read_only(stack):
        await eventually(lambda: not running.coordinator.leadership.held, "the leader to resign")
        assert "read-only" in check_is_unavailable(await running.api.get("/readyz"))
        assert "read-only" in check_is_unavailable(await running.api.post("/v1/jobs", json=GOOD_JOB))
        assert (await running.api.get("/healthz")).status_code == 200
        # The first use of a token would be noted.
        shown = await running.api.get(f"/v1/jobs/{job_id}", headers=viewer)
        assert (shown.status_code, shown.json()["phase"]) == (200, "running")
        await cluster.goes_on()
        await cluster.exit_rank(cluster.agents[0])
    await running.until(job_id, "running", 2)
    await eventually(lambda: is_ready(running), "the coordinator to be ready again")
    await cluster.goes_on()


async def test_connections_to_a_server_that_became_read_only_are_left_though_nobody_writes(
    running: Running, stack: Stack
) -> None:
    """No requests come to a coordinator that is not ready: it must find the successor by itself."""
    name = stack.database_url.rpartition("/")[2]
    async with session(stack.postgres.url) as admin:
        await admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        assert "read-only" in check_is_unavailable(await running.api.get("/readyz"))
        await running.get("/v1/jobs")
        await admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    await eventually(lambda: is_ready(running), "the pool to have left its read-only connections")
    await eventually(lambda: running.coordinator.leadership.held, "the coordinator to lead")


async def test_more_requests_than_connections(stack: Stack, cluster: SimulatedCluster) -> None:
    async with coordinating(stack, IMPATIENT) as running:
        job_id = await start_job(running, cluster)
        async with no_event_can_be_recorded(stack), asyncio.timeout(30):
            answers = await asyncio.gather(*(running.api.post("/v1/jobs", json=GOOD_JOB) for _ in range(12)))
        for answer in answers:
            check_is_unavailable(answer)
        assert any("all connections are in use" in answer.text for answer in answers)
        assert (await running.api.post("/v1/jobs", json=GOOD_JOB)).status_code == 201
        assert [job["job_id"] for job in await running.items("/v1/jobs", phase="running")] == [job_id]


async def test_a_recovery_does_not_wait_for_requests_that_have_taken_all_connections(
    stack: Stack, cluster: SimulatedCluster
) -> None:
    async with coordinating(stack, IMPATIENT) as running:
        job_id = await start_job(running, cluster)
        async with AsyncExitStack() as taken:
            for _ in range(IMPATIENT.num_api_connections):
                await taken.enter_async_context(running.coordinator.engine.connect())
            check_is_unavailable(await running.api.post("/v1/jobs", json=GOOD_JOB))
            check_is_unavailable(await running.api.get("/readyz"))
            await cluster.exit_rank(cluster.agents[0])
            await running.until(job_id, "running", 2)  # the shared reading of the cluster goes on too
        assert await is_ready(running)


async def test_a_database_that_does_not_answer(stack: Stack, cluster: SimulatedCluster) -> None:
    async with proxy_of(stack.database_url) as (proxy, url):
        cut_off = replace(stack, database_url=url)
        async with coordinating(cut_off, IMPATIENT) as running:
            job_id = await start_job(running, cluster)
            proxy.hold.clear()
            await cluster.exit_rank(cluster.agents[0])
            async with asyncio.timeout(30):
                answers = await asyncio.gather(
                    *(running.api.post("/v1/jobs", json=GOOD_JOB) for _ in range(6)),
                    *(running.api.get("/v1/events") for _ in range(6)),
                    running.api.get("/readyz"),
                )
            for answer in answers:
                check_is_unavailable(answer)
            await eventually(lambda: not running.coordinator.leadership.held, "the leader to resign")
            proxy.hold.set()
            await running.until(job_id, "running", 2)
            await eventually(lambda: is_ready(running), "the coordinator to be ready again")
            await eventually(lambda: is_at_rest(running, stack), "all connections to be given back")


@pytest.mark.parametrize("wait_for", ["its turn", "the lock"])
async def test_a_cancelled_request_leaks_no_connection(stack: Stack, wait_for: str) -> None:
    async with coordinating(stack, IMPATIENT) as running:
        in_use = running.coordinator.engine.pool.checkedout
        num_requests = IMPATIENT.num_api_connections * (2 if wait_for == "its turn" else 1)
        for _ in range(10):
            async with no_event_can_be_recorded(stack):
                requests = [
                    asyncio.create_task(running.api.post("/v1/jobs", json=GOOD_JOB)) for _ in range(num_requests)
                ]
                await eventually(lambda: in_use() == IMPATIENT.num_api_connections, "all connections to be in use")
                for request in reversed(requests):
                    request.cancel()
                await asyncio.wait(requests)
                assert all(request.cancelled() for request in requests)
            await eventually(lambda: is_at_rest(running, stack), "all connections to be given back")
        assert (await running.api.post("/v1/jobs", json=GOOD_JOB)).status_code == 201
        assert len(await running.items("/v1/jobs")) == 1


async def test_requests_that_are_cancelled_at_any_moment_leak_no_connection(running: Running, stack: Stack) -> None:
    for num_turns in range(0, 600, 10):
        request = asyncio.create_task(running.api.post("/v1/jobs", json=GOOD_JOB))
        for _ in range(num_turns):
            await asyncio.sleep(0)  # one turn of the event loop
        request.cancel()
        await asyncio.wait((request,))
    await eventually(lambda: is_at_rest(running, stack), "all connections to be given back")
    assert await is_ready(running)


async def test_clients_that_leave_before_the_answer_leak_no_connection(stack: Stack) -> None:
    async with coordinating(stack, IMPATIENT) as running, served(running) as api:
        in_use = running.coordinator.engine.pool.checkedout
        async with no_event_can_be_recorded(stack):
            requests = [asyncio.create_task(api.post("/v1/jobs", json=GOOD_JOB)) for _ in range(6)]
            await eventually(lambda: in_use() == IMPATIENT.num_api_connections, "all connections to be in use")
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)
        await eventually(lambda: is_at_rest(running, stack), "all connections to be given back")

        async def shown() -> bool:
            return 'gemini_ft_database_connections{state="in_use"} 0.0' in (await api.get("/metrics")).text

        await eventually(shown, "the metrics to show it")
