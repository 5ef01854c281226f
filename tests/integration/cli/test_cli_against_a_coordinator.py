"""Every command against a real coordinator: what people type, what they see, and the exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Finished, gemini_ft
from coordinator_cluster import API_TOKEN, Running, SimulatedCluster, eventually
from served_api import served
from simulated_logs import answering_for_logs

from gemini_ft.contracts.api import EventModel, JobModel, LogModel, NodeModel, NodeStatus, TokenModel
from gemini_ft.localstack._ports import ReservedPort


class Person:
    """Types commands, in an environment of their own."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def types(self, *arguments: object, code: int = 0) -> Finished:
        """Run a command that ends with that exit code."""
        finished = await asyncio.to_thread(gemini_ft, *arguments)
        assert finished.code == code, finished
        return finished

    async def reads(self, *arguments: object) -> Any:
        """Run a command with --json, and return what it prints."""
        return json.loads((await self.types(*arguments, "--json")).stdout)

    async def is_refused(self, code: int, *arguments: object) -> str:
        """Run a command that is refused, and return the one sentence that says why."""
        finished = await self.types(*arguments, code=code)
        assert finished.stdout == ""
        assert finished.stderr.startswith("error: ")
        return finished.stderr

    async def starts(self, *arguments: str) -> asyncio.subprocess.Process:
        """Start a command in a process of its own."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gemini_ft.cli.main", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


@pytest.fixture
async def person(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Person]:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(API_TOKEN)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("GEMINI_FT_CONTEXT", raising=False)
    async with served(running) as api:
        monkeypatch.setenv("GEMINI_FT_API", str(api.base_url))
        monkeypatch.setenv("GEMINI_FT_API_TOKEN_FILE", str(token))
        yield Person(str(api.base_url))


async def _job(person: Person, cluster: SimulatedCluster) -> str:
    """A job that runs on two nodes."""
    await cluster.add(2, rack="r1")
    submitted = await person.types("jobs", "submit", "--nodes", 2, "train.py", "--lr", "0.1")
    job_id = submitted.stdout.strip()
    await person.types("jobs", "watch", job_id, "--until", "running", "--timeout-s", 20)
    return job_id


async def test_a_job_is_submitted_as_it_is_described(person: Person) -> None:
    job = JobModel.model_validate(
        await person.reads(
            *("jobs", "submit", "--json", "--nodes", 3, "--nproc-per-node", 8, "--replicas", 3, "--standbys", 1),
            *("--name", "gpt", "--env", "A=1", "--env", "B=x=y", "--node-selector", "pool=h200", "--spread", "rack"),
            *(
                "--checkpoint-interval-steps",
                5,
                "--hang-timeout-s",
                9,
                "--working-directory",
                "/data",
                "-m",
                "my.training",
            ),
        )
    )
    spec = job.spec
    assert (spec.num_nodes, spec.num_ranks_per_node, spec.num_replicas, spec.num_standbys) == (3, 8, 3, 1)
    assert (spec.name, spec.environment, spec.node_selector) == ("gpt", {"A": "1", "B": "x=y"}, {"pool": "h200"})
    assert (spec.spread, spec.checkpoint_interval_steps, spec.hang_timeout_s) == (("rack",), 5, 9.0)
    # What follows the script, `--json` of the helper above too, is the script's.
    assert (spec.working_directory, spec.command) == ("/data", ("-m", "my.training", "--json"))


async def test_a_job_is_seen_stopped_resumed_and_deleted(person: Person, cluster: SimulatedCluster) -> None:
    job_id = await _job(person, cluster)
    await _has_trained(person, job_id)
    (listed,) = await person.reads("jobs", "list", "--phase", "running", "--limit", 1)
    assert JobModel.model_validate(listed).spec.command == ("train.py", "--lr", "0.1")
    assert job_id in (await person.types("jobs", "list", "--name", "train.py")).stdout
    assert (await person.reads("jobs", "list", "--phase", "failed")) == []
    assert "command     train.py --lr 0.1" in (await person.types("jobs", "get", job_id)).stdout
    placed = await person.reads("jobs", "placement", job_id)
    assert placed["placement"] == {"0": [0, 1], "1": [1, 0]}
    assert placed["slots"]["0"] in (await person.types("jobs", "placement", job_id)).stdout
    assert [rank["rank"] for rank in await person.reads("jobs", "ranks", job_id)] == [0, 1]
    assert "running" in (await person.types("jobs", "ranks", job_id)).stdout
    await person.types("jobs", "checkpoint", job_id)
    step = (await person.reads("versions", "list", job_id, "--limit", 1))[0]["step"]
    assert str(step) in (await person.types("jobs", "versions", job_id)).stdout
    assert (await person.reads("versions", "get", job_id, step))["is_committed"]
    assert "committed   yes" in (await person.types("versions", "get", job_id, step)).stdout

    await person.types("jobs", "stop", job_id)
    await person.types("jobs", "watch", job_id, "--until", "suspended", "--timeout-s", 20)
    await person.types("jobs", "resume", job_id)
    await person.types("jobs", "watch", job_id, "--until", "running", "--timeout-s", 20)
    (recovery,) = await person.reads("recoveries", "list", job_id)
    assert "bootstrap resumed the job" in (await person.types("recoveries", "list", job_id)).stdout
    generation = recovery["generation"]
    assert (await person.reads("recoveries", "get", job_id, generation))["num_steps_lost"] == 0
    assert "in all" in (await person.types("recoveries", "get", job_id, generation)).stdout

    assert "force=true" in await person.is_refused(5, "jobs", "delete", job_id)
    await person.types("jobs", "stop", job_id, "--now")
    assert "stopped" in (await person.types("jobs", "watch", job_id, code=1)).stdout
    await person.types("jobs", "delete", job_id)
    assert f"there is no job {job_id}" in await person.is_refused(4, "jobs", "get", job_id)


async def _has_trained(person: Person, job_id: str) -> None:
    async def has_versions() -> bool:
        return len(await person.reads("versions", "list", job_id)) > 1

    await eventually(has_versions, "some versions to be recorded")


async def test_a_decision_is_for_blocked_jobs(person: Person, running: Running) -> None:
    job_id = await running.create(num_nodes=2)
    assert "not blocked" in await person.is_refused(5, "jobs", "decide", job_id, "restart_from_zero")


async def test_a_wait_that_runs_out_says_what_for(person: Person, running: Running) -> None:
    job_id = await running.create(num_nodes=2)
    finished = await person.types("jobs", "watch", job_id, "--timeout-s", 0, code=6)
    assert f"waited 0 s for {job_id} to be at its end, it is pending" in finished.stderr


async def test_logs_are_printed_to_their_end_or_followed(person: Person, cluster: SimulatedCluster) -> None:
    job_id = await _job(person, cluster)
    async with answering_for_logs(cluster) as logs:
        logs.written[1, 1] = b"".join(b"line %d\n" % number for number in range(100_000))
        printed = (await person.types("jobs", "logs", job_id, "--rank", 1, "--tail", 100_000)).stdout
        assert printed.encode() == logs.written[1, 1]
        tail = await person.types("jobs", "logs", job_id, "--rank", 1, "--tail", 2, "--json")
        assert LogModel.model_validate_json(tail.stdout).text == "line 99998\nline 99999\n"
        following = await person.starts("jobs", "logs", job_id, "--rank", "1", "--tail", "1", "--follow")
        assert following.stdout is not None
        async with asyncio.timeout(20):
            assert await following.stdout.readline() == b"line 99999\n"
            logs.written[1, 1] += b"the end\n"
            assert await following.stdout.readline() == b"the end\n"
            await person.types("jobs", "stop", job_id, "--now")
            assert await following.wait() == 0
        assert "there is no such log" in await person.is_refused(4, "jobs", "logs", job_id, "--rank", 0)


async def test_nodes_are_seen_labelled_cordoned_drained_and_removed(person: Person, cluster: SimulatedCluster) -> None:
    job_id = await _job(person, cluster)
    (spare,) = await cluster.add(1, rack="r2")
    nodes = [NodeModel.model_validate(node) for node in await person.reads("nodes", "list")]
    assert [node.job_id for node in nodes] == [job_id, job_id, None]
    assert [node["node_id"] for node in await person.reads("nodes", "list", "--label", "rack=r2")] == [spare.node_id]
    assert len(await person.reads("nodes", "list", "--job", job_id, "--status", NodeStatus.ALIVE)) == 2
    node_id = nodes[0].node_id
    assert "rack=r1" in (await person.types("nodes", "list")).stdout
    labelled = await person.reads("nodes", "label", node_id, "zone=a", "rack=r9")
    assert labelled["labels"] == {"rack": "r9", "zone": "a"}
    assert (await person.reads("nodes", "label", node_id, "rack-"))["labels"] == {"rack": "r1", "zone": "a"}
    assert "alive, cordoned" in (await person.types("nodes", "cordon", str(spare.node_id))).stdout
    assert not (await person.reads("nodes", "uncordon", str(spare.node_id)))["cordoned"]
    assert "drain it first" in await person.is_refused(5, "nodes", "remove", node_id)
    assert "alive, draining" in (await person.types("nodes", "drain", node_id)).stdout

    async def is_free() -> bool:
        return bool((await person.reads("nodes", "get", node_id))["job_id"] is None)

    await eventually(is_free, "the drained node to be free", 20)
    await person.types("nodes", "remove", node_id)
    assert f"there is no node {node_id}" in await person.is_refused(4, "nodes", "get", node_id)
    assert "a label is 'rack'; give NAME=VALUE" in await person.is_refused(2, "nodes", "label", node_id, "rack")


async def test_events_are_the_newest_or_those_after_one_and_are_followed(person: Person, running: Running) -> None:
    for number in range(30):
        await running.create(num_nodes=2, name=f"job {number}")
    every = [EventModel.model_validate(event) for event in await person.reads("events", "--after", 0, "--limit", 1000)]
    assert [event.id for event in every] == sorted(event.id for event in every)
    newest = await person.reads("events", "--limit", 5)
    assert [event["id"] for event in newest] == [event.id for event in every[-5:]]
    created = await person.reads("events", "--kind", "job_created", "--limit", 25)
    assert [event["message"] for event in created] == [f"job 'job {number}' was created" for number in range(5, 30)]
    (about,) = await person.reads("events", "--job", every[0].job_id, "--kind", "job_created")
    assert about["id"] == every[0].id
    assert "job_created" in (await person.types("events", "--after", every[3].id, "--limit", 4)).stdout
    following = await person.starts("events", "--follow", "--json", "--kind", "job_created", "--limit", "1")
    assert following.stdout is not None
    async with asyncio.timeout(20):
        for number in (29, 30, 31):
            if number > 29:
                await running.create(num_nodes=2, name=f"job {number}")
            line = await following.stdout.readline()
            assert EventModel.model_validate_json(line).message == f"job 'job {number}' was created"
        following.send_signal(signal.SIGINT)
        assert await following.wait() == 130
        assert following.stderr is not None
        assert await following.stderr.read() == b""


async def test_watching_prints_what_changes_until_it_is_interrupted(person: Person, running: Running) -> None:
    job_id = await running.create(num_nodes=2)
    watching = await person.starts("jobs", "get", job_id, "--watch", "--json")
    assert watching.stdout is not None
    async with asyncio.timeout(20):
        assert JobModel.model_validate_json(await watching.stdout.readline()).phase == "pending"
        await person.types("jobs", "stop", job_id)
        assert JobModel.model_validate_json(await watching.stdout.readline()).phase == "stopped"
        watching.send_signal(signal.SIGINT)
        assert await watching.wait() == 130


async def test_tokens_are_made_for_others(person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "viewer"
    await person.types("tokens", "create", "viewer", "--role", "viewer", "--lifetime", "1h", "--file", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = (await person.types("tokens", "create", "other", "--role", "operator")).stdout.strip()
    assert secret.startswith("gft_")
    viewer, other = [TokenModel.model_validate(token) for token in await person.reads("tokens", "list")]
    assert viewer.expires_at is not None
    assert "viewer" in (await person.types("tokens", "list")).stdout
    assert "choose another name" in await person.is_refused(5, "tokens", "create", "other", "--role", "viewer")
    assert "a number with s, m, h or d" in await person.is_refused(
        2, "tokens", "create", "x", "--role", "viewer", "--lifetime", "1w"
    )
    await person.types("tokens", "revoke", other.token_id)
    monkeypatch.setenv("GEMINI_FT_API_TOKEN_FILE", str(file))
    await person.types("jobs", "list")
    assert "is a viewer's: it changes nothing" in await person.is_refused(3, "jobs", "submit", "train.py")
    file.write_text(secret)
    assert "wrong, expired or revoked" in await person.is_refused(3, "jobs", "list")


async def test_who_has_logged_in_needs_no_environment(
    person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = os.environ["GEMINI_FT_API_TOKEN_FILE"]
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("wrong")
    for name in ("GEMINI_FT_API", "GEMINI_FT_API_TOKEN_FILE"):
        monkeypatch.delenv(name)
    assert "wrong, expired" in await person.is_refused(3, "login", person.url, "--token-file", wrong)
    assert "`gemini-ft login URL`" in await person.is_refused(2, "jobs", "list")
    told = await person.types("login", f"{person.url}/v1", "--name", "here", "--token-file", token)
    assert told.stderr == f"here is in use: 0 nodes at {person.url}\n"
    assert await person.reads("jobs", "list") == []
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{API_TOKEN}\n"))
    await person.types("login", person.url, "--name", "piped")
    assert [found["is_current"] for found in await person.reads("contexts", "list")] == [False, True]
    nobody = ReservedPort()
    monkeypatch.setenv("GEMINI_FT_API", f"http://{nobody.address}")
    monkeypatch.setenv("GEMINI_FT_API_TOKEN_FILE", token)
    assert "cannot be reached" in await person.is_refused(6, "jobs", "list")
    assert await person.reads("jobs", "list", "--context", "here") == []
    nobody.release()
