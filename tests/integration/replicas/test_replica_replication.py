"""Versions go to every holder, byte for byte, and `sealed_everywhere_step` says when."""

from __future__ import annotations

import asyncio

import pytest
from replica_cluster import Cluster, eventually, map_file, shard_bytes

from gemini_ft.contracts.buffer_format import BufferState, ShardBuffer
from gemini_ft.contracts.errors import NotFoundError, ProtocolError
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged

SIZE_BYTES = 300_000


@pytest.mark.parametrize(
    ("num_nodes", "num_ranks_per_node", "num_replicas"), [(2, 1, 2), (4, 1, 2), (4, 2, 3), (1, 2, 1)]
)
async def test_every_holder_gets_every_version_byte_for_byte(
    cluster: Cluster, num_nodes: int, num_ranks_per_node: int, num_replicas: int
) -> None:
    await cluster.start(num_nodes, num_ranks_per_node=num_ranks_per_node, num_replicas=num_replicas)
    await cluster.begin()
    ranks = await cluster.ranks(SIZE_BYTES)
    base_step = None
    for step in range(4):
        for rank in ranks:
            rank.checkpoint(step, shard_bytes(rank.rank, step, SIZE_BYTES), base_step)
        await asyncio.gather(*(rank.sealed_everywhere(step) for rank in ranks))
        for rank in ranks:
            slot = rank.rank // num_ranks_per_node
            for holder in (f"node-{(slot + i) % num_nodes}" for i in range(num_replicas)):
                assert cluster.copy_at(holder, rank.rank, step) == shard_bytes(rank.rank, step, SIZE_BYTES)
        base_step = step
    assert all(node.service.status().redundancy_whole for node in cluster.nodes.values())


async def test_a_version_is_replicated_while_it_is_still_being_staged(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    data = shard_bytes(0, 0, SIZE_BYTES)
    index = rank.begin(0, data, None)
    num_chunks = rank.buffers[index].header().num_chunks
    for chunk in range(num_chunks - 1):
        rank.stage(0, data, index, chunk, chunk + 1)
    holder = ShardBuffer.open(map_file(cluster.nodes["node-1"].folder / "rank0.0"))
    await eventually(
        "all but the last chunk to be at the holder, before the version is sealed anywhere",
        lambda: holder.chunk_digest(num_chunks - 2) == rank.buffers[index].chunk_digest(num_chunks - 2),
    )
    assert holder.header().state is BufferState.FILLING
    assert rank.page.sealed_everywhere_step is None
    rank.stage(0, data, index, num_chunks - 1, num_chunks)
    rank.seal(0, index)
    await rank.sealed_everywhere(0)
    assert cluster.copy_at("node-1", 0, 0) == data


async def test_the_base_is_kept_on_every_side_until_the_next_version_is_sealed(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    for step, base_step in ((0, None), (1, 0), (2, 1)):
        data = shard_bytes(0, step, SIZE_BYTES)
        index = rank.begin(step, data, base_step)
        if base_step is not None:
            for name in ("node-0", "node-1"):
                assert cluster.copy_at(name, 0, base_step) == shard_bytes(0, base_step, SIZE_BYTES)
        rank.stage(step, data, index, 0, rank.buffers[index].header().num_chunks)
        rank.seal(step, index)
        await rank.sealed_everywhere(step)


async def test_memory_stays_within_twice_m_shards_and_five_percent(cluster: Cluster) -> None:
    size_bytes = 4_000_000
    await cluster.start(3, num_replicas=3)
    await cluster.begin()
    ranks = await cluster.ranks(size_bytes)
    for rank in ranks:
        rank.checkpoint(0, shard_bytes(rank.rank, 0, size_bytes), None)
    await asyncio.gather(*(rank.sealed_everywhere(0) for rank in ranks))
    for node in cluster.nodes.values():
        used_bytes = sum(path.stat().st_blocks * 512 for path in node.settings.memory_dir.rglob("*"))
        assert 2 * 3 * size_bytes <= used_bytes <= 1.05 * 2 * 3 * size_bytes
        status = node.service.status()
        assert status.used_bytes <= used_bytes <= status.capacity_bytes


async def test_replication_is_unhealthy_while_a_holder_is_away_and_catches_up_when_it_is_back(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    assert rank.page.replication_healthy
    holder = cluster.nodes["node-1"]
    await holder.service.close()
    await eventually("the loss of the holder to be seen", lambda: not rank.page.replication_healthy)
    assert not cluster.nodes["node-0"].service.status().redundancy_whole
    rank.checkpoint(1, shard_bytes(0, 1, SIZE_BYTES), 0)
    # The agent comes back, adopts its memory and listens on another port; the coordinator repeats the plan with it.
    await holder.start_agent()
    plan = cluster.plan
    assert plan is not None
    plan = plan.model_copy(update={"addresses": plan.addresses | {"node-1": holder.address}})
    for node in cluster.nodes.values():
        await node.service.assign(plan)
    await rank.sealed_everywhere(1)
    assert rank.page.replication_healthy
    assert cluster.copy_at("node-1", 0, 1) == shard_bytes(0, 1, SIZE_BYTES)


async def test_closing_the_job_frees_all_memory(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    ranks = await cluster.ranks(SIZE_BYTES)
    for rank in ranks:
        rank.checkpoint(0, shard_bytes(rank.rank, 0, SIZE_BYTES), None)
    for node in cluster.nodes.values():
        await node.service.close_job()
        assert list(node.settings.memory_dir.iterdir()) == []
        with pytest.raises(NotFoundError):
            await node.service.fence(2)


async def test_messages_of_a_rank_that_contradict_its_buffer_are_refused(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    (rank,) = await cluster.ranks(SIZE_BYTES)
    service = rank.service
    with pytest.raises(ProtocolError, match="header says otherwise"):
        service.fill_begun(FillBegun(generation=1, rank=0, step=3, buffer=0, data_bytes=10, base_step=None))
    with pytest.raises(ProtocolError, match="not begun to fill"):
        service.staged(Staged(generation=1, rank=0, step=3, num_chunks=1))
    rank.begin(3, b"x" * 100, None)
    with pytest.raises(ProtocolError, match="no buffer of it is"):
        service.sealed(Sealed(generation=1, rank=0, step=3, shard_digest="0" * 32))
    with pytest.raises(NotFoundError):
        service.fill_begun(FillBegun(generation=1, rank=7, step=3, buffer=0, data_bytes=10, base_step=None))
