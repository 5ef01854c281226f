"""Agents come and go; the memory stays, nothing leaks, and what was begun is brought to its end."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

import pytest
from replica_cluster import JOB_ID, Cluster, eventually, flip_bit, map_file, shard_bytes
from tcp_proxy import TcpProxy

from gemini_ft.agent.replicas.service import LocalReplicaService
from gemini_ft.contracts.buffer_format import BufferGeometry, BufferState, ShardBuffer
from gemini_ft.contracts.errors import ConfigurationError, ConflictError, NoVersionError
from gemini_ft.contracts.ids import new_incarnation

SIZE_BYTES = 400_000


async def restart(cluster: Cluster, name: str) -> None:
    """End an agent without a word to anybody, start it again, and repeat the plan to all."""
    node = cluster.nodes[name]
    await node.service.close()
    await node.start_agent()
    await repeat_plan(cluster)


async def repeat_plan(cluster: Cluster) -> None:
    assert cluster.plan is not None
    addresses = {name: cluster.addresses.get(name, node.address) for name, node in cluster.nodes.items()}
    cluster.plan = cluster.plan.model_copy(update={"addresses": addresses})
    for node in cluster.nodes.values():
        await node.service.assign(cluster.plan)


async def test_a_restarted_owner_finishes_the_replication_of_what_was_sealed(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    holder = cluster.nodes["node-1"]
    await holder.service.close()
    rank.checkpoint(1, shard_bytes(0, 1, SIZE_BYTES), 0)
    await cluster.nodes["node-0"].service.close()
    rank.die()
    for node in cluster.nodes.values():
        await node.start_agent()
    await repeat_plan(cluster)
    await eventually("step 1 to reach the holder", lambda: cluster.copy_at("node-1", 0, 1))
    assert cluster.copy_at("node-1", 0, 1) == shard_bytes(0, 1, SIZE_BYTES)
    assert cluster.copy_at("node-1", 0, 0) == shard_bytes(0, 0, SIZE_BYTES)


async def test_a_rank_that_outlives_its_agent_goes_on_with_the_next_one(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    data = shard_bytes(0, 1, SIZE_BYTES)
    index = rank.begin(1, data, 0)
    rank.stage(1, data, index, 0, 5)
    await restart(cluster, "node-0")
    # The rank comes back with a new hello, and says again what stands.
    rank.come_back(cluster.nodes["node-0"].service)
    assert ShardBuffer.open(map_file(cluster.nodes["node-0"].folder / f"rank0.{index}")).header().step == 1
    rank.announce(1, index, len(data), 0)
    rank.stage(1, data, index, 5, rank.buffers[index].header().num_chunks)
    rank.seal(1, index)
    await rank.sealed_everywhere(1)
    assert cluster.copy_at("node-1", 0, 1) == data


async def test_repeating_what_was_sealed_everywhere_gives_up_no_copy(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    for step, base_step in ((0, None), (1, 0)):
        rank.checkpoint(step, shard_bytes(0, step, SIZE_BYTES), base_step)
        await rank.sealed_everywhere(step)
    inodes = {path.name: path.stat().st_ino for path in cluster.nodes["node-1"].folder.glob("rank0.?")}
    await restart(cluster, "node-0")
    rank.come_back(cluster.nodes["node-0"].service)
    index = next(i for i, buffer in enumerate(rank.buffers) if buffer.header().step == 1)
    rank.announce(1, index, SIZE_BYTES, 0)
    await rank.sealed_everywhere(1)
    for step in (0, 1):
        assert cluster.copy_at("node-1", 0, step) == shard_bytes(0, step, SIZE_BYTES)
    assert inodes == {path.name: path.stat().st_ino for path in cluster.nodes["node-1"].folder.glob("rank0.?")}


async def test_a_plan_repeated_after_a_restart_discards_nothing_of_its_own_generation(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    for rank in await cluster.ranks(SIZE_BYTES):
        rank.checkpoint(0, shard_bytes(rank.rank, 0, SIZE_BYTES), None)
        await rank.sealed_everywhere(0)
        rank.die()
    await cluster.begin(restore_step=0)
    rank, _ = await cluster.ranks(SIZE_BYTES)
    await rank.restored_bytes()
    for step in (1, 2):
        rank.checkpoint(step, shard_bytes(0, step, SIZE_BYTES), step - 1)
        await rank.sealed_everywhere(step)
    await restart(cluster, "node-0")
    for name in ("node-0", "node-1"):
        for step in (1, 2):
            assert cluster.copy_at(name, 0, step) == shard_bytes(0, step, SIZE_BYTES)
    # Its restored version is long overwritten: nothing may be fetched into the buffers of a rank that runs.
    with pytest.raises(NoVersionError, match="has gone on"):
        await cluster.rank(0).restored_bytes()


async def test_a_holder_that_restarts_in_the_middle_gets_the_version_again(cluster: Cluster) -> None:
    await cluster.start(2)
    proxy = TcpProxy(cluster.nodes["node-1"].address)
    cluster.addresses["node-1"] = await proxy.start()
    try:
        await cluster.begin()
        rank, _ = await cluster.ranks(SIZE_BYTES)
        data = shard_bytes(0, 0, SIZE_BYTES)
        index = rank.begin(0, data, None)
        num_chunks = rank.buffers[index].header().num_chunks
        rank.stage(0, data, index, 0, num_chunks // 2)
        buffer = ShardBuffer.open(map_file(cluster.nodes["node-1"].folder / "rank0.0"))
        await eventually("half of the version to arrive", lambda: any(buffer.chunk_digest(num_chunks // 2 - 1)))
        del cluster.addresses["node-1"]
        await restart(cluster, "node-1")
        assert buffer.header().state is BufferState.FILLING
        rank.stage(0, data, index, num_chunks // 2, num_chunks)
        rank.seal(0, index)
        await rank.sealed_everywhere(0)
        assert cluster.copy_at("node-1", 0, 0) == data
    finally:
        await proxy.close()


async def test_a_copy_that_rotted_while_no_agent_ran_is_not_trusted(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    for step, base_step in ((0, None), (1, 0)):
        rank.checkpoint(step, shard_bytes(0, step, SIZE_BYTES), base_step)
        await rank.sealed_everywhere(step)
    await cluster.nodes["node-1"].service.close()
    flip_bit(cluster.nodes["node-1"].folder, 0, 1)
    await cluster.nodes["node-1"].start_agent()
    await repeat_plan(cluster)
    # The owner learns that it is missing, and sends it again.
    await eventually("a good copy to be back", lambda: cluster.nodes["node-0"].service.status().redundancy_whole)
    assert cluster.copy_at("node-1", 0, 1) == shard_bytes(0, 1, SIZE_BYTES)


async def test_fifty_starts_leave_usage_flat_and_every_live_buffer(cluster: Cluster, memory_root: Path) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    (rank,) = await cluster.ranks(SIZE_BYTES)
    data = shard_bytes(0, 0, SIZE_BYTES)
    rank.checkpoint(0, data, None)
    node = cluster.nodes["node-0"]
    files, used_bytes = [name for name in node.files if name.startswith("rank")], node.service.status().used_bytes
    for life in range(50):
        await node.service.close()
        # What agents killed at the worst moments leave behind.
        (node.folder / f"rank{life}.0.new").write_bytes(bytes(10_000))
        (node.folder / f"page.rank0.1.{life}-0").write_bytes(bytes(4096))
        (node.folder / f"rank{life + 1}.1").write_bytes(os.urandom(5000))
        other = memory_root / "node-0" / f"job-{life}"
        other.mkdir()
        (other / "rank0.0").write_bytes(bytes(5000))
        await node.start_agent()
        assert node.files == files
        assert node.service.status().used_bytes == used_bytes
        assert [path.name for path in node.settings.memory_dir.iterdir()] == [JOB_ID]
    assert bytes(rank.buffers[0].data(SIZE_BYTES)) == data
    assert cluster.copy_at("node-0", 0, 0) == data


async def test_a_pair_of_which_one_is_left_is_made_whole(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    (rank,) = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    rank.die()
    node = cluster.nodes["node-0"]
    await node.service.close()
    (node.folder / "rank0.1").unlink()
    await node.start_agent()
    assert node.files == ["rank0.0", "rank0.1"]
    assert cluster.copy_at("node-0", 0, 0) == shard_bytes(0, 0, SIZE_BYTES)


async def test_files_of_another_job_go_unless_a_live_process_locks_them(cluster: Cluster, memory_root: Path) -> None:
    other = memory_root / "node-0" / "job-old"
    other.mkdir(parents=True)
    geometry = BufferGeometry.for_shard(1000, 10)
    for name in ("rank0.0", "rank0.1"):
        (other / name).write_bytes(bytes(geometry.file_bytes))
    with (other / "rank0.0").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        await cluster.start(1, num_replicas=1)
        assert [path.name for path in other.iterdir()] == ["rank0.0"]
    await cluster.nodes["node-0"].service.close()
    await cluster.nodes["node-0"].start_agent()
    assert not other.exists()


async def test_two_agents_cannot_share_one_memory(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    node = cluster.nodes["node-0"]
    second = LocalReplicaService(node.settings)
    with pytest.raises(ConflictError, match="its own memory_dir"):
        await second.open_job(JOB_ID, node.job_key, node.spec, "node-9", new_incarnation())
    await second.close()


async def test_the_former_port_is_taken_again_if_it_is_free(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    node = cluster.nodes["node-0"]
    first, second = LocalReplicaService(node.settings), LocalReplicaService(node.settings)
    address = await first.start(None)
    assert (await second.start(address.port)).port != address.port
    await asyncio.gather(first.close(), second.close())
    third = LocalReplicaService(node.settings)
    assert (await third.start(address.port)).port == address.port
    await third.close()


async def test_a_late_fence_of_the_running_generation_disturbs_no_rank(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    await restart(cluster, "node-0")
    rank.come_back(cluster.nodes["node-0"].service)
    index = rank.begin(1, shard_bytes(0, 1, SIZE_BYTES), 0)
    copies = await cluster.nodes["node-0"].service.fence(1)
    assert [(held.rank, held.step) for held in copies.held] == [(0, 0)]
    rank.stage(1, shard_bytes(0, 1, SIZE_BYTES), index, 0, rank.buffers[index].header().num_chunks)
    rank.seal(1, index)
    await rank.sealed_everywhere(1)


async def test_a_memory_folder_that_is_a_link_is_refused(cluster: Cluster, memory_root: Path) -> None:
    (memory_root / "elsewhere").mkdir()
    (memory_root / "node-0").symlink_to(memory_root / "elsewhere")
    with pytest.raises(ConfigurationError, match="choose one of your own"):
        await cluster.start(1, num_replicas=1)
