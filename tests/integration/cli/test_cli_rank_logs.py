"""What `gemini-ft run --api` shows of the ranks: every line once, one generation after the other."""

from __future__ import annotations

import asyncio

from coordinator_cluster import API_TOKEN, Running, SimulatedCluster
from served_api import served
from simulated_logs import SimulatedLogs, answering_for_logs

from gemini_ft.client.api_client import ApiClient
from gemini_ft.localstack.api_logs import ApiLogFollower
from gemini_ft.localstack.logs import LogLine


async def test_every_line_is_shown_once_one_generation_after_the_other(
    running: Running, cluster: SimulatedCluster
) -> None:
    agents = await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running", 1)
    async with served(running) as api, answering_for_logs(cluster) as logs:
        with ApiClient(str(api.base_url), API_TOKEN) as client:
            follower = ApiLogFollower(client, await asyncio.to_thread(client.job, job_id))

            async def polled(*, final: bool = False) -> list[LogLine]:
                return await asyncio.to_thread(lambda: list(follower.poll(final=final)))

            assert await polled() == []
            logs.written[1, 0] = b"one\r\ntw"
            assert await polled() == [LogLine(1, 0, "one")]
            logs.written[1, 0] += b"o\nunfinished"
            logs.written[1, 1] = b"other rank\n"
            assert await polled() == [LogLine(1, 0, "two"), LogLine(1, 1, "other rank")]

            await cluster.exit_rank(agents[0])
            await running.until(job_id, "running", 2)
            logs.written[2, 0] = b"again\n"
            lines = await polled() + await polled()
            assert [line for line in lines if line.rank == 0] == [LogLine(1, 0, "unfinished"), LogLine(2, 0, "again")]

            _write_much(logs)
            logs.written[2, 1] = b"the last words"
            await running.api.post(f"/v1/jobs/{job_id}/stop", json={"now": True})
            lines = await polled(final=True)
            assert [line for line in lines if line.rank == 1] == [LogLine(2, 1, "the last words")]
            assert [line.text for line in lines if line.rank == 0] == [f"line {number}" for number in range(100_000)]
            assert await polled(final=True) == []


def _write_much(logs: SimulatedLogs) -> None:
    """More than one part can hold."""
    logs.written[2, 0] += b"".join(b"line %d\n" % number for number in range(100_000))
