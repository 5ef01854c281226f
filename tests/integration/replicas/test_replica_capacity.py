"""Memory is set aside before training, or refused with the number and the knob."""

from __future__ import annotations

import asyncio
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from replica_cluster import PATIENCE, Cluster, eventually, shard_bytes

from gemini_ft.agent.replicas.buffer_file import create_buffer_file
from gemini_ft.contracts.buffer_format import BufferGeometry
from gemini_ft.contracts.errors import CapacityError, WaitTimeoutError

SIZE_BYTES = 1_000_000
PAIR_BYTES = 2 * BufferGeometry.for_shard(SIZE_BYTES, 256).file_bytes


async def test_too_little_memory_here_is_refused_before_anything_is_written(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1, memory_limit_bytes=PAIR_BYTES - 1)
    await cluster.begin()
    with pytest.raises(CapacityError, match=r"node-0: both buffers of rank 0 need \d+ bytes") as error:
        await cluster.rank(0).reserve(SIZE_BYTES)
    assert (error.value.need_bytes, error.value.knob) == (PAIR_BYTES, "memory_limit_bytes")
    assert cluster.nodes["node-0"].service.status().used_bytes == 0
    assert [name for name in cluster.nodes["node-0"].files if name.startswith("rank")] == []


async def test_too_little_memory_on_a_holder_is_refused_with_its_name(cluster: Cluster) -> None:
    await cluster.start(2)
    small = await cluster.add_node("node-2", 3, memory_limit_bytes=PAIR_BYTES + PAIR_BYTES // 2)
    cluster.slots[2] = small.name
    await cluster.begin()
    await cluster.rank(2).reserve(SIZE_BYTES)
    with pytest.raises(CapacityError, match="node-2: both buffers of rank 1") as error:
        await cluster.rank(1).reserve(SIZE_BYTES)
    assert error.value.have_bytes < error.value.need_bytes
    assert [name for name in small.files if name.startswith("rank1")] == []


async def test_more_than_the_tmpfs_has_is_refused_and_nothing_is_left(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    free_bytes = shutil.disk_usage("/dev/shm").free
    with pytest.raises(CapacityError, match=r"rank 0.*has \d+ bytes"):
        await cluster.rank(0).reserve(free_bytes)
    assert [name for name in cluster.nodes["node-0"].files if name.startswith("rank")] == []


def test_a_file_system_that_fills_up_meanwhile_is_no_sigbus(memory_root: Path) -> None:
    # The file system is asked by fallocate itself here, without the check before it.
    geometry = BufferGeometry.for_shard(2 * shutil.disk_usage("/dev/shm").total, 256)
    with pytest.raises(CapacityError, match="enlarge the tmpfs"):
        create_buffer_file(memory_root / "rank0.0", geometry, "job", 0, 1)
    assert list(memory_root.iterdir()) == []


async def test_a_holder_that_does_not_answer_is_named(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    await cluster.nodes["node-1"].service.close()
    with pytest.raises(
        WaitTimeoutError, match=r"node-1 to set memory for a replica of rank 0 aside \(last: node-1 at "
    ):
        await cluster.rank(0).reserve(SIZE_BYTES, timeout=timedelta(milliseconds=300))


async def test_buffers_that_fit_are_kept_and_others_grow_with_what_they_hold(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    data = shard_bytes(0, 0, SIZE_BYTES)
    rank.checkpoint(0, data, None)
    await rank.sealed_everywhere(0)
    rank.die()
    folder = cluster.nodes["node-0"].folder
    inodes = [os.stat(folder / f"rank0.{index}").st_ino for index in range(2)]
    await cluster.begin(restore_step=0)
    same = cluster.rank(0)
    await same.reserve(SIZE_BYTES - 1000)
    assert [os.stat(folder / f"rank0.{index}").st_ino for index in range(2)] == inodes
    same.die()
    await cluster.begin(restore_step=0)
    grown = cluster.rank(0)
    await grown.reserve(3 * SIZE_BYTES)
    assert all(buffer.geometry.capacity_bytes >= 3 * SIZE_BYTES for buffer in grown.buffers)
    assert (await grown.restored_bytes())[1] == data
    await grown.sealed_everywhere(0)
    more = shard_bytes(0, 1, 3 * SIZE_BYTES)
    grown.checkpoint(1, more, 0)
    await grown.sealed_everywhere(1)
    assert (cluster.copy_at("node-1", 0, 0), cluster.copy_at("node-1", 0, 1)) == (data, more)


async def test_a_reservation_that_is_given_up_half_way_can_be_made_again(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    await cluster.begin()
    service = cluster.nodes["node-0"].service
    first = asyncio.ensure_future(service.reserve(0, 1, SIZE_BYTES, 256, PATIENCE))
    await eventually(
        "the allocation to begin", lambda: any(n.startswith("rank") for n in cluster.nodes["node-0"].files)
    )
    first.cancel()
    paths = await service.reserve(0, 1, SIZE_BYTES, 256, PATIENCE)
    assert [path.name for path in paths] == ["rank0.0", "rank0.1"]
    assert cluster.nodes["node-0"].files == ["rank0.0", "rank0.1"]
