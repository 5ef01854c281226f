"""The agent's line to a real NATS server that comes and goes."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from agent_harness import JOB, NODE, Client, Coordinator, assign, eventually, start_job

from gemini_ft.agent.persistence import StateFolder
from gemini_ft.contracts.errors import ConflictError, UnavailableError
from gemini_ft.contracts.local_protocol import RankHello
from gemini_ft.contracts.messages import Fence, Inventory, OrderDone, OrderRefused
from gemini_ft.contracts.subjects import order_subject
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.security.secret_files import write_secret


@pytest.fixture
def token_file(tmp_path: Path, nats_server: NatsServer) -> Path:
    return write_secret(tmp_path / "token", f"{nats_server.token}\n")


async def test_an_agent_registers_beats_and_obeys(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path
) -> None:
    async with run_agent(nats_server.url, nats_token_file=token_file, labels={"rack": "a"}) as agent:
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
        assert isinstance(await coordinator.order(NODE, start_job()), OrderDone)
        assert isinstance(await coordinator.order(NODE, Fence(job_id=JOB, generation=1)), Inventory)
        assert isinstance(await coordinator.order(NODE, assign(1)), OrderDone)
        await eventually("the assignment to show", lambda: coordinator.last(NODE).assigned_generation == 1)
        refused = await coordinator.order(NODE, Fence(job_id="job-9", generation=1))
        assert isinstance(refused, OrderRefused)
        assert refused.error["code"] == "not_found"
        registration = coordinator.registrations[0]
        assert (registration.node_id, registration.labels) == (NODE, {"rack": "a"})
        assert registration.address == agent.heartbeat().address
        sequences = [beat.sequence for beat in coordinator.heartbeats]
        assert sequences == sorted(set(sequences))


async def test_an_order_that_cannot_be_read_is_dropped(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path
) -> None:
    async with run_agent(nats_server.url, nats_token_file=token_file):
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
        await coordinator.connection.publish(order_subject(NODE), b'{"kind": "explode"}')
        assert isinstance(await coordinator.order(NODE, start_job()), OrderDone)


async def test_what_matters_is_told_without_waiting_for_the_interval(
    run_agent,
    nats_server: NatsServer,
    coordinator: Coordinator,
    token_file: Path,
    start_client: Callable[[Path], Awaitable[Client]],
) -> None:
    async with run_agent(nats_server.url, nats_token_file=token_file, heartbeat_interval_s=3600) as agent:
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
        await agent.order(start_job())
        await agent.order(Fence(job_id=JOB, generation=1))
        await agent.order(assign(1))
        rank = await start_client(agent.socket_path)
        await rank.ask(RankHello(request_id=1, generation=1, rank=0, job_id=JOB, pid=1, world_size=1))
        await eventually("the rank to show", lambda: coordinator.last(NODE).ranks)
        rank.exit(7)
        await rank.ended()
        await eventually("its end to show", lambda: coordinator.last(NODE).ranks[0].exit_code == 7)


async def test_the_broker_may_be_killed_and_come_back(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path
) -> None:
    async with run_agent(nats_server.url, nats_token_file=token_file) as agent:
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
        for num_kills in (1, 2):
            nats_server.kill()
            # The agent works meanwhile.
            assert isinstance(await agent.order(start_job()), OrderDone)
            num_heartbeats, num_registrations = len(coordinator.heartbeats), len(coordinator.registrations)
            nats_server.start()
            await eventually(
                f"heartbeats after kill {num_kills}", lambda n=num_heartbeats: len(coordinator.heartbeats) > n
            )
            await eventually(
                f"a registration after kill {num_kills}",
                lambda n=num_registrations: len(coordinator.registrations) > n,
            )
            assert isinstance(await coordinator.order(NODE, start_job()), OrderDone)


async def test_an_agent_that_starts_before_the_broker_connects_when_it_is_there(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path
) -> None:
    nats_server.kill()
    async with run_agent(nats_server.url, nats_token_file=token_file):
        nats_server.start()
        await eventually("a heartbeat", lambda: coordinator.last(NODE))


async def test_a_wrong_token_is_named_once_and_tried_again(
    run_agent,
    nats_server: NatsServer,
    coordinator: Coordinator,
    token_file: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guessed = write_secret(tmp_path / "guessed", "guessed")
    async with run_agent(nats_server.url, nats_token_file=guessed):
        await eventually("the complaint", lambda: "Authorization Violation" in caplog.text)
        os.replace(token_file, guessed)
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
    assert caplog.text.count("out of reach") == 1


async def test_a_known_agent_beats_and_obeys_although_the_coordinator_is_silent(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path
) -> None:
    coordinator.refusal = UnavailableError("the database is away").to_wire()
    async with run_agent(nats_server.url, nats_token_file=token_file):
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
        await eventually("a second try to register", lambda: len(coordinator.registrations) > 1)
        assert isinstance(await coordinator.order(NODE, start_job()), OrderDone)


async def test_an_identity_that_somebody_else_uses_ends_the_agent(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path
) -> None:
    coordinator.refusal = ConflictError("node-me is in use at 127.0.0.2:5 and 127.0.0.3:6").to_wire()

    async def run() -> None:
        async with run_agent(nats_server.url, nats_token_file=token_file) as agent:
            await agent.ended()

    with pytest.raises(ConflictError, match="is in use"):
        await run()


async def test_an_identity_is_kept(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path, tmp_path: Path
) -> None:
    async with run_agent(nats_server.url, nats_token_file=token_file, node_id=None) as agent:
        await eventually("an identity", lambda: agent.agent.node_id)
        node_id = agent.agent.node_id
        await eventually("a heartbeat", lambda: coordinator.last(node_id))
        port = agent.heartbeat().address.port
    with StateFolder(tmp_path / "state") as state:
        assert (state.load_node().node_id, state.load_node().data_port) == (node_id, port)
    async with run_agent(nats_server.url, nats_token_file=token_file, node_id=None):
        await eventually("the second registration", lambda: len(coordinator.registrations) == 2)
    first, second = coordinator.registrations
    assert (first.node_id, second.node_id) == (None, node_id)
    assert first.address == second.address
    assert first.incarnation != second.incarnation
