"""What the coordinator tells Prometheus of a job that runs, loses a rank and recovers."""

from __future__ import annotations

import httpx
from coordinator_cluster import Running, SimulatedCluster, eventually
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]


async def scrape(running: Running) -> Samples:
    # Whoever scrapes has no token.
    async with httpx.AsyncClient(transport=running.api._transport, base_url="http://coordinator") as anybody:
        answer = await anybody.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_a_recovery_is_told_with_its_cause_and_phases(running: Running, cluster: SimulatedCluster) -> None:
    agents = await cluster.add(2)
    job_id = await running.create(num_nodes=2)
    await running.until(job_id, "running")
    before = await scrape(running)
    assert before["gemini_ft_coordinator_leader", ""] == 1
    assert before["gemini_ft_coordinator_heartbeats_total", ""] > 0
    assert before["gemini_ft_coordinator_nodes", "alive"] == 2
    assert before["gemini_ft_job_generation", job_id] == 1
    assert before["gemini_ft_recoveries_total", "other"] == 0
    assert ("gemini_ft_recovery_phase_seconds_count", "fence") not in before, "the start of a job is no recovery"
    assert before["gemini_ft_nats_connected", ""] == 1
    assert before["gemini_ft_database_connections", "in_use"] + before["gemini_ft_database_connections", "idle"] > 0

    await cluster.exit_rank(agents[0])
    await running.until(job_id, "running", generation=2)

    async def recovered() -> Samples | None:
        found = await scrape(running)
        there = found["gemini_ft_coordinator_jobs", "running"] == 1 and found["gemini_ft_job_generation", job_id] == 2
        return found if there else None

    after = await eventually(recovered, "the metrics to tell of generation 2")
    assert sum(value for (name, _), value in after.items() if name == "gemini_ft_recoveries_total") == 1
    for phase in ("fence", "plan", "fetch", "load"):
        assert after["gemini_ft_recovery_phase_seconds_count", phase] == 1, phase
    assert after["gemini_ft_job_finished_step", job_id] >= after["gemini_ft_job_committed_step", job_id]
    assert not [name for name, _ in after if name.endswith("_created")]
