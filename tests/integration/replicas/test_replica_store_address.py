"""The launchers of all nodes learn where the store of their generation listens."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from replica_cluster import PATIENCE, Cluster, shard_bytes

from gemini_ft.contracts.errors import FencedError
from gemini_ft.contracts.messages import Address

STORE = Address(host="127.0.0.1", port=29_500)


async def test_everybody_learns_the_address_that_slot_zero_publishes_later(cluster: Cluster) -> None:
    await cluster.start(3)
    await cluster.begin()
    asking = [asyncio.ensure_future(node.service.store_address(1, PATIENCE)) for node in cluster.nodes.values()]
    await asyncio.sleep(0)
    cluster.nodes["node-0"].service.publish_store(1, STORE.host, STORE.port)
    assert await asyncio.gather(*asking) == [STORE] * 3
    await cluster.begin()
    with pytest.raises(FencedError):
        cluster.nodes["node-0"].service.publish_store(1, STORE.host, STORE.port)
    with pytest.raises(FencedError):
        await cluster.nodes["node-1"].service.store_address(1, PATIENCE)


async def test_an_address_that_is_not_known_in_time_is_none(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    for node in cluster.nodes.values():
        assert await node.service.store_address(1, timedelta(milliseconds=50)) is None


async def test_a_parked_question_holds_up_no_replication(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.begin()
    asking = asyncio.ensure_future(cluster.nodes["node-1"].service.store_address(1, PATIENCE))
    ranks = await cluster.ranks(100_000)
    for rank in ranks:
        rank.checkpoint(0, shard_bytes(rank.rank, 0, 100_000), None)
        await rank.sealed_everywhere(0)
    assert not asking.done()
    cluster.nodes["node-0"].service.publish_store(1, STORE.host, STORE.port)
    assert await asking == STORE


async def test_a_question_before_the_plan_waits_for_it(cluster: Cluster) -> None:
    await cluster.start(2)
    await cluster.fence()
    asking = asyncio.ensure_future(cluster.nodes["node-1"].service.store_address(1, PATIENCE))
    await asyncio.sleep(0)
    await cluster.assign(None)
    cluster.nodes["node-0"].service.publish_store(1, STORE.host, STORE.port)
    assert await asking == STORE
