"""What the API answers: lists, details, and problems."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_cluster import Running, SimulatedCluster, eventually
from served_api import GOOD_JOB, served

PROBLEM = "application/problem+json"


async def all_pages(running: Running, path: str, **query: Any) -> list[Any]:
    items: list[Any] = []
    while True:
        page = await running.get(path, **query)
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        query["cursor"] = page["next_cursor"]


@pytest.mark.parametrize(
    ("change", "kind", "field"),
    [
        ({"num_nodes": 0}, "invalid-request", "num_nodes"),
        ({"num_ranks_per_node": None}, "invalid-request", "num_ranks_per_node"),
        ({"name": ""}, "invalid-request", "name"),
        ({"name": "a\0b"}, "invalid-request", "name"),
        ({"command": ["train.py", "\0"]}, "invalid-request", "command.1"),
        ({"environment": {"A": "\0"}}, "invalid-request", "environment.A"),
        ({"nodes": 3}, "invalid-request", "nodes"),
        ({"hang_timeout_s": -1}, "invalid-request", "hang_timeout_s"),
        ({"num_replicas": 3}, "configuration", None),
    ],
)
async def test_a_bad_job_is_refused_and_the_field_named(
    running: Running, change: dict[str, Any], kind: str, field: str | None
) -> None:
    answer = await running.api.post("/v1/jobs", json=GOOD_JOB | change)
    assert answer.status_code == 422
    assert answer.json()["type"] == f"urn:gemini-ft:problem:{kind}"
    if field is None:
        assert "num_replicas is 3, but num_nodes is 2" in answer.json()["detail"]
    else:
        assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert await running.items("/v1/jobs") == []


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/jobs/No_Job", "job_id"),
        ("/v1/jobs/..", None),
        ("/v1/jobs/a%2F..%2Fb", None),
        ("/v1/jobs?limit=0", "limit"),
        ("/v1/jobs?limit=1001", "limit"),
        ("/v1/jobs?phase=sleeping", "phase.0"),
        ("/v1/jobs?name=%00", "name"),
        ("/v1/jobs?cursor=x", "cursor"),
        ("/v1/nodes?cursor=WzEsMl0=", "cursor"),
        ("/v1/events?after=-1", "after"),
        ("/v1/events?after=9223372036854775808", "after"),
        ("/v1/nodes?label=rack", "label.0"),
        ("/v1/nodes/a%00b", "node_id"),
    ],
)
async def test_bad_paths_and_queries_are_refused_and_the_field_named(
    running: Running, path: str, field: str | None
) -> None:
    answer = await running.api.get(path)
    assert answer.headers["content-type"] == PROBLEM
    if field is None:
        assert answer.status_code == 404
    else:
        assert answer.status_code == 422
        assert [error["field"] for error in answer.json()["errors"]] == [field]


async def test_the_unknown_is_a_404_with_a_sentence(running: Running) -> None:
    job_id = await running.create(**GOOD_JOB)
    for method, path in (
        ("GET", "/v1/jobs/job-none"),
        ("GET", "/v1/jobs/job-none/recoveries"),
        ("GET", "/v1/jobs/job-none/ranks"),
        ("GET", "/v1/jobs/job-none/ranks/0/log"),
        ("GET", f"/v1/jobs/{job_id}/versions/7"),
        ("GET", f"/v1/jobs/{job_id}/recoveries/1"),
        ("GET", f"/v1/jobs/{job_id}/ranks/0/log"),
        ("DELETE", "/v1/jobs/job-none"),
        ("POST", "/v1/jobs/job-none/stop"),
        ("GET", "/v1/nodes/node-none"),
        ("POST", "/v1/nodes/node-none/drain"),
        ("DELETE", "/v1/tokens/tok-0123456789ab"),
        ("GET", "/v1/nothing"),
        ("GET", "/v1/jobs/"),
    ):
        answer = await running.api.request(method, path)
        assert answer.status_code == 404, (method, path)
        assert answer.headers["content-type"] == PROBLEM
        assert answer.json()["type"] == "urn:gemini-ft:problem:not-found"
        assert answer.json()["detail"]


async def test_a_wrong_method_is_told_the_right_ones(running: Running) -> None:
    for path, allowed in (("/v1/jobs", "GET, POST"), ("/v1/nodes/node-1", "DELETE, GET, PATCH"), ("/healthz", "GET")):
        answer = await running.api.put(path)
        assert answer.status_code == 405
        assert answer.json()["type"] == "urn:gemini-ft:problem:method-not-allowed"
        assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"name": NaN}'])
async def test_a_body_that_is_no_job_is_refused(running: Running, body: bytes) -> None:
    answer = await running.api.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:gemini-ft:problem:invalid-request"


async def test_bodies_are_limited_whether_they_say_how_large_they_are_or_not(running: Running) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100_000

    async with served(running) as api:
        for body in (b" " * ((1 << 20) + 1), chunks()):
            answer = await api.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 413
            assert answer.headers["content-type"] == PROBLEM
            assert answer.json()["type"] == "urn:gemini-ft:problem:content-too-large"
        largest = await api.post("/v1/jobs", json=GOOD_JOB | {"command": ["x" * 1_000_000]})
        assert largest.status_code == 201


async def test_a_page_goes_on_where_the_last_one_ended_whatever_has_changed_meanwhile(running: Running) -> None:
    job_ids = [await running.create(**GOOD_JOB | {"name": f"job {number}"}) for number in range(5)]
    first = await running.get("/v1/jobs", limit=2)
    assert [job["job_id"] for job in first["items"]] == [job_ids[4], job_ids[3]]
    await running.create(**GOOD_JOB)
    for gone in (job_ids[3], job_ids[1]):
        assert (await running.api.delete(f"/v1/jobs/{gone}")).status_code == 204
    second = await running.get("/v1/jobs", limit=1, cursor=first["next_cursor"])
    assert [job["job_id"] for job in second["items"]] == [job_ids[2]]
    third = await running.get("/v1/jobs", limit=1, cursor=second["next_cursor"])
    assert [job["job_id"] for job in third["items"]] == [job_ids[0]]
    assert third["next_cursor"] is None


async def test_jobs_are_found_by_phase_and_name(running: Running) -> None:
    kept = await running.create(**GOOD_JOB | {"name": "kept"})
    ended = await running.create(**GOOD_JOB | {"name": "ended"})
    await running.api.post(f"/v1/jobs/{ended}/stop")
    found = await running.items("/v1/jobs", phase=["stopped", "failed"])
    assert [(job["job_id"], job["phase"]) for job in found] == [(ended, "stopped")]
    assert [job["job_id"] for job in await running.items("/v1/jobs", name="kept")] == [kept]
    assert await running.items("/v1/jobs", name="KEPT") == []


async def test_nodes_are_found_by_status_job_and_labels(running: Running, cluster: SimulatedCluster) -> None:
    await cluster.add(2, rack="a")
    (other,) = await cluster.add(1, rack="b")
    nodes = await all_pages(running, "/v1/nodes", limit=1)
    assert [node["node_id"] for node in nodes] == [agent.node_id for agent in cluster.agents]
    assert [node["node_id"] for node in await running.items("/v1/nodes", label="rack=b")] == [other.node_id]
    assert await running.items("/v1/nodes", label=["rack=b", "zone=z"]) == []
    assert await running.items("/v1/nodes", status="failed") == []
    job_id = await running.create(num_nodes=3)
    await running.until(job_id, "running", 1)
    assert len(await running.items("/v1/nodes", job_id=job_id, status="alive")) == 3


async def test_a_running_job_is_shown_in_every_detail(running: Running, cluster: SimulatedCluster) -> None:
    await cluster.add(3)
    job_id = await running.create(num_nodes=2, num_standbys=1, num_ranks_per_node=2)
    await running.until(job_id, "running", 1)
    await cluster.exit_rank(cluster.agents[0])
    job = await running.until(job_id, "running", 2)

    ranks = await all_pages(running, f"/v1/jobs/{job_id}/ranks", limit=3)
    assert [(rank["rank"], rank["slot"], rank["node_id"]) for rank in ranks] == [
        (rank, rank // 2, job["slots"][str(rank // 2)]) for rank in range(4)
    ]
    recovery = await running.get(f"/v1/jobs/{job_id}/recoveries/2")
    assert recovery["restored_step"] == job["restored_step"]
    assert recovery["slots"] == job["slots"]
    assert set(recovery["sources"]) == {"0", "1", "2", "3"}

    async def recorded() -> Any:
        return await running.items(f"/v1/jobs/{job_id}/versions", limit=1)

    (newest,) = await eventually(recorded, "a version to be recorded")
    cluster.paused = True
    detail = await running.get(f"/v1/jobs/{job_id}/versions/{newest['step']}")
    assert detail["is_committed"]
    assert (detail["generation"], detail["committed_at"]) == (newest["generation"], newest["committed_at"])
    assert [rank["rank"] for rank in detail["ranks"]] == [0, 1, 2, 3]
    for rank in detail["ranks"]:
        assert rank["is_sealed_everywhere"]
        assert {holder["node_id"] for holder in rank["holders"]} == set(job["slots"].values())
    restored = await running.get(f"/v1/jobs/{job_id}/versions/{job['restored_step']}")
    digests = {holder["digest"] for rank in restored["ranks"] for holder in rank["holders"]}
    assert len(digests - {None}) == 4, "one for each rank, from the inventories of the fence"

    summary = await running.get("/v1/cluster")
    assert summary["num_nodes_by_status"] == {"alive": 3, "suspected": 0, "failed": 0}
    assert (summary["num_nodes"], summary["num_free_nodes"], summary["num_jobs_by_phase"]["running"]) == (3, 0, 1)
    assert summary["is_leader"]
    events = await running.items("/v1/events", limit=1000)
    assert summary["newest_event_id"] == events[-1]["id"]


async def test_events_are_found_by_kind_and_job(running: Running) -> None:
    job_ids = [await running.create(**GOOD_JOB) for _ in range(2)]
    found = await running.items("/v1/events", kind="job_created")
    assert [event["job_id"] for event in found] == job_ids
    (audit,) = await running.items("/v1/events", kind="audit_create", job_id=job_ids[1])
    assert audit["message"].startswith("bootstrap: create job")


async def test_an_operators_labels_count_more_than_the_agents(running: Running, cluster: SimulatedCluster) -> None:
    (agent,) = await cluster.add(1, rack="a", zone="z")
    changed = await running.api.patch(f"/v1/nodes/{agent.node_id}", json={"labels": {"rack": "b"}})
    assert changed.json()["labels"] == {"rack": "b", "zone": "z"}
    assert (await running.get(f"/v1/nodes/{agent.node_id}"))["labels"] == {"rack": "b", "zone": "z"}
    back = await running.api.patch(f"/v1/nodes/{agent.node_id}", json={"labels": {"rack": None}})
    assert back.json()["labels"] == {"rack": "a", "zone": "z"}
    refused = await running.api.patch(f"/v1/nodes/{agent.node_id}", json={"labels": {"rack": "a b"}})
    assert [error["field"] for error in refused.json()["errors"]] == ["labels.rack"]


async def test_a_node_is_cordoned_uncordoned_and_removed(running: Running, cluster: SimulatedCluster) -> None:
    (agent,) = await cluster.add(1)
    path = f"/v1/nodes/{agent.node_id}"
    assert (await running.api.post(f"{path}/drain")).json()["draining"]
    assert (await running.get("/v1/cluster"))["num_draining_nodes"] == 1
    assert not (await running.api.post(f"{path}/uncordon")).json()["cordoned"]
    assert (await running.api.delete(path)).status_code == 204
    assert (await running.api.get(path)).status_code == 404
    assert await running.items("/v1/nodes") == []


async def test_health_and_metrics_need_no_token(running: Running) -> None:
    async with served(running) as api:
        del api.headers["Authorization"]
        assert (await api.get("/healthz")).json() == {"status": "ok"}
        await eventually(lambda: running.coordinator.leadership.held, "the coordinator to lead")
        assert (await api.get("/readyz")).json() == {"status": "ok", "leader": True}
        await api.get("/v1/jobs/job-1")
        metrics = await api.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "gemini_ft_coordinator_leader 1.0" in metrics.text
        for labels in ('route="/readyz",status="200"', 'route="/v1/jobs/{job_id}",status="401"'):
            assert f'gemini_ft_api_request_seconds_count{{method="GET",{labels}}} 1.0' in metrics.text
