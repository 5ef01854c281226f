"""The plain and the async client against a real coordinator, over real connections that break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest
from coordinator_cluster import API_TOKEN, Running, SimulatedCluster, eventually
from served_api import served
from simulated_logs import answering_for_logs
from tcp_proxy import TcpProxy

from gemini_ft.client.api_client import ApiClient, AsyncApiClient
from gemini_ft.contracts.api import EventModel, JobPhase, LogModel, NodeStatus, Role
from gemini_ft.contracts.errors import (
    AuthenticationError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    PreconditionFailedError,
    UnavailableError,
)
from gemini_ft.contracts.messages import Address, JobSpec
from gemini_ft.coordinator.api.streams import Streams
from gemini_ft.localstack._ports import ReservedPort

NUM_STREAMS = 6
SPEC = JobSpec(name="job", num_nodes=2, num_ranks_per_node=1)


@pytest.fixture
def streams() -> Streams:
    return Streams(num_a_token=NUM_STREAMS)


@pytest.fixture
async def proxied(running: Running, streams: Streams) -> AsyncIterator[tuple[TcpProxy, str]]:
    """What stands between the clients and the API and can cut its answers, and its URL."""
    async with served(running, streams) as api:
        found = TcpProxy(Address(host="127.0.0.1", port=api.base_url.port or 0), toward_client=True)
        address = await found.start()
        yield found, f"http://{address.host}:{address.port}"
        await found.close()


@pytest.fixture
def proxy(proxied: tuple[TcpProxy, str]) -> TcpProxy:
    return proxied[0]


@pytest.fixture
def url(proxied: tuple[TcpProxy, str]) -> str:
    return proxied[1]


@pytest.fixture
async def api(url: str) -> AsyncIterator[AsyncApiClient]:
    async with AsyncApiClient(url, API_TOKEN) as client:
        yield client


@pytest.fixture
async def plain(url: str) -> AsyncIterator[ApiClient]:
    """Its methods block, so they are called in threads."""
    with ApiClient(url, API_TOKEN) as client:
        yield client


async def test_a_job_from_its_birth_to_its_end(plain: ApiClient, running: Running, cluster: SimulatedCluster) -> None:
    agents = await cluster.add(3)

    def life() -> None:
        job_id = plain.create_job(SPEC).job_id
        assert plain.job(job_id).spec == SPEC
        until(lambda: plain.job(job_id).phase is JobPhase.RUNNING)
        until(lambda: (plain.job(job_id).committed_step or 0) > 2)
        plain.checkpoint_job(job_id)
        assert [rank.rank for rank in plain.ranks(job_id, page_size=1)] == [0, 1]
        assert set(plain.placement(job_id).slots) == {0, 1}
        until(lambda: len(list(plain.versions(job_id, page_size=1))) > 1)
        step = next(plain.versions(job_id)).step
        assert plain.version(job_id, step).is_committed
        plain.stop_job(job_id)
        until(lambda: plain.job(job_id).phase is JobPhase.SUSPENDED)
        plain.resume_job(job_id)
        until(lambda: plain.job(job_id).phase is JobPhase.RUNNING)
        (recovery,) = plain.recoveries(job_id)
        assert plain.recovery(job_id, recovery.generation).num_steps_lost == 0
        plain.stop_job(job_id, now=True)
        plain.delete_job(job_id)
        with pytest.raises(NotFoundError, match=f"there is no job {job_id}"):
            plain.job(job_id)

    def until(condition: Callable[[], bool]) -> None:
        asyncio.run_coroutine_threadsafe(soon(condition), loop).result()

    async def soon(condition: Callable[[], bool]) -> None:
        async def holds() -> bool:
            return await asyncio.to_thread(condition)

        await eventually(holds, "the job to get there")

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(life)
    await eventually(lambda: all(agent.job is None for agent in agents), "the nodes to be free")


async def test_nodes_are_found_by_label_and_changed_only_as_they_were_seen(
    api: AsyncApiClient, cluster: SimulatedCluster
) -> None:
    await cluster.add(2, rack="r1")
    await cluster.add(1, rack="r2")
    nodes = [node async for node in api.nodes(status=NodeStatus.ALIVE, labels={"rack": "r1"}, page_size=1)]
    assert len(nodes) == 2
    node, etag = await api.node_and_etag(nodes[0].node_id)
    await api.relabel_node(node.node_id, {"rack": "r2"}, if_match=etag)
    with pytest.raises(PreconditionFailedError, match="it has changed; read it again"):
        await api.cordon_node(node.node_id, if_match=etag)
    assert (await api.cordon_node(node.node_id)).cordoned
    assert (await api.drain_node(node.node_id)).draining
    assert not (await api.uncordon_node(node.node_id)).cordoned
    assert (await api.cluster()).num_nodes == 3
    await api.remove_node(node.node_id)
    assert (await api.cluster()).num_nodes == 2


async def test_tokens_are_made_used_and_revoked(api: AsyncApiClient, url: str) -> None:
    made = await api.create_token("viewer", Role.VIEWER, lifetime=timedelta(hours=1))
    assert made.token is not None
    async with AsyncApiClient(url, made.token) as viewer:
        assert (await viewer.cluster()).is_leader
        with pytest.raises(ForbiddenError, match="is a viewer's"):
            await viewer.create_job(SPEC)
        await api.revoke_token(made.token_id)
        with pytest.raises(AuthenticationError, match="wrong, expired or revoked"):
            await viewer.cluster()
    assert [token.name async for token in api.tokens()] == ["viewer"]
    assert (await api.health()).status == "ok"
    assert (await api.readiness()).leader


async def test_a_post_whose_answer_was_cut_off_is_done_once(
    api: AsyncApiClient, plain: ApiClient, proxy: TcpProxy
) -> None:
    for create in (api.create_job, lambda spec: asyncio.to_thread(plain.create_job, spec)):
        before = len([job async for job in api.jobs()])
        num_connections = proxy.num_connections
        proxy.cut_at = 0
        job = await create(SPEC)
        assert proxy.num_connections > num_connections
        jobs = [found async for found in api.jobs()]
        assert (len(jobs), jobs[0].job_id) == (before + 1, job.job_id)


async def test_what_must_not_be_done_twice_is_not_repeated(api: AsyncApiClient, proxy: TcpProxy) -> None:
    job = await api.create_job(SPEC)
    proxy.cut_at = 0
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await api.delete_job(job.job_id)
    with pytest.raises(NotFoundError):
        await api.job(job.job_id)


async def test_a_refusal_is_not_repeated_and_silence_is_told(api: AsyncApiClient, running: Running) -> None:
    job_id = await running.create(num_nodes=2)
    with pytest.raises(ConflictError, match="not suspended"):
        await api.resume_job(job_id)
    nobody = ReservedPort()
    async with AsyncApiClient(f"http://{nobody.address}", API_TOKEN, patience=timedelta(seconds=0.5)) as hasty:
        with pytest.raises(UnavailableError, match=f"the API at http://{nobody.address} cannot be reached"):
            await hasty.jobs().__anext__()
    nobody.release()


async def test_no_event_is_missed_or_seen_twice_when_streams_break(
    api: AsyncApiClient, plain: ApiClient, proxy: TcpProxy, running: Running
) -> None:
    seen: list[EventModel] = []
    seen_by_plain: list[EventModel] = []

    async def follow() -> None:
        async with contextlib.aclosing(api.follow_events()) as events:
            async for event in events:
                seen.append(event)

    def follow_plainly() -> None:
        for event in plain.follow_events(after=0):
            seen_by_plain.append(event)
            if event.message == "bootstrap: create job 'the last'":
                return

    await running.create(num_nodes=2)
    following = asyncio.create_task(follow())
    plainly = asyncio.create_task(asyncio.to_thread(follow_plainly))
    await eventually(lambda: seen_by_plain and proxy.num_connections == 2, "both to follow")
    await eventually(
        lambda: len(proxy.recorded) == 2 and all(b": ping" in one for one in proxy.recorded), "the streams"
    )
    for number in range(4):
        proxy.cut_at = 0
        await running.create(num_nodes=2, name=f"job {number}")
        await eventually(lambda: proxy.cut_at is None, "a stream to be cut")
    await running.create(num_nodes=2, name="the last")
    await plainly
    everything = [event async for event in api.events(page_size=3)]
    await eventually(lambda: seen and seen[-1].id == everything[-1].id, "the async client to catch up")
    following.cancel()
    await asyncio.wait((following,))
    assert seen_by_plain == everything
    assert seen == everything[-len(seen) :]
    assert len(seen) >= len(everything) - 4, "only what came before the stream began is missing"


async def test_a_log_is_followed_over_broken_streams_until_the_job_ends(
    api: AsyncApiClient, streams: Streams, proxy: TcpProxy, running: Running, cluster: SimulatedCluster
) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    parts: list[LogModel] = []

    async def follow() -> None:
        async for part in api.follow_log(job_id, 1):
            parts.append(part)

    def text() -> str:
        return "".join(part.text for part in parts)

    async with answering_for_logs(cluster) as logs:
        logs.written[1, 1] = b"one\n"
        assert (await api.log(job_id, 1)).text == "one\n"
        following = asyncio.create_task(follow())
        await eventually(lambda: text() == "one\n", "the first line")
        proxy.cut_at = 0
        logs.written[1, 1] += "two\N{LINE SEPARATOR}\n".encode()
        await eventually(lambda: text() == "one\ntwo\N{LINE SEPARATOR}\n", "the second line")
        streams.end()
        await eventually(lambda: streams.num_open == 0, "the stream to be ended in good order")
        logs.written[1, 1] += b"three\n"
        streams.ended = False
        await eventually(lambda: text().endswith("three\n"), "the third line")
        await api.stop_job(job_id, now=True)
        async with asyncio.timeout(10):
            await following
    assert text() == "one\ntwo\N{LINE SEPARATOR}\nthree\n"


async def test_a_full_coordinator_is_waited_for(api: AsyncApiClient, proxy: TcpProxy, running: Running) -> None:
    await running.create(num_nodes=2)
    async with contextlib.AsyncExitStack() as exits:
        streams = [
            await exits.enter_async_context(contextlib.aclosing(api.follow_events(after=0)))
            for _ in range(NUM_STREAMS + 1)
        ]
        *taken, last = streams
        for stream in taken:
            await stream.__anext__()
        waiting = asyncio.create_task(last.__anext__())
        await eventually(lambda: any(b" 429 " in answer for answer in proxy.recorded), "the last to be refused")
        await taken[0].aclose()
        async with asyncio.timeout(20):
            assert (await waiting).id
