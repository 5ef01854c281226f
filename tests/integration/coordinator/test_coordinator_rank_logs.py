"""Logs of ranks, asked of agents over NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from coordinator_cluster import Running, SimulatedCluster
from served_api import following, served
from simulated_logs import SimulatedLogs, answering_for_logs

from gemini_ft.contracts.subjects import log_subject


@pytest.fixture
async def logs(cluster: SimulatedCluster) -> AsyncIterator[SimulatedLogs]:
    await cluster.add(2)
    async with answering_for_logs(cluster) as found:
        yield found


@pytest.fixture
async def job(running: Running, logs: SimulatedLogs) -> Any:
    job_id = await running.create(num_nodes=2, num_ranks_per_node=2)
    return await running.until(job_id, "running", 1)


async def test_the_node_in_the_ranks_slot_is_asked(running: Running, logs: SimulatedLogs, job: Any) -> None:
    logs.written[1, 3] = b"one\ntwo\nthree\n"
    part = await running.get(f"/v1/jobs/{job['job_id']}/ranks/3/log", tail_lines=2)
    node_id = job["slots"]["1"]
    assert part == {
        "node_id": node_id,
        "generation": 1,
        "offset": 4,
        "next_offset": 14,
        "text": "two\nthree\n",
        "is_end": True,
    }
    assert [subject for subject, _ in logs.asked] == [log_subject(node_id)]


async def test_a_log_is_read_piece_by_piece_without_tearing_characters(
    running: Running, logs: SimulatedLogs, job: Any
) -> None:
    text = "a\u00e9\u4e2d\U0001f600" * 20
    logs.written[1, 0] = text.encode() + b"\xff\xfe tail"
    read, offset = "", 0
    while True:
        part = await running.get(f"/v1/jobs/{job['job_id']}/ranks/0/log", offset=offset, max_bytes=7)
        assert part["offset"] == offset
        read, offset = read + part["text"], part["next_offset"]
        if part["is_end"]:
            break
    assert read == text + "\ufffd\ufffd tail"


@pytest.mark.parametrize(
    ("rank", "query", "status", "named"),
    [
        (4, {}, 404, "has no rank 4; it has 4 ranks"),
        (0, {}, 404, "there is no such log here"),
        (0, {"generation": 7}, 404, "has not been assigned in generation 7"),
        (-1, {}, 422, "rank"),
        (0, {"max_bytes": 1 << 20}, 422, "max_bytes"),
        (0, {"generation": 0}, 422, "generation"),
    ],
)
async def test_what_cannot_be_read_is_refused(
    running: Running, job: Any, rank: int, query: dict[str, int], status: int, named: str
) -> None:
    answer = await running.api.get(f"/v1/jobs/{job['job_id']}/ranks/{rank}/log", params=query)
    assert answer.status_code == status
    assert named in answer.json()["detail"]


async def test_a_node_that_does_not_answer_is_named(running: Running, cluster: SimulatedCluster) -> None:
    await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    job = await running.until(job_id, "running", 1)
    answer = await running.api.get(f"/v1/jobs/{job_id}/ranks/0/log")
    assert answer.status_code == 503
    assert f"on {job['slots']['0']}, which does not answer" in answer.json()["detail"]


async def test_a_followed_log_goes_on_through_generations_until_the_job_ends(
    running: Running, cluster: SimulatedCluster, logs: SimulatedLogs, job: Any
) -> None:
    path = f"/v1/jobs/{job['job_id']}/ranks/0/log"
    logs.written[1, 0] = b"old\nnew\n"
    async with served(running) as api, following(api, path, params={"follow": True, "tail_lines": 1}) as follower:
        assert [part["text"] for part in await follower.has_read(1)] == ["new\n"]
        logs.written[1, 0] += b"more\n"
        await follower.has_read(2)
        await cluster.exit_rank(cluster.agents[0])
        await running.until(job["job_id"], "running", 2)
        logs.written[2, 0] = b"again\n"
        await follower.has_read(3)
        await running.api.post(f"/v1/jobs/{job['job_id']}/stop", json={"now": True})
        async with asyncio.timeout(10):
            await follower.reading
        assert [(part["generation"], part["text"]) for part in follower.events] == [
            (1, "new\n"),
            (1, "more\n"),
            (2, "again\n"),
        ]
        assert follower.ids == ["1:8", "1:13", "2:6"]
        async with following(api, path, params={"follow": True}, headers={"Last-Event-ID": follower.ids[0]}) as later:
            assert [part["text"] for part in await later.has_read(2)] == ["more\n", "again\n"]
