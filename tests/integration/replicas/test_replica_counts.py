"""What checkpoint memory tells its metrics: bytes on the data plane, and damage by where it was found."""

from __future__ import annotations

from replica_cluster import PATIENCE, Cluster, eventually, flip_bit, shard_bytes

from gemini_ft.agent.replicas.counts import DamageFound, ReplicaCounts

SIZE_BYTES = 300_000


def counts(cluster: Cluster, name: str) -> ReplicaCounts:
    return cluster.nodes[name].service.counts


async def test_bytes_are_counted_on_both_ends_of_a_replication_and_of_a_fetch(cluster: Cluster) -> None:
    await cluster.start(2, num_standbys=1)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    assert counts(cluster, "node-0") == ReplicaCounts(sent_bytes=SIZE_BYTES)
    assert counts(cluster, "node-1") == ReplicaCounts(received_bytes=SIZE_BYTES)

    rank.die()
    cluster.slots[0] = "node-2"
    await cluster.begin(restore_step=0, lost=("node-0",))
    await cluster.rank(0).service.restorable_copy(0, PATIENCE)
    assert counts(cluster, "node-2").received_bytes == SIZE_BYTES
    assert counts(cluster, "node-1").sent_bytes == SIZE_BYTES
    assert not any(node.service.counts.num_damaged.total() for node in cluster.nodes.values())


async def test_a_copy_that_rotted_in_memory_is_counted_where_all_are_checked(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    flip_bit(cluster.nodes["node-1"].folder, 0, 0)
    await cluster.fence()
    assert counts(cluster, "node-1").num_damaged == {DamageFound.STORED: 1}
    assert counts(cluster, "node-0").num_damaged.total() == 0


async def test_a_copy_that_a_rank_finds_bad_is_counted(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    rank.checkpoint(0, shard_bytes(0, 0, SIZE_BYTES), None)
    await rank.sealed_everywhere(0)
    await cluster.begin(restore_step=0)
    restoring = cluster.rank(0)
    await restoring.service.restorable_copy(0, PATIENCE)
    restoring.service.drop_copy(0, 0, "chunk 1 is bad")
    copy = await restoring.service.restorable_copy(0, PATIENCE)
    assert copy.source == "peer"
    assert counts(cluster, "node-0").num_damaged == {DamageFound.STORED: 0, DamageFound.RESTORED: 1}


async def test_staged_bytes_that_rot_are_counted_by_the_holder_and_by_the_owner(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    rank, _ = await cluster.ranks(SIZE_BYTES)
    data = shard_bytes(0, 0, SIZE_BYTES)
    index = rank.begin(0, data, None)
    num_chunks = rank.buffers[index].header().num_chunks
    rank.copy_in(data, index, 0, num_chunks)
    rank.buffers[index].chunk(2, SIZE_BYTES)[7] ^= 1
    rank.stage(0, data, index, num_chunks, num_chunks)
    rank.seal(0, index)
    await eventually("the damage to be found here", lambda: rank.page.damaged_step == 0)
    assert counts(cluster, "node-0").num_damaged[DamageFound.STAGED] == 1
    assert counts(cluster, "node-1").num_damaged[DamageFound.RECEIVED] == 1
