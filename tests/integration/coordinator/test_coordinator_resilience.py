"""The coordinator, Postgres and NATS are killed and come back; training goes on, and recoveries end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from coordinator_cluster import API_TOKEN, Running, SimulatedCluster, Stack, coordinating, eventually

from gemini_ft.contracts.messages import Assign, Fence
from gemini_ft.coordinator.tables import Base


class Processes:
    """Coordinators as real processes."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self._folder = folder
        self._nats_url = stack.nats.url
        self.running: list[subprocess.Popen[bytes]] = []
        for name, secret in (("database", stack.database_url), ("nats", stack.nats_token), ("api", API_TOKEN)):
            (folder / name).write_text(f"{secret}\n")

    def start(self, **changed: str) -> tuple[subprocess.Popen[bytes], Path]:
        ready = self._folder / f"ready.{len(self.running)}"
        options = {
            "--database-url-file": str(self._folder / "database"),
            "--nats": self._nats_url,
            "--nats-token-file": str(self._folder / "nats"),
            "--api-token-file": str(self._folder / "api"),
            "--listen": "127.0.0.1:0",
            "--ready-file": str(ready),
        } | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        argv = [sys.executable, "-m", "gemini_ft.coordinator", *(word for pair in options.items() for word in pair)]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
        self.running.append(process)
        return process, ready

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


@pytest.fixture
def processes(stack: Stack, tmp_path: Path) -> Iterator[Processes]:
    found = Processes(stack, tmp_path)
    yield found
    found.end()


async def api_of(ready: Path) -> httpx.AsyncClient:
    await eventually(ready.exists, "the coordinator to be ready", 30)
    headers = {"Authorization": f"Bearer {API_TOKEN}"}
    return httpx.AsyncClient(base_url=await asyncio.to_thread(lambda: ready.read_text().strip()), headers=headers)


async def in_phase(api: httpx.AsyncClient, job_id: str, phase: str, generation: int) -> None:
    async def there() -> bool:
        job = (await api.get(f"/v1/jobs/{job_id}")).json()
        return bool(job["phase"] == phase and job["generation"] == generation)

    await eventually(there, f"{job_id} to be {phase} at generation {generation}", 30)


async def start_job(running: Running, cluster: SimulatedCluster, num_nodes: int = 2) -> str:
    await cluster.add(num_nodes)
    job_id = await running.create(num_nodes=num_nodes)
    await running.until(job_id, "running", 1)
    return job_id


def newest_step(cluster: SimulatedCluster) -> int:
    return min(agent.committed_step or 0 for agent in cluster.agents)


async def goes_on(cluster: SimulatedCluster) -> None:
    """Training takes ten more steps."""
    step = newest_step(cluster)
    await eventually(lambda: newest_step(cluster) > step + 10, f"ten steps after step {step}")


async def test_killed_in_mid_recovery_its_successor_finishes_it(
    processes: Processes, cluster: SimulatedCluster
) -> None:
    first, ready = processes.start()
    api = await api_of(ready)
    await cluster.add(2)
    job = await api.post("/v1/jobs", json={"name": "job", "num_nodes": 2, "num_ranks_per_node": 1})
    job_id = job.json()["job_id"]
    await in_phase(api, job_id, "running", 1)
    await goes_on(cluster)
    for agent, order in zip(cluster.agents, (Fence, Assign), strict=True):
        agent.deaf_to = (order,)
    await cluster.exit_rank(cluster.agents[0])
    await in_phase(api, job_id, "fencing", 2)
    first.send_signal(signal.SIGKILL)
    await api.aclose()

    second, ready = processes.start()
    api = await api_of(ready)
    await in_phase(api, job_id, "fencing", 2)
    cluster.agents[0].deaf_to = ()
    await in_phase(api, job_id, "assigned", 2)
    second.send_signal(signal.SIGKILL)
    await api.aclose()

    third, ready = processes.start()
    api = await api_of(ready)
    cluster.agents[1].deaf_to = ()
    await in_phase(api, job_id, "running", 2)
    assert len({agent.assign.model_dump_json() for agent in cluster.agents if agent.assign}) == 1
    await goes_on(cluster)
    await api.aclose()
    third.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(third.wait, 10) == 0


async def test_a_job_trains_on_without_any_coordinator_and_its_commits_are_recorded_later(
    stack: Stack, cluster: SimulatedCluster
) -> None:
    async with coordinating(stack) as running:
        job_id = await start_job(running, cluster)
    await goes_on(cluster)
    step = newest_step(cluster)
    async with coordinating(stack) as running:

        async def recorded() -> bool:
            versions = await running.get(f"/v1/jobs/{job_id}/versions")
            return bool(versions) and versions[0]["step"] >= step

        await eventually(recorded, "the commits made meanwhile to be recorded")
        assert (await running.job(job_id))["generation"] == 1


async def test_of_two_coordinators_one_leads_and_the_other_takes_over(
    processes: Processes, stack: Stack, cluster: SimulatedCluster
) -> None:
    leader, ready = processes.start()
    api = await api_of(ready)

    async def leads() -> bool:
        return bool((await api.get("/readyz")).json()["leader"])

    await eventually(leads, "the first coordinator to lead")
    async with coordinating(stack) as other:
        job_id = await start_job(other, cluster)
        assert not other.coordinator.leadership.held
        cluster.agents[0].deaf_to = (Fence,)
        await cluster.exit_rank(cluster.agents[1])
        await in_phase(api, job_id, "fencing", 2)
        leader.send_signal(signal.SIGKILL)
        await eventually(lambda: other.coordinator.leadership.held, "the second coordinator to lead")
        cluster.agents[0].deaf_to = ()
        await other.until(job_id, "running", 2)
        await goes_on(cluster)
    await api.aclose()


async def test_postgres_killed_and_restarted(running: Running, stack: Stack, cluster: SimulatedCluster) -> None:
    job_id = await start_job(running, cluster)
    await asyncio.to_thread(stack.postgres.kill)
    await cluster.exit_rank(cluster.agents[0])
    answer = await running.api.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 503
    assert answer.json()["type"] == "urn:gemini-ft:problem:unavailable"
    assert (await running.api.get("/readyz")).status_code == 503
    assert (await running.api.get("/healthz")).status_code == 200
    await asyncio.to_thread(stack.postgres.start)
    await running.until(job_id, "running", 2, timeout_s=20)
    await goes_on(cluster)


async def test_nats_killed_and_restarted(running: Running, stack: Stack, cluster: SimulatedCluster) -> None:
    job_id = await start_job(running, cluster)
    await asyncio.to_thread(stack.nats.kill)
    await goes_on(cluster)
    await eventually(lambda: not cluster.client.is_connected, "the agents to be cut off")
    assert (await running.job(job_id))["generation"] == 1
    await asyncio.to_thread(stack.nats.start)
    await cluster.exit_rank(cluster.agents[0])
    await running.until(job_id, "running", 2, timeout_s=20)
    await goes_on(cluster)


async def test_a_database_that_became_read_only_is_left_for_its_successor(running: Running, stack: Stack) -> None:
    """After a fail-over the old server answers reads; a pool must not cling to it."""
    name = stack.database_url.rpartition("/")[2]
    admin = await asyncpg.connect(stack.postgres.url)
    await admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
    spec = {"name": "job", "num_nodes": 1, "num_ranks_per_node": 1, "num_replicas": 1}

    async def refused() -> bool:
        return (await running.api.post("/v1/jobs", json=spec)).status_code == 503

    await eventually(refused, "the read-only database to be noticed")
    assert "read-only" in (await running.api.get("/readyz")).json()["detail"]
    # No backend is ended now: the pool must have dropped its read-only connections by itself.
    await admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    await admin.close()

    async def created() -> bool:
        return (await running.api.post("/v1/jobs", json=spec)).status_code == 201

    await eventually(created, "the pool to have left its read-only connections")


async def test_a_wrong_nats_token_is_refused_in_one_sentence(processes: Processes, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    process, _ = processes.start(nats_token_file=str(wrong))
    assert await asyncio.to_thread(process.wait, 30) == 2
    assert process.stderr is not None
    last = process.stderr.read().decode().splitlines()[-1]
    assert last.startswith("error: ")
    assert "refuses the coordinator's token; check --nats-token-file" in last


async def test_the_migrations_build_exactly_the_tables(running: Running) -> None:
    async with running.coordinator.engine.connect() as connection:
        difference = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync), Base.metadata)
        )
    assert difference == []
