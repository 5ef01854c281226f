"""What the network does to bytes is noticed, and repaired by sending them again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from replica_cluster import PATIENCE, Cluster, eventually, shard_bytes
from tcp_proxy import TcpProxy

from gemini_ft.faults import FAULT_POINTS, arm

SIZE_BYTES = 300_000

ProxyFactory = Callable[..., Awaitable[TcpProxy]]


@pytest.fixture
async def proxy_to(cluster: Cluster) -> AsyncIterator[ProxyFactory]:
    proxies = []

    async def make(name: str, *, toward_client: bool = False) -> TcpProxy:
        proxy = TcpProxy(cluster.nodes[name].address, toward_client=toward_client)
        cluster.addresses[name] = await proxy.start()
        proxies.append(proxy)
        return proxy

    yield make
    for proxy in proxies:
        await proxy.close()


@pytest.mark.parametrize("offset", [10_000, 150_000, 299_000])
async def test_a_bit_flipped_on_the_wire_is_refused_and_the_version_sent_again(
    cluster: Cluster, proxy_to: ProxyFactory, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    await cluster.start(2)
    proxy = await proxy_to("node-1")
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    proxy.flip_at = offset
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    assert proxy.flip_at is None
    assert "damaged on its way" in caplog.text or "does not match its digest" in caplog.text
    assert cluster.copy_at("node-1", 0, 0) == shard_bytes(0, 0, SIZE_BYTES)


@pytest.mark.parametrize("offset", [1_000, 150_000, 305_000])
async def test_a_connection_cut_anywhere_is_made_again(cluster: Cluster, proxy_to: ProxyFactory, offset: int) -> None:
    await cluster.start(2)
    proxy = await proxy_to("node-1")
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    num_connections = proxy.num_connections
    proxy.cut_at = offset
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    assert proxy.num_connections > num_connections
    assert cluster.copy_at("node-1", 0, 0) == shard_bytes(0, 0, SIZE_BYTES)


async def test_an_acknowledgement_that_is_lost_is_found_out_by_asking(cluster: Cluster, proxy_to: ProxyFactory) -> None:
    await cluster.start(2)
    proxy = await proxy_to("node-1", toward_client=True)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    # The next bytes from the holder on the open connection are the acknowledgement of step 1: they never arrive.
    proxy.cut_at = 1
    rank.checkpoint(1, shard_bytes(0, 1, SIZE_BYTES), 0)
    await rank.sealed_everywhere(1)
    for step in (0, 1):
        assert cluster.copy_at("node-1", 0, step) == shard_bytes(0, step, SIZE_BYTES)


@pytest.mark.parametrize("offset", [5_000, 200_000])
async def test_a_bit_flipped_while_a_shard_is_fetched_is_noticed_and_the_fetch_repeated(
    cluster: Cluster, proxy_to: ProxyFactory, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    await cluster.start(2, num_standbys=1)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    rank.die()
    cluster.slots[0] = "node-2"
    proxy = await proxy_to("node-1", toward_client=True)
    proxy.flip_at = offset
    await cluster.begin(restore_step=0, lost=("node-0",))
    fetched = cluster.rank(0)
    copy = await fetched.service.restorable_copy(0, PATIENCE)
    assert (copy.step, copy.source) == (0, "peer")
    assert proxy.flip_at is None
    assert cluster.copy_at("node-2", 0, 0) == shard_bytes(0, 0, SIZE_BYTES)


async def test_bytes_that_rot_before_they_are_sent_never_become_a_copy(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    data = shard_bytes(0, 1, SIZE_BYTES)
    index = rank.begin(1, data, 0)
    num_chunks = rank.buffers[index].header().num_chunks
    rank.copy_in(data, index, 0, num_chunks)
    rank.buffers[index].chunk(2, SIZE_BYTES)[7] ^= 1
    rank.stage(1, data, index, num_chunks, num_chunks)
    rank.seal(1, index)
    await eventually("the damage to be found here", lambda: "the local copy is damaged: chunk 2" in caplog.text)
    assert rank.page.damaged_step == 1
    assert rank.page.sealed_everywhere_step == 0
    assert cluster.copy_at("node-1", 0, 0) == shard_bytes(0, 0, SIZE_BYTES)
    assert cluster.copy_at("node-1", 0, 1) is None


@pytest.mark.parametrize(
    "point", sorted(p for p in FAULT_POINTS if p.startswith(("sender.", "receiver.", "holder.", "owner.before_ack")))
)
async def test_an_error_anywhere_in_a_transfer_is_got_over(cluster: Cluster, point: str) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    arm(f"{point}=raise")
    try:
        for step, base_step in ((0, None), (1, 0)):
            rank.checkpoint(step, shard_bytes(0, step, SIZE_BYTES), base_step)
            await rank.sealed_everywhere(step)
            assert cluster.copy_at("node-1", 0, step) == shard_bytes(0, step, SIZE_BYTES)
    finally:
        arm(None)
