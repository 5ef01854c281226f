"""Changes may be repeated, and may be bound to what was seen."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from coordinator_cluster import Running, SimulatedCluster, Stack
from served_api import GOOD_JOB, bearer, new_token


async def test_the_same_request_with_the_same_key_is_done_once(running: Running) -> None:
    key = {"Idempotency-Key": "one"}
    answers = await asyncio.gather(*(running.api.post("/v1/jobs", json=GOOD_JOB, headers=key) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {201}
    assert all(answer.json() == answers[0].json() for answer in answers)
    assert len({answer.headers["etag"] for answer in answers}) == 1
    assert sorted(answer.headers.get("idempotent-replay", "") for answer in answers) == [""] + ["true"] * 4
    assert len(await running.items("/v1/jobs")) == 1
    job_id = answers[0].json()["job_id"]
    await running.api.post(f"/v1/jobs/{job_id}/stop")
    later = await running.api.post("/v1/jobs", json=GOOD_JOB, headers=key)
    assert later.json()["phase"] == "pending", "the first answer, whatever has happened since"


async def test_a_key_belongs_to_one_request_of_one_token(running: Running) -> None:
    key = {"Idempotency-Key": "one"}
    first = await running.api.post("/v1/jobs", json=GOOD_JOB, headers=key)
    for method, path, body in (
        ("POST", "/v1/jobs", GOOD_JOB | {"name": "other"}),
        ("POST", f"/v1/jobs/{first.json()['job_id']}/stop", {}),
    ):
        other = await running.api.request(method, path, json=body, headers=key)
        assert other.status_code == 422
        assert other.json()["type"] == "urn:gemini-ft:problem:idempotency-key-reused"
    token = await new_token(running, "other", "operator")
    mine = await running.api.post("/v1/jobs", json=GOOD_JOB, headers=key | bearer(token))
    assert mine.json()["job_id"] != first.json()["job_id"]


async def test_what_was_refused_may_be_tried_again_with_the_same_key(running: Running) -> None:
    job_id = await running.create(**GOOD_JOB)
    key = {"Idempotency-Key": "resume"}
    for _ in range(2):
        refused = await running.api.post(f"/v1/jobs/{job_id}/resume", headers=key)
        assert refused.status_code == 409
        assert "idempotent-replay" not in refused.headers


async def test_keys_are_forgotten_after_a_day(running: Running, stack: Stack) -> None:
    key = {"Idempotency-Key": "one"}
    await running.api.post("/v1/jobs", json=GOOD_JOB, headers=key)
    connection = await asyncpg.connect(stack.database_url)
    await connection.execute("UPDATE idempotency_keys SET created_at = now() - interval '25 hours'")
    await connection.close()
    again = await running.api.post("/v1/jobs", json=GOOD_JOB, headers=key)
    assert "idempotent-replay" not in again.headers
    assert len(await running.items("/v1/jobs")) == 2


@pytest.mark.parametrize("key", ["", "a b", "x" * 201, "tab\t", "\xe9"])
async def test_a_key_is_visible_ascii(running: Running, key: str) -> None:
    headers = {"Idempotency-Key": key.encode("latin-1")}
    answer = await running.api.post("/v1/jobs", json=GOOD_JOB, headers=headers)
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == ["idempotency-key"]


async def test_a_job_that_has_changed_is_left_as_it_is(running: Running, cluster: SimulatedCluster) -> None:
    job_id = await running.create(num_nodes=2)
    path = f"/v1/jobs/{job_id}"
    seen = (await running.api.get(path)).headers["etag"]
    await cluster.add(2)
    await running.until(job_id, "running", 1)
    for method, where in (("POST", f"{path}/stop"), ("POST", f"{path}/checkpoint"), ("DELETE", path)):
        stale = await running.api.request(method, where, headers={"If-Match": seen})
        assert stale.status_code == 412, where
        assert stale.json()["type"] == "urn:gemini-ft:problem:precondition-failed"
    fresh = (await running.api.get(path)).headers["etag"]
    assert fresh != seen
    assert (await running.api.get(path)).headers["etag"] == fresh, "heartbeats do not change it"
    asked = await running.api.post(f"{path}/checkpoint", headers={"If-Match": f'"x", {fresh}'})
    assert asked.status_code == 200
    assert asked.json()["checkpoint_requests"] == 1
    assert asked.headers["etag"] not in (seen, fresh)
    assert (await running.api.get(path)).headers["etag"] == asked.headers["etag"]
    stopped = await running.api.post(f"{path}/stop", json={"now": True}, headers={"If-Match": "*"})
    assert stopped.json()["phase"] == "stopped"


async def test_a_node_that_has_changed_is_left_as_it_is(running: Running, cluster: SimulatedCluster) -> None:
    (agent,) = await cluster.add(1)
    path = f"/v1/nodes/{agent.node_id}"
    seen = (await running.api.get(path)).headers["etag"]
    cordoned = await running.api.post(f"{path}/cordon", headers={"If-Match": seen})
    assert cordoned.headers["etag"] == (await running.api.get(path)).headers["etag"] != seen
    for method, where in (("PATCH", path), ("POST", f"{path}/drain"), ("DELETE", path)):
        stale = await running.api.request(
            method, where, headers={"If-Match": seen}, json={"labels": {}} if method == "PATCH" else None
        )
        assert stale.status_code == 412, where
    assert not (await running.get(path))["draining"]
    assert (await running.api.delete(path, headers={"If-Match": cordoned.headers["etag"]})).status_code == 204


async def test_a_cancelled_request_leaks_no_connection(running: Running) -> None:
    for _ in range(40):
        asking = asyncio.create_task(running.api.post("/v1/jobs", json=GOOD_JOB, headers={"Idempotency-Key": "k"}))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))
    assert (await running.api.post("/v1/jobs", json=GOOD_JOB)).status_code == 201
