"""What was committed comes back: from local memory, from a peer, and never from a damaged copy."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from replica_cluster import PATIENCE, Cluster, Rank, flip_bit, shard_bytes

from gemini_ft.contracts.errors import NoVersionError

SIZE_BYTES = 200_000


async def committed(cluster: Cluster, num_steps: int = 2, **shape: int) -> list[Rank]:
    """A job with versions 0..num_steps-1 sealed everywhere."""
    await cluster.start(**({"num_nodes": 2} | shape))  # type: ignore[arg-type]
    await cluster.begin()
    ranks = await cluster.ranks(SIZE_BYTES)
    base_step = None
    for step in range(num_steps):
        for rank in ranks:
            rank.checkpoint(step, shard_bytes(rank.rank, step, SIZE_BYTES), base_step)
        await asyncio.gather(*(rank.sealed_everywhere(step) for rank in ranks))
        base_step = step
    return ranks


async def restore(cluster: Cluster, step: int) -> dict[int, str]:
    """Restore on all ranks, check the bytes and the new redundancy; return where each rank's copy came from."""
    ranks = await cluster.ranks(SIZE_BYTES)
    sources = {}
    for rank in ranks:
        copy, data = await rank.restored_bytes()
        assert (copy.step, data) == (step, shard_bytes(rank.rank, step, SIZE_BYTES))
        sources[rank.rank] = copy.source
    await asyncio.gather(*(rank.sealed_everywhere(step) for rank in ranks))
    return sources


async def test_killed_ranks_restore_from_local_memory(cluster: Cluster) -> None:
    for rank in await committed(cluster):
        rank.die()
    await cluster.begin(restore_step=1)
    assert await restore(cluster, 1) == {0: "local", 1: "local"}


async def test_two_recoveries_in_a_row_restore_the_same_bytes(cluster: Cluster) -> None:
    for rank in await committed(cluster):
        rank.die()
    for _ in range(2):
        await cluster.begin(restore_step=1)
        await restore(cluster, 1)


async def test_a_standby_with_empty_memory_fetches_and_redundancy_is_whole_again(cluster: Cluster) -> None:
    for rank in await committed(cluster, num_nodes=3, num_standbys=1):
        rank.die()
    lost = cluster.nodes["node-1"]
    await lost.service.close_job()
    await lost.service.close()
    cluster.slots[1] = "node-3"
    await cluster.begin(restore_step=1, lost=("node-1",))
    assert await restore(cluster, 1) == {0: "local", 1: "peer", 2: "local"}
    # Node 3 holds what node 1 held: its own shard and the one of node 0.
    for rank in (0, 1):
        assert cluster.copy_at("node-3", rank, 1) == shard_bytes(rank, 1, SIZE_BYTES)
    assert cluster.nodes["node-3"].service.status().redundancy_whole


async def test_the_versions_after_the_restored_one_are_discarded(cluster: Cluster) -> None:
    ranks = await committed(cluster)
    # Rank 0 is one step ahead: 2 is sealed everywhere for it, but rank 1 never sealed it.
    ranks[0].checkpoint(2, shard_bytes(0, 2, SIZE_BYTES), 1)
    await ranks[0].sealed_everywhere(2)
    for rank in ranks:
        rank.die()
    await cluster.begin(restore_step=1)
    assert await restore(cluster, 1) == {0: "local", 1: "local"}
    for name in ("node-0", "node-1"):
        assert cluster.copy_at(name, 0, 2) is None
    ranks = await cluster.ranks(SIZE_BYTES)
    other = shard_bytes(0, 777, SIZE_BYTES)
    ranks[0].checkpoint(2, other, 1)
    await ranks[0].sealed_everywhere(2)
    assert cluster.copy_at("node-1", 0, 2) == other


@pytest.mark.parametrize("damaged", [("node-0",), ("node-1",)])
async def test_a_flipped_bit_in_one_copy_is_reported_and_the_other_copy_restored(
    cluster: Cluster, damaged: tuple[str, ...]
) -> None:
    for rank in await committed(cluster):
        rank.die()
    for name in damaged:
        flip_bit(cluster.nodes[name].folder, 0, 1)
    inventories = await cluster.fence()
    for name, copies in inventories.items():
        assert [text for text in copies.damaged if "rank 0 at step 1" in text] or name not in damaged
        assert any((held.rank, held.step) == (0, 1) for held in copies.held) == (name not in damaged)
    good = tuple(name for name in ("node-0", "node-1") if name not in damaged)
    await cluster.assign(1, {0: good, 1: ("node-1", "node-0")})
    sources = await restore(cluster, 1)
    assert sources[0] == ("peer" if "node-0" in damaged else "local")
    for name in ("node-0", "node-1"):
        assert cluster.copy_at(name, 0, 1) == shard_bytes(0, 1, SIZE_BYTES)


async def test_with_both_copies_damaged_the_older_version_is_still_there(cluster: Cluster) -> None:
    for rank in await committed(cluster):
        rank.die()
    for name in ("node-0", "node-1"):
        flip_bit(cluster.nodes[name].folder, 0, 1)
    inventories = await cluster.fence()
    steps = {held.step for copies in inventories.values() for held in copies.held if held.rank == 0}
    assert steps == {0}
    await cluster.assign(0, {0: ("node-0", "node-1"), 1: ("node-1", "node-0")})
    await restore(cluster, 0)


async def test_a_copy_that_rots_after_the_inventory_is_dropped_and_fetched_again(cluster: Cluster) -> None:
    for rank in await committed(cluster):
        rank.die()
    await cluster.begin(restore_step=1)
    rank = (await cluster.ranks(SIZE_BYTES))[0]
    copy = await rank.service.restorable_copy(0, PATIENCE)
    assert copy.source == "local"
    flip_bit(cluster.nodes["node-0"].folder, 0, 1)
    rank.service.drop_copy(0, 1, "chunk 1 does not match")
    copy, data = await rank.restored_bytes()
    assert (copy.source, data) == ("peer", shard_bytes(0, 1, SIZE_BYTES))


async def test_when_every_copy_rots_the_refusal_names_the_shard_and_comes_to_an_end(cluster: Cluster) -> None:
    for rank in await committed(cluster):
        rank.die()
    await cluster.begin(restore_step=1)
    rank = (await cluster.ranks(SIZE_BYTES))[0]
    await rank.service.restorable_copy(0, PATIENCE)
    for name in ("node-0", "node-1"):
        flip_bit(cluster.nodes[name].folder, 0, 1)
    rank.service.drop_copy(0, 1, "chunk 1 does not match")
    with pytest.raises(NoVersionError, match="rank 0 at step 1"):
        await rank.service.restorable_copy(0, PATIENCE)
    # The fall-back is still in memory for the next recovery.
    inventories = await cluster.fence()
    assert any((held.rank, held.step) == (0, 0) for held in inventories["node-1"].held)


async def test_a_peer_that_is_gone_is_passed_over_for_the_next_source(cluster: Cluster) -> None:
    for rank in await committed(cluster, num_nodes=4, num_replicas=3, num_standbys=1):
        rank.die()
    for name in ("node-0", "node-1"):
        await cluster.nodes[name].service.close()
    cluster.slots[0] = "node-4"
    await cluster.fence(("node-2", "node-3", "node-4"))
    await cluster.assign(1, {0: ("node-1", "node-2")}, only=("node-2", "node-4"))
    rank = cluster.rank(0)
    copy = await rank.service.restorable_copy(0, PATIENCE)
    assert (copy.step, copy.source) == (1, "peer")
    assert cluster.copy_at("node-4", 0, 1) == shard_bytes(0, 1, SIZE_BYTES)


async def test_from_zero_nothing_is_restored_and_nothing_old_is_kept(cluster: Cluster) -> None:
    for rank in await committed(cluster):
        rank.die()
    await cluster.begin(restore_step=None)
    for rank in await cluster.ranks(SIZE_BYTES):
        copy = await rank.service.restorable_copy(rank.rank, timedelta(seconds=1))
        assert (copy.step, copy.buffer) == (None, None)
        rank.checkpoint(0, shard_bytes(rank.rank, 50, SIZE_BYTES), None)
        await rank.sealed_everywhere(0)
    assert cluster.copy_at("node-1", 0, 0) == shard_bytes(0, 50, SIZE_BYTES)


async def test_a_new_recovery_during_re_replication_starts_clean(cluster: Cluster) -> None:
    for rank in await committed(cluster, num_nodes=2, num_standbys=1):
        rank.die()
    await cluster.nodes["node-1"].service.close()
    cluster.slots[1] = "node-2"
    await cluster.begin(restore_step=1, lost=("node-1",))
    # Nobody waits for the transfers: the next generation comes at once, twice.
    for _ in range(2):
        await cluster.begin(restore_step=1, lost=("node-1",))
    assert await restore(cluster, 1) in ({0: "local", 1: "local"}, {0: "local", 1: "peer"})


async def test_a_copy_of_a_history_that_was_given_up_is_not_restored(cluster: Cluster) -> None:
    for rank in await committed(cluster, num_nodes=2, num_standbys=1):
        rank.die()
    # Node 0 drops out with its version 1; the others go back to version 0 and make another version 1.
    away = cluster.nodes["node-0"]
    await away.service.close()
    cluster.slots[0] = "node-2"
    await cluster.fence(("node-1", "node-2"))
    await cluster.assign(0, {0: ("node-1",), 1: ("node-1",)})
    for rank in await cluster.ranks(SIZE_BYTES):
        await rank.restored_bytes()
        await rank.sealed_everywhere(0)
        rank.checkpoint(1, shard_bytes(rank.rank, 99, SIZE_BYTES), 0)
        await rank.sealed_everywhere(1)
        rank.die()
    # It comes back in its old slot, and its old copy is not among the plan's sources.
    await away.start_agent()
    cluster.slots[0] = "node-0"
    await cluster.fence()
    await cluster.assign(1, {0: ("node-1", "node-2"), 1: ("node-1", "node-2")})
    for rank in await cluster.ranks(SIZE_BYTES):
        copy, data = await rank.restored_bytes()
        assert (copy.step, data) == (1, shard_bytes(rank.rank, 99, SIZE_BYTES))
        await rank.sealed_everywhere(1)
    assert cluster.copy_at("node-0", 1, 1) == shard_bytes(1, 99, SIZE_BYTES)
