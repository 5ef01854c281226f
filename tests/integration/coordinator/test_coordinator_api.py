"""What the API refuses, and how."""

from __future__ import annotations

from typing import Any

from coordinator_cluster import Running
from httpx import ASGITransport, AsyncClient

from gemini_ft.coordinator.api.app import create_app

GOOD: dict[str, Any] = {"name": "job", "num_nodes": 2, "num_ranks_per_node": 1}


async def test_a_missing_or_wrong_token_is_refused(running: Running) -> None:
    transport = ASGITransport(create_app(running.coordinator, "right"))
    async with AsyncClient(transport=transport, base_url="http://coordinator") as api:
        for given, named in ((None, "no bearer token"), ("Bearer wrong", "is wrong"), ("Basic x", "no bearer token")):
            headers = {} if given is None else {"Authorization": given}
            for path in ("/v1/jobs", "/v1/nodes", "/v1/events"):
                answer = await api.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["type"] == "urn:gemini-ft:problem:authentication"
                assert named in answer.json()["detail"]
        assert (await api.get("/healthz")).status_code == 200
        assert (await api.get("/readyz")).status_code == 200


async def test_a_bad_job_is_refused_and_the_field_named(running: Running) -> None:
    for change, kind, named in (
        ({"num_nodes": 0}, "invalid-request", "num_nodes"),
        ({"num_ranks_per_node": None}, "invalid-request", "num_ranks_per_node"),
        ({"num_replicas": 3}, "configuration", "num_replicas is 3, but num_nodes is 2"),
        ({"name": ""}, "invalid-request", "name"),
        ({"nodes": 3}, "invalid-request", "nodes"),
        ({"hang_timeout_s": -1}, "invalid-request", "hang_timeout_s"),
    ):
        answer = await running.api.post("/v1/jobs", json=GOOD | change)
        assert answer.status_code == 422
        assert answer.json()["type"] == f"urn:gemini-ft:problem:{kind}"
        assert named in answer.json()["detail"]


async def test_the_unknown_is_a_404_with_a_sentence(running: Running) -> None:
    for method, path in (
        ("GET", "/v1/jobs/job-none"),
        ("GET", "/v1/jobs/job-none/recoveries"),
        ("GET", "/v1/jobs/job-none/versions"),
        ("GET", "/v1/jobs/job-none/placement"),
        ("POST", "/v1/jobs/job-none/stop"),
        ("GET", "/v1/nodes/node-none"),
        ("GET", "/v1/nothing"),
    ):
        answer = await running.api.request(method, path)
        assert answer.status_code == 404
        assert answer.json()["type"] == "urn:gemini-ft:problem:not-found"
        assert answer.json()["detail"]


async def test_jobs_are_listed_newest_first_in_pages(running: Running) -> None:
    job_ids = [await running.create(**GOOD | {"name": f"job {number}"}) for number in range(3)]
    first = await running.get("/v1/jobs", limit=2)
    assert [job["job_id"] for job in first] == [job_ids[2], job_ids[1]]
    rest = await running.get("/v1/jobs", limit=2, before=first[-1]["job_id"])
    assert [job["job_id"] for job in rest] == [job_ids[0]]


async def test_a_decision_on_a_job_that_is_not_blocked_is_a_conflict(running: Running) -> None:
    job_id = await running.create(**GOOD)
    answer = await running.api.post(f"/v1/jobs/{job_id}/decision", json={"decision": "stop"})
    assert answer.status_code == 409
    assert "not blocked" in answer.json()["detail"]


async def test_the_surface_is_frozen(running: Running) -> None:
    document = await running.get("/v1/openapi.json")
    surface = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert surface == {
        "GET /healthz",
        "GET /readyz",
        "GET /v1/events",
        "GET /v1/jobs",
        "GET /v1/jobs/{job_id}",
        "GET /v1/jobs/{job_id}/placement",
        "GET /v1/jobs/{job_id}/recoveries",
        "GET /v1/jobs/{job_id}/versions",
        "GET /v1/nodes",
        "GET /v1/nodes/{node_id}",
        "POST /v1/jobs",
        "POST /v1/jobs/{job_id}/decision",
        "POST /v1/jobs/{job_id}/stop",
    }
