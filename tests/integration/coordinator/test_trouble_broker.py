"""NATS in trouble: training and reads go on, and a recovery ends when it is over."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from coordinator_cluster import Running, SimulatedCluster, Stack, coordinating, eventually
from tcp_proxy import TcpProxy, proxy_of

from gemini_ft.contracts.messages import Fence
from gemini_ft.contracts.subjects import heartbeat_subject

FLOOD_BYTES = 100 << 20
PIECE_BYTES = 512 << 10


@pytest.fixture
async def to_nats(stack: Stack) -> AsyncIterator[tuple[TcpProxy, Stack]]:
    """A proxy through which a coordinator reaches NATS, and where that is."""
    async with proxy_of(stack.nats.url) as (proxy, url):
        yield proxy, replace(stack, nats_url=url)


async def start_job(running: Running, cluster: SimulatedCluster) -> str:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    return job_id


async def is_ready(running: Running) -> bool:
    return (await running.api.get("/readyz")).status_code == 200


async def recovers(running: Running, cluster: SimulatedCluster, job_id: str) -> None:
    generation = (await running.job(job_id))["generation"]
    await cluster.exit_rank(cluster.agents[0])
    await running.until(job_id, "running", generation + 1, timeout_s=20)
    await eventually(lambda: is_ready(running), "the coordinator to be ready")
    await cluster.goes_on()


async def test_a_partition_is_noticed_and_survived(to_nats: tuple[TcpProxy, Stack], cluster: SimulatedCluster) -> None:
    proxy, stack = to_nats
    async with coordinating(stack) as running:
        job_id = await start_job(running, cluster)
        proxy.hold.clear()  # no connection is closed: it is silence that tells

        async def is_cut_off() -> bool:
            readiness = await running.api.get("/readyz")
            return readiness.status_code == 503 and "is not connected" in readiness.json()["detail"]

        await eventually(is_cut_off, "the partition to be noticed")
        await eventually(lambda: not running.coordinator.leadership.held, "the leader to resign")
        await cluster.goes_on()
        assert (await running.job(job_id))["generation"] == 1
        proxy.hold.set()
        await recovers(running, cluster, job_id)


async def test_a_consumer_that_is_too_slow_is_cut_off_and_comes_back(
    to_nats: tuple[TcpProxy, Stack], cluster: SimulatedCluster
) -> None:
    proxy, stack = to_nats
    async with coordinating(stack) as running:
        job_id = await start_job(running, cluster)
        log = stack.nats.token_file.with_name("nats-server.log")
        num_cuts = log.read_text().count("Slow Consumer")
        proxy.hold.clear()
        flood = await stack.client()
        for _ in range(FLOOD_BYTES // PIECE_BYTES):
            await flood.publish(heartbeat_subject("node-000000000000"), bytes(PIECE_BYTES))
            await flood.flush()
        await flood.close()
        await eventually(lambda: log.read_text().count("Slow Consumer") > num_cuts, "NATS to give the consumer up")
        proxy.hold.set()
        await recovers(running, cluster, job_id)
        reconnects = running.coordinator.metrics.registry.get_sample_value("gemini_ft_nats_reconnects_total")
        assert reconnects is not None
        assert reconnects >= 1


@pytest.mark.parametrize("memory", ["kept", "lost"])
async def test_nats_is_restarted_during_a_recovery(
    running: Running, stack: Stack, cluster: SimulatedCluster, memory: str
) -> None:
    job_id = await start_job(running, cluster)
    cluster.agents[0].deaf_to = (Fence,)
    await cluster.exit_rank(cluster.agents[1])
    await running.until(job_id, "fencing", 2)
    await asyncio.to_thread(stack.nats.kill)
    if memory == "lost":
        shutil.rmtree(stack.nats.token_file.with_name("jetstream"))
    cluster.agents[0].deaf_to = ()
    await asyncio.to_thread(stack.nats.start)
    await running.until(job_id, "running", 2, timeout_s=20)
    await recovers(running, cluster, job_id)
