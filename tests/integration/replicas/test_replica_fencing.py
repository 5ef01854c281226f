"""A write of an old generation changes nothing, wherever it arrives."""

from __future__ import annotations

import asyncio
import fcntl

import pytest
from replica_cluster import JOB_ID, PATIENCE, Cluster, eventually, flip_bit, map_file, shard_bytes
from tcp_proxy import TcpProxy

from gemini_ft.agent.replicas.challenge import Credentials
from gemini_ft.agent.replicas.job import Job
from gemini_ft.agent.replicas.peers import ask, open_connection, receive_answer
from gemini_ft.agent.replicas.store import ReplicaStore
from gemini_ft.contracts.buffer_format import BufferState, ShardBuffer, digest
from gemini_ft.contracts.data_protocol import Begin, Chunk, Holdings, HoldingsReply, Refused, Seal
from gemini_ft.contracts.errors import ConflictError, FencedError, UnavailableError, from_wire
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged

SIZE_BYTES = 100_000


def peer(cluster: Cluster, node_id: str) -> Job:
    """What the agent `node_id` knows, for a test that speaks on the data plane in its name."""
    node = cluster.nodes[node_id]
    store = ReplicaStore(node.settings.memory_dir, JOB_ID, None)
    return Job(Credentials(JOB_ID, cluster.job_key, node_id, new_incarnation()), node.spec, store, plan=cluster.plan)


def begin_message(generation: int, step: int, size_bytes: int = 8192, rank: int = 0) -> Begin:
    return Begin(
        generation=generation,
        rank=rank,
        world_size=2,
        step=step,
        version_generation=generation,
        data_bytes=size_bytes,
        chunk_bytes=4096,
        manifest_capacity_bytes=4096,
        base_step=None,
    )


def chunk_message(generation: int, step: int, index: int, data: bytes) -> Chunk:
    return Chunk(generation=generation, rank=0, step=step, index=index, chunk_digest=digest(data).hex())


async def test_a_fence_takes_effect_in_the_middle_of_a_version_on_an_open_connection(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    old = peer(cluster, "node-0")
    async with open_connection(old, "node-1", cluster.nodes["node-0"].settings) as connection:
        await connection.send(begin_message(1, 7))
        await connection.send(chunk_message(1, 7, 0, b"a" * 4096), b"a" * 4096)
        holder = cluster.nodes["node-1"]
        await eventually("the version to begin", lambda: (holder.folder / "rank0.0").exists())
        await holder.service.fence(2)
        await connection.send(chunk_message(1, 7, 1, b"b" * 4096), b"b" * 4096)
        await connection.send(Seal(generation=1, rank=0, step=7, shard_digest="0" * 32), b"{}")
        answer = await receive_answer(connection)
        assert isinstance(answer, Refused)
        error = from_wire(answer.error)
        assert isinstance(error, FencedError)
        assert (error.generation, error.current_generation) == (1, 2)
        # One refusal for the whole version; the connection is still good for another question, and still fenced.
        with pytest.raises(FencedError):
            await ask(connection, Holdings(generation=1, rank=0))
        answer = await ask(connection, Holdings(generation=2, rank=0))
        assert isinstance(answer, HoldingsReply)
        assert answer.held == ()


async def test_a_version_half_received_is_taken_over_by_the_new_generation(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    old = peer(cluster, "node-0")
    async with open_connection(old, "node-1", cluster.nodes["node-0"].settings) as connection:
        await connection.send(begin_message(1, 7, SIZE_BYTES))
        await connection.send(chunk_message(1, 7, 0, b"a" * 4096), b"a" * 2048)  # half of it, announced as a whole
        await eventually("the version to begin", lambda: cluster.nodes["node-1"].files == ["rank0.0", "rank0.1"])
        await cluster.begin()
        rank = cluster.rank(0)
        await rank.reserve(SIZE_BYTES)
        data = shard_bytes(0, 0, SIZE_BYTES)
        rank.checkpoint(0, data, None)
        await rank.sealed_everywhere(0)
        rank.checkpoint(1, data[::-1], 0)
        await rank.sealed_everywhere(1)
        assert cluster.copy_at("node-1", 0, 0) == data
        assert cluster.copy_at("node-1", 0, 1) == data[::-1]


async def test_messages_before_the_fence_or_the_plan_are_put_off(cluster: Cluster) -> None:
    await cluster.start(2)
    node = cluster.nodes["node-1"]
    await cluster.fence()
    owner = peer(cluster, "node-0")
    plan = await cluster.assign(None, only=("node-0",))
    owner.plan = plan
    async with open_connection(owner, "node-1", node.settings) as connection:
        await connection.send(begin_message(1, 0))
        answer = await receive_answer(connection)
        assert isinstance(answer, Refused)
        assert isinstance(from_wire(answer.error), UnavailableError)
        with pytest.raises(UnavailableError, match="knows of generation 1"):
            await ask(connection, Holdings(generation=2, rank=0))


async def test_only_the_owner_writes_and_only_to_its_holders(cluster: Cluster) -> None:
    await cluster.start(3)
    await cluster.begin()
    for writer, holder, rank, sentence in [
        ("node-2", "node-1", 0, "belongs to node-0"),
        ("node-0", "node-2", 0, "does not hold"),
        ("node-0", "node-1", 99, "belongs to None"),
    ]:
        async with open_connection(peer(cluster, writer), holder, cluster.nodes[writer].settings) as connection:
            await connection.send(begin_message(1, 0, rank=rank))
            answer = await receive_answer(connection)
            assert isinstance(answer, Refused)
            error = from_wire(answer.error)
            assert isinstance(error, ConflictError)
            assert sentence in str(error)
    assert [node.files for node in cluster.nodes.values()] == [[], [], []]


async def test_messages_of_an_old_rank_are_refused(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    (rank,) = await cluster.ranks(SIZE_BYTES)
    index = rank.begin(0, b"x" * 100, None)
    await rank.service.fence(2)
    with pytest.raises(FencedError):
        rank.stage(0, b"x" * 100, index, 0, 1)
    with pytest.raises(FencedError):
        rank.seal(0, index)
    with pytest.raises(FencedError):
        rank.service.fill_begun(FillBegun(generation=1, rank=0, step=0, buffer=0, data_bytes=100, base_step=None))
    with pytest.raises(FencedError):
        rank.service.open_rank(0, 1)
    with pytest.raises(FencedError):
        rank.service.staged(Staged(generation=1, rank=0, step=0, num_chunks=1))
    with pytest.raises(FencedError):
        rank.service.sealed(Sealed(generation=1, rank=0, step=0, shard_digest="0" * 32))
    with pytest.raises(FencedError):
        await rank.service.fence(1)
    assert cluster.plan is not None
    with pytest.raises(FencedError):
        await rank.service.assign(cluster.plan)


async def test_those_who_wait_are_woken_by_the_fence(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    waiting = [
        asyncio.ensure_future(cluster.nodes[name].service.store_address(1, PATIENCE)) for name in ("node-0", "node-1")
    ]
    await asyncio.sleep(0)
    await cluster.fence()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, FencedError)


async def test_a_zombie_with_the_old_mapping_touches_no_file_of_the_new_generation(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    zombie, _ = await cluster.ranks(SIZE_BYTES)
    data = shard_bytes(0, 0, SIZE_BYTES)
    zombie.checkpoint(0, data, None)
    await zombie.sealed_everywhere(0)
    old_page = zombie.page
    # It is not ended: its locks are still held when the next generation begins.
    await cluster.begin(restore_step=0)
    rank = cluster.rank(0)
    await rank.reserve(SIZE_BYTES)
    copy, restored = await rank.restored_bytes()
    assert (copy.source, restored) == ("local", data)
    for buffer in zombie.buffers:
        buffer.begin(JOB_ID, 1, 0, 2, 66, SIZE_BYTES)
        buffer.data(SIZE_BYTES)[:] = b"z" * SIZE_BYTES
        buffer.seal(b"zombie")
    assert (await rank.restored_bytes())[1] == data
    assert {
        ShardBuffer.open(map_file(path)).header().step for path in cluster.nodes["node-0"].folder.glob("rank0.?")
    } == {0}
    rank.checkpoint(1, data[::-1], 0)
    await rank.sealed_everywhere(1)
    # Nor does it see, on the page of its own generation, anything of the new one.
    assert old_page.sealed_everywhere_step == 0


async def test_a_zombie_that_writes_while_its_copy_is_saved_makes_a_damaged_copy_and_no_false_one(
    cluster: Cluster,
) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    (zombie,) = await cluster.ranks(SIZE_BYTES)
    zombie.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    flip_bit(cluster.nodes["node-0"].folder, 0, 0)
    copies = (await cluster.fence())["node-0"]
    assert copies.held == ()
    assert "rank 0 at step 0" in copies.damaged[0]


async def test_fencing_twice_to_one_generation_gives_one_answer_and_disturbs_nothing(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    (rank,) = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    rank.die()
    service = cluster.nodes["node-0"].service
    first = await service.fence(2)
    assert [(held.rank, held.step, held.generation) for held in first.held] == [(0, 0, 1)]
    assert await service.fence(2) == first


async def test_a_lock_is_what_makes_a_buffer_alive(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    (rank,) = await cluster.ranks(SIZE_BYTES)
    path = cluster.nodes["node-0"].folder / "rank0.0"
    inode = path.stat().st_ino
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        await rank.service.fence(2)
    assert path.stat().st_ino != inode
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    inode = path.stat().st_ino
    rank.die()
    await rank.service.fence(3)
    assert path.stat().st_ino == inode


async def test_a_connection_held_up_by_the_network_writes_nothing_after_the_fence(cluster: Cluster) -> None:
    await cluster.start(2)
    proxy = TcpProxy(cluster.nodes["node-1"].address)
    cluster.addresses["node-1"] = await proxy.start()
    try:
        await cluster.begin()
        rank, _ = await cluster.ranks(SIZE_BYTES)
        data = shard_bytes(0, 0, SIZE_BYTES)
        rank.checkpoint(0, data, None)
        await rank.sealed_everywhere(0)
        proxy.hold.clear()
        rank.checkpoint(1, data[::-1], 0)
        await cluster.nodes["node-1"].service.fence(2)
        proxy.hold.set()
        await eventually("the link to end", lambda: not rank.page.replication_healthy)
        header = [ShardBuffer.open(map_file(path)).header() for path in cluster.nodes["node-1"].folder.glob("rank0.?")]
        assert [h.step for h in header if h.state is BufferState.SEALED] == [0]
        assert rank.page.sealed_everywhere_step == 0
    finally:
        await proxy.close()
