"""The coordinator, Postgres and NATS are killed and come back; training goes on, and recoveries end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import asyncpg
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from coordinator_cluster import Running, SimulatedCluster, Stack, coordinating, eventually
from coordinator_processes import Processes, api_of, in_phase, leads

from gemini_ft.contracts.messages import Assign, Fence
from gemini_ft.coordinator.tables import Base
from gemini_ft.security.secret_files import write_secret


async def start_job(running: Running, cluster: SimulatedCluster, num_nodes: int = 2) -> str:
    await cluster.add(num_nodes)
    job_id = await running.create(num_nodes=num_nodes)
    await running.until(job_id, "running", 1)
    return job_id


async def test_killed_in_mid_recovery_its_successor_finishes_it(
    processes: Processes, cluster: SimulatedCluster
) -> None:
    first, ready = processes.start()
    api = await api_of(ready)
    await cluster.add(2)
    job = await api.post("/v1/jobs", json={"name": "job", "num_nodes": 2, "num_ranks_per_node": 1})
    job_id = job.json()["job_id"]
    await in_phase(api, job_id, "running", 1)
    await cluster.goes_on()
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
    await cluster.goes_on()
    await api.aclose()
    third.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(third.wait, 10) == 0


async def test_a_job_trains_on_without_any_coordinator_and_its_commits_are_recorded_later(
    stack: Stack, cluster: SimulatedCluster
) -> None:
    async with coordinating(stack) as running:
        job_id = await start_job(running, cluster)
    await cluster.goes_on()
    step = cluster.newest_step()
    async with coordinating(stack) as running:

        async def recorded() -> bool:
            versions = await running.items(f"/v1/jobs/{job_id}/versions")
            return bool(versions) and versions[0]["step"] >= step

        await eventually(recorded, "the commits made meanwhile to be recorded")
        assert (await running.job(job_id))["generation"] == 1


async def test_of_two_coordinators_one_leads_and_the_other_takes_over(
    processes: Processes, stack: Stack, cluster: SimulatedCluster
) -> None:
    leader, ready = processes.start()
    api = await api_of(ready)
    await eventually(lambda: leads(api), "the first coordinator to lead")
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
        await cluster.goes_on()
    await api.aclose()


async def test_postgres_killed_and_restarted(running: Running, stack: Stack, cluster: SimulatedCluster) -> None:
    job_id = await start_job(running, cluster)
    await asyncio.to_thread(stack.postgres.kill)
    await cluster.exit_rank(cluster.agents[0])

    async def refused() -> bool:
        answer = await running.api.get(f"/v1/jobs/{job_id}")
        return answer.status_code == 503 and answer.json()["type"] == "urn:gemini-ft:problem:unavailable"

    await eventually(refused, "the API not to answer from what it has read before")
    assert (await running.api.get("/readyz")).status_code == 503
    assert (await running.api.get("/healthz")).status_code == 200
    await asyncio.to_thread(stack.postgres.start)
    await running.until(job_id, "running", 2, timeout_s=20)
    await cluster.goes_on()


async def test_nats_killed_and_restarted(running: Running, stack: Stack, cluster: SimulatedCluster) -> None:
    job_id = await start_job(running, cluster)
    await asyncio.to_thread(stack.nats.kill)
    await cluster.goes_on()
    await eventually(lambda: not cluster.client.is_connected, "the agents to be cut off")
    assert (await running.job(job_id))["generation"] == 1
    await asyncio.to_thread(stack.nats.start)
    await cluster.exit_rank(cluster.agents[0])
    await running.until(job_id, "running", 2, timeout_s=20)
    await cluster.goes_on()


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
    wrong = write_secret(tmp_path / "wrong", "wrong")
    process, _ = processes.start(nats_token_file=str(wrong))
    assert await asyncio.to_thread(process.wait, 30) == 2
    assert process.stderr is not None
    last = process.stderr.read().decode().splitlines()[-1]
    assert last.startswith("error: ")
    assert "refuses the coordinator; check its credentials or token file" in last


async def test_the_migrations_build_exactly_the_tables(running: Running) -> None:
    async with running.coordinator.engine.connect() as connection:
        difference = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync), Base.metadata)
        )
    assert difference == []
