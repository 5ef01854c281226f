"""Two coordinators as processes: whatever becomes of the one that leads, the other finishes what it has begun."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from coordinator_cluster import SimulatedCluster, Stack, eventually
from coordinator_processes import Processes, api_of, in_phase, leads
from tcp_proxy import TcpProxy, proxy_of

from gemini_ft.contracts.messages import Assign, Fence
from gemini_ft.security.secret_files import write_secret

_log = logging.getLogger(__name__)


@dataclass
class Pair:
    """The first leads, and reaches Postgres and NATS through proxies."""

    leader: subprocess.Popen[bytes]
    leader_api: httpx.AsyncClient
    other_api: httpx.AsyncClient
    to_postgres: TcpProxy
    to_nats: TcpProxy

    async def only_one_leads(self) -> bool:
        return [await leads(api) for api in (self.leader_api, self.other_api)].count(True) == 1


@pytest.fixture
async def pair(processes: Processes, stack: Stack, tmp_path: Path) -> AsyncIterator[Pair]:
    async with (
        proxy_of(stack.database_url) as (to_postgres, database_url),
        proxy_of(stack.nats.url) as (to_nats, nats_url),
    ):
        url_file = write_secret(tmp_path / "proxied-database", database_url)
        leader, ready = processes.start(nats=nats_url, database_url_file=str(url_file))
        async with await api_of(ready) as leader_api:
            await eventually(lambda: leads(leader_api), "the first coordinator to lead")
            _, ready = processes.start()
            async with await api_of(ready) as other_api:
                yield Pair(leader, leader_api, other_api, to_postgres, to_nats)
        processes.end()


@pytest.fixture
async def job_id(pair: Pair, cluster: SimulatedCluster) -> str:
    """A running job."""
    await cluster.add(2)
    answer = await pair.other_api.post("/v1/jobs", json={"name": "job", "num_nodes": 2, "num_ranks_per_node": 1})
    created = str(answer.json()["job_id"])
    await in_phase(pair.other_api, created, "running", 1)
    await cluster.goes_on()
    return created


@dataclass(frozen=True)
class Trouble:
    name: str
    begin: Callable[[Pair], None]
    end: Callable[[Pair], None] | None = None


KILLED = Trouble("killed", lambda pair: pair.leader.send_signal(signal.SIGKILL))
FROZEN = Trouble(
    "frozen",
    lambda pair: pair.leader.send_signal(signal.SIGSTOP),
    lambda pair: pair.leader.send_signal(signal.SIGCONT),
)
CUT_OFF_FROM_NATS = Trouble(
    "cut-off-from-nats", lambda pair: pair.to_nats.hold.clear(), lambda pair: pair.to_nats.hold.set()
)
CUT_OFF_FROM_POSTGRES = Trouble(
    "cut-off-from-postgres", lambda pair: pair.to_postgres.hold.clear(), lambda pair: pair.to_postgres.hold.set()
)


@pytest.mark.parametrize(
    ("trouble", "phase", "unanswered"),
    [
        (KILLED, "fencing", Fence),
        (KILLED, "assigned", Assign),
        (FROZEN, "fencing", Fence),
        (CUT_OFF_FROM_NATS, "fencing", Fence),
        (CUT_OFF_FROM_POSTGRES, "fencing", Fence),
    ],
    ids=lambda value: value.name if isinstance(value, Trouble) else None,
)
async def test_a_recovery_that_the_leader_has_begun_is_finished_by_the_other(
    pair: Pair, job_id: str, cluster: SimulatedCluster, trouble: Trouble, phase: str, unanswered: type
) -> None:
    cluster.agents[0].deaf_to = (unanswered,)
    await cluster.exit_rank(cluster.agents[1])
    await in_phase(pair.other_api, job_id, phase, 2)
    cluster.agents[0].deaf_to = ()
    trouble.begin(pair)
    begun_at = time.monotonic()
    await in_phase(pair.other_api, job_id, "running", 2)
    _log.info("finished %.2f s after the leader was %s", time.monotonic() - begun_at, trouble.name)
    assert await leads(pair.other_api)
    await cluster.goes_on()
    if trouble.end is not None:  # the former leader comes back, and does no harm
        trouble.end(pair)
        await cluster.exit_rank(cluster.agents[0])
        for api in (pair.other_api, pair.leader_api):
            await in_phase(api, job_id, "running", 3)
        await eventually(pair.only_one_leads, "exactly one of them to lead", 20)
        await cluster.goes_on()


async def test_postgres_killed_during_a_recovery(
    pair: Pair, job_id: str, stack: Stack, cluster: SimulatedCluster
) -> None:
    cluster.agents[0].deaf_to = (Fence,)
    await cluster.exit_rank(cluster.agents[1])
    await in_phase(pair.other_api, job_id, "fencing", 2)
    await asyncio.to_thread(stack.postgres.kill)
    cluster.agents[0].deaf_to = ()
    await asyncio.to_thread(stack.postgres.start)
    await in_phase(pair.other_api, job_id, "running", 2)
    await eventually(pair.only_one_leads, "exactly one of them to lead", 20)
    await cluster.goes_on()
