"""Who may do what: every route without a token, with the wrong role, with another job's token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import asyncpg
import pytest
from coordinator_cluster import FAST, Running, SimulatedAgent, SimulatedCluster, Stack, coordinating
from served_api import GOOD_JOB, bearer, new_token

from gemini_ft.contracts.errors import AuthenticationError
from gemini_ft.contracts.messages import Address
from gemini_ft.coordinator.api.app import openapi_document
from gemini_ft.coordinator.tokens import Tokens

VALUES = {"node_id": "node-0", "token_id": "tok-0123456789ab", "step": "1", "generation": "1", "rank": "0"}


# All that the OpenAPI document names, so that a new route is tested from its first day.
ROUTES = sorted(
    (method.upper(), path)
    for path, methods in openapi_document()["paths"].items()
    if path.startswith("/v1/")
    for method in methods
)


def concrete(path: str, job_id: str) -> str:
    return path.format(job_id=job_id, **VALUES)


@pytest.fixture
async def job_id(running: Running) -> str:
    return await running.create(**GOOD_JOB)


async def kind_of(running: Running, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    answer = await running.api.request(method, path, headers=headers)
    assert answer.headers["content-type"] == "application/problem+json", (method, path, answer.text)
    return answer.status_code, answer.json()["type"].removeprefix("urn:gemini-ft:problem:")


async def test_no_route_answers_without_a_good_token(running: Running, job_id: str) -> None:
    for given in ("", "Basic x", "Bearer", "Bearer wrong", f"Bearer gft_{'a' * 43}"):
        for method, path in ROUTES:
            answer = await running.api.request(method, concrete(path, job_id), headers={"Authorization": given})
            assert answer.status_code == 401, (given, method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["type"] == "urn:gemini-ft:problem:authentication"


async def test_an_agents_token_is_good_for_no_route(running: Running, job_id: str) -> None:
    token = bearer(await new_token(running, "agent", "agent"))
    for method, path in ROUTES:
        assert await kind_of(running, method, concrete(path, job_id), token) == (403, "forbidden"), (method, path)


async def test_a_viewer_changes_nothing(running: Running, job_id: str) -> None:
    token = bearer(await new_token(running, "viewer", "viewer"))
    before = await running.items("/v1/events")
    for method, path in ROUTES:
        if method != "GET" or path.startswith("/v1/tokens"):
            assert await kind_of(running, method, concrete(path, job_id), token) == (403, "forbidden"), (method, path)
    assert await running.items("/v1/events") == before
    assert (await running.api.get(f"/v1/jobs/{job_id}", headers=token)).status_code == 200


async def test_a_token_of_another_job_does_not_find_this_one(running: Running, job_id: str) -> None:
    other = await running.create(**GOOD_JOB)
    for role in ("viewer", "operator"):
        token = bearer(await new_token(running, role, role, job_ids=[other]))
        for method, path in ROUTES:
            if "{job_id}" in path:
                expected = (403, "forbidden") if role == "viewer" and method != "GET" else (404, "not-found")
                found = await kind_of(running, method, concrete(path, job_id), token)
                assert found == expected, (role, method, path)
    assert (await running.job(job_id))["phase"] == "pending"


async def test_a_token_bound_to_jobs_changes_neither_nodes_nor_tokens_nor_creates_jobs(
    running: Running, job_id: str
) -> None:
    token = bearer(await new_token(running, "bound", "operator", job_ids=[job_id]))
    for method, path in ROUTES:
        if "{job_id}" not in path and (method != "GET" or path.startswith("/v1/tokens")):
            assert await kind_of(running, method, concrete(path, job_id), token) == (403, "forbidden"), (method, path)
    stopped = await running.api.post(f"/v1/jobs/{job_id}/stop", headers=token)
    assert stopped.json()["phase"] == "stopped"


async def test_lists_show_a_bound_token_what_belongs_to_its_jobs(running: Running, cluster: SimulatedCluster) -> None:
    await cluster.add(3)
    mine = await running.create(num_nodes=2)
    await running.until(mine, "running", 1)
    other = await running.create(num_nodes=1, num_replicas=1)
    await running.until(other, "running", 1)
    token = bearer(await new_token(running, "bound", "viewer", job_ids=[mine]))

    async def seen(path: str) -> list[dict[str, object]]:
        items: list[dict[str, object]] = (await running.api.get(path, headers=token)).json()["items"]
        return items

    assert [job["job_id"] for job in await seen("/v1/jobs")] == [mine]
    assert [node["job_id"] for node in await seen("/v1/nodes")] == [mine, mine]
    assert {event["job_id"] for event in await seen("/v1/events?limit=1000")} == {mine}
    summary = (await running.api.get("/v1/cluster", headers=token)).json()
    assert (summary["num_nodes"], sum(summary["num_jobs_by_phase"].values())) == (2, 1)
    not_mine = next(node for node in await running.items("/v1/nodes") if node["job_id"] == other)
    assert (await running.api.get(f"/v1/nodes/{not_mine['node_id']}", headers=token)).status_code == 404


async def test_the_database_never_holds_a_token(running: Running, stack: Stack) -> None:
    given = {"Idempotency-Key": "once"}
    body = {"name": "secret", "role": "viewer"}
    first = (await running.api.post("/v1/tokens", json=body, headers=given)).json()
    again = await running.api.post("/v1/tokens", json=body, headers=given)
    assert again.headers["idempotent-replay"] == "true"
    assert again.json() == first | {"token": None}
    assert "token_sha256" not in first
    connection = await asyncpg.connect(stack.database_url)
    for table in ("tokens", "idempotency_keys", "events"):
        rows = await connection.fetch(f"SELECT {table}::text AS row FROM {table}")
        assert rows
        assert not any(first["token"] in row["row"] for row in rows)
    await connection.close()


async def test_a_token_ends_with_its_lifetime_or_when_it_is_revoked(running: Running, stack: Stack) -> None:
    lasting = await new_token(running, "lasting", "viewer", lifetime_s=3600)
    revoked = await new_token(running, "revoked", "viewer")
    for token in (lasting, revoked):
        assert (await running.api.get("/v1/jobs", headers=bearer(token))).status_code == 200
    listed = {token["name"]: token for token in await running.items("/v1/tokens")}
    assert listed["lasting"]["expires_at"] is not None
    assert listed["lasting"]["last_used_at"] is not None
    assert "token" not in listed["lasting"]
    path = f"/v1/tokens/{listed['revoked']['token_id']}"
    assert [(await running.api.delete(path)).status_code for _ in range(2)] == [204, 204]
    connection = await asyncpg.connect(stack.database_url)
    await connection.execute("UPDATE tokens SET expires_at = now() - interval '1 second' WHERE name = 'lasting'")
    await connection.close()
    for token in (lasting, revoked):
        assert (await running.api.get("/v1/jobs", headers=bearer(token))).status_code == 401
    kinds = [event["kind"] for event in await running.items("/v1/events") if "token" in event["kind"]]
    assert kinds == ["audit_create_token", "audit_create_token", "audit_revoke_token"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "taken", "role": "viewer"}, 409),
        ({"name": "bootstrap", "role": "viewer"}, 409),
        ({"name": "new", "role": "root"}, 422),
        ({"name": "new", "role": "viewer", "job_ids": []}, 422),
        ({"name": "new", "role": "agent", "job_ids": ["job-1"]}, 422),
        ({"name": "new\n", "role": "viewer"}, 422),
        ({"name": "new", "role": "viewer", "lifetime_s": 0}, 422),
    ],
)
async def test_bad_tokens_are_refused(running: Running, body: dict[str, object], status: int) -> None:
    await new_token(running, "taken", "viewer")
    assert (await running.api.post("/v1/tokens", json=body)).status_code == status
    assert [token["name"] for token in await running.items("/v1/tokens")] == ["taken"]


async def test_the_use_of_a_token_is_noted_at_most_once_a_minute(running: Running) -> None:
    token = await new_token(running, "busy", "viewer")
    await asyncio.gather(*(running.api.get("/v1/jobs", headers=bearer(token)) for _ in range(5)))
    (first,) = await running.items("/v1/tokens")
    await running.api.get("/v1/jobs", headers=bearer(token))
    (second,) = await running.items("/v1/tokens")
    assert first["last_used_at"] == second["last_used_at"] is not None


async def test_a_principal_says_who_it_is_in_the_audit(running: Running) -> None:
    job_id = await running.create(**GOOD_JOB)
    token = await new_token(running, "night shift", "operator")
    await running.api.post(f"/v1/jobs/{job_id}/stop", headers=bearer(token))
    (audit,) = await running.items("/v1/events", kind="audit_stop")
    assert audit["message"] == "night shift: stop"
    principal = await Tokens(running.coordinator.engine, "other").authenticate(token)
    assert (principal.name, principal.role, principal.job_ids) == ("night shift", "operator", None)


async def test_a_node_registers_with_an_agents_token_where_one_is_asked_for(stack: Stack) -> None:
    async with coordinating(stack, replace(FAST, agents_need_tokens=True)) as running:
        client = await stack.client()
        agent = SimulatedAgent(client, Address(host="127.0.0.1", port=9))
        viewer, good = [await new_token(running, role, role) for role in ("viewer", "agent")]
        for token, named in (("", "presents no token"), ("wrong", "wrong, expired or revoked"), (viewer, "a viewer's")):
            agent.token = token
            with pytest.raises(AuthenticationError, match=named):
                await agent.register()
        agent.token = good
        await agent.register()
        assert [node["node_id"] for node in await running.items("/v1/nodes")] == [agent.node_id]
        await client.close()


async def test_a_wrong_token_is_refused_even_where_none_is_asked_for(stack: Stack, running: Running) -> None:
    client = await stack.client()
    agent = SimulatedAgent(client, Address(host="127.0.0.1", port=9), token=f"gft_{'a' * 43}")
    with pytest.raises(AuthenticationError, match="wrong, expired or revoked"):
        await agent.register()
    assert await running.items("/v1/nodes") == []
    await client.close()
