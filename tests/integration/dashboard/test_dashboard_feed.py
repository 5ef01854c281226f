"""The feed against a real coordinator: it is live, grows old, comes back, and ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

import pytest
from coordinator_cluster import API_TOKEN, Running, SimulatedCluster, eventually
from served_api import new_token, served
from tcp_proxy import TcpProxy, proxy_of

from gemini_ft.client.api_client import AsyncApiClient
from gemini_ft.dashboard.feed import Feed, Feeds


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def served_at(running: Running) -> AsyncIterator[tuple[TcpProxy, str]]:
    async with served(running) as api, proxy_of(str(api.base_url).rstrip("/")) as found:
        yield found


@pytest.fixture
def connect(served_at: tuple[TcpProxy, str]) -> Callable[[str], AsyncApiClient]:
    return lambda token: AsyncApiClient(served_at[1], token, patience=timedelta(0))


@asynccontextmanager
async def running_feed(feed: Feed) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(feed.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_job_is_seen_from_its_creation_to_its_steps(
    connect: Callable[[str], AsyncApiClient], running: Running, cluster: SimulatedCluster
) -> None:
    feed = Feed(connect(API_TOKEN))
    async with running_feed(feed):
        await cluster.add(3, rack="r1")
        job_id = await running.create(num_nodes=2)
        feed.learn(job_id)
        await eventually(lambda: any(event.kind == "job_running" for event in feed.state.events), "the event")
        await eventually(lambda: feed.state.samples(job_id), "the job")
        await eventually(lambda: (feed.state.samples(job_id)[-1].committed_step or 0) > 3, "steps")
        assert [node.slot for node in feed.state.members(job_id)] == [0, 1]
        kinds = [event.kind for event in feed.state.events_of(job_id) or ()]
        assert kinds[0] == "job_created"
        assert kinds.count("job_running") == 1
        assert feed.state.cluster is not None
        assert feed.state.cluster.caller is not None
        assert feed.state.cluster.caller.name == "bootstrap"


async def test_what_happens_while_the_api_is_away_is_heard_when_it_is_back(
    served_at: tuple[TcpProxy, str], connect: Callable[[str], AsyncApiClient], running: Running
) -> None:
    proxy, feed = served_at[0], Feed(connect(API_TOKEN))
    async with running_feed(feed):
        await running.create(num_nodes=2)
        await eventually(lambda: feed.state.jobs and feed.state.events, "the first answers")
        proxy.hold.clear()
        await eventually(lambda: feed.state.freshness(time.monotonic()).why, "a failed reading", 20)
        job_id = await running.create(num_nodes=2)
        proxy.hold.set()
        await eventually(lambda: job_id in feed.state.jobs, "the new job")
        await eventually(lambda: [e for e in feed.state.events if e.job_id == job_id], "its event", 20)
        assert not feed.state.freshness(time.monotonic()).is_stale
        ids = [event.id for event in feed.state.events]
        assert ids == list(range(ids[0], ids[-1] + 1))


async def test_a_feed_ends_when_nobody_looks(connect: Callable[[str], AsyncApiClient]) -> None:
    clock = Clock()
    feed = Feed(connect(API_TOKEN), clock)
    async with running_feed(feed) as task:
        await eventually(lambda: feed.state.cluster, "an answer")
        feed.hurry()
        clock.now_s += 61
        await eventually(task.done, "the feed to end")
        task.result()


async def test_a_revoked_token_is_refused_until_somebody_logs_in_with_it_again(
    connect: Callable[[str], AsyncApiClient], running: Running
) -> None:
    token = await new_token(running, "somebody", "viewer")
    feeds = Feeds(connect)
    try:
        feed = feeds.of(token)
        assert feeds.of(token) is feed
        await eventually(lambda: feed.state.cluster, "an answer")
        (known,) = await running.items("/v1/tokens")
        assert (await running.api.delete(f"/v1/tokens/{known['token_id']}")).status_code == 204
        await eventually(lambda: feeds.is_refused(token), "the refusal")
        assert "revoked" in feed.state.refusal
        assert feeds.of(token) is feed
        feeds.forget_refusal(token)
        assert feeds.of(token) is not feed
    finally:
        await feeds.close()
