"""What each role may do on a real NATS server, and what it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from gemini_ft.contracts import subjects
from gemini_ft.contracts.errors import WaitTimeoutError
from gemini_ft.contracts.permissions import NatsRole, inbox_prefix
from gemini_ft.coordinator import broker
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.security.nats_access import NatsAccess
from gemini_ft.security.nats_config import credentials_file, role_authorization

SOON_S = 5.0
AGENT, COORDINATOR, DETECTOR = NatsRole.AGENT, NatsRole.COORDINATOR, NatsRole.FAILURE_DETECTOR
IMPORTS_STREAM = f"KV_{subjects.IMPORTS_BUCKET}"


class Member:
    """A connection with the credentials of a role, and what the server has refused it."""

    def __init__(self) -> None:
        self.client = Client()
        self.refusals: list[str] = []

    async def connect(self, access: NatsAccess, role: NatsRole) -> None:
        await self.client.connect(access.url, **access.options(role), error_cb=self._note, allow_reconnect=False)

    async def refusal(self, operation: Awaitable[object]) -> str:
        """What the server says to an operation that it refuses."""
        before = len(self.refusals)
        await operation
        await self.refused_more_than(before)
        return self.refusals[before].lower()

    async def refused_more_than(self, before: int) -> None:
        """Wait for the next refusal."""
        try:
            async with asyncio.timeout(SOON_S):
                while len(self.refusals) <= before:
                    await self.client.flush()
        except TimeoutError:
            raise WaitTimeoutError.of("the server to refuse it", SOON_S) from None

    async def _note(self, error: Exception) -> None:
        self.refusals.append(str(error))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    users = {"authorization": role_authorization(tmp_path / "credentials")}
    with NatsServer(tmp_path / "nats", extra=users) as server:
        yield server


Join = Callable[[NatsRole], Awaitable[Member]]


@pytest.fixture
async def join(server: NatsServer, tmp_path: Path) -> AsyncIterator[Join]:
    members: list[Member] = []

    async def join(role: NatsRole) -> Member:
        access = NatsAccess(url=server.url, credentials_file=credentials_file(tmp_path / "credentials", role))
        members.append(Member())
        await members[-1].connect(access, role)
        return members[-1]

    yield join
    for member in members:
        await member.client.close()


FORBIDDEN_TO_PUBLISH = {
    AGENT: [
        subjects.order_subject("node-1"),
        subjects.verdict_subject("node-1"),
        subjects.log_subject("node-1"),
        f"{inbox_prefix(COORDINATOR)}.guessed",
        f"{inbox_prefix(AGENT)}.of-another-agent",
        # A stream of an agent's own would copy what it may not read, and republish what it may not publish.
        f"$JS.API.STREAM.CREATE.{IMPORTS_STREAM}",
        f"$JS.API.STREAM.UPDATE.{IMPORTS_STREAM}",
        f"$JS.API.STREAM.DELETE.{subjects.VERDICT_STREAM}",
        f"$JS.API.STREAM.MSG.GET.{subjects.HEARTBEAT_STREAM}",
        f"$JS.API.DIRECT.GET.{IMPORTS_STREAM}",
        f"$JS.API.CONSUMER.CREATE.{IMPORTS_STREAM}",
        f"$JS.ACK.{subjects.VERDICT_STREAM}.{subjects.VERDICT_CONSUMER}.1.1.1.1.0",
        "$KV.another_bucket.job-1",
    ],
    DETECTOR: [
        subjects.order_subject("node-1"),
        subjects.REGISTER,
        subjects.heartbeat_subject("node-1"),
        f"$JS.API.STREAM.DELETE.{subjects.VERDICT_STREAM}",
        f"$KV.{subjects.IMPORTS_BUCKET}.job-1",
    ],
    COORDINATOR: [
        subjects.verdict_subject("node-1"),
        subjects.heartbeat_subject("node-1"),
        subjects.REGISTER,
        f"$JS.API.STREAM.DELETE.{subjects.VERDICT_STREAM}",
    ],
}
FORBIDDEN_TO_READ = {
    AGENT: [
        ">",
        "gemini.>",
        subjects.HEARTBEATS,
        subjects.REGISTER,
        subjects.VERDICTS,
        "_INBOX.>",
        f"{inbox_prefix(COORDINATOR)}.>",
        "$KV.>",
        "$JS.API.>",
    ],
    DETECTOR: [">", subjects.order_subject("*"), subjects.REGISTER, subjects.VERDICTS, f"{inbox_prefix(AGENT)}.>"],
    COORDINATOR: [">", subjects.order_subject("*"), subjects.VERDICTS, f"{inbox_prefix(AGENT)}.>"],
}


@pytest.mark.parametrize(
    ("role", "subject"), [(role, name) for role, all_ in FORBIDDEN_TO_PUBLISH.items() for name in all_]
)
async def test_a_role_is_refused_to_publish(join: Join, role: NatsRole, subject: str) -> None:
    member = await join(role)
    refusal = await member.refusal(member.client.publish(subject, b"{}"))
    assert f'permissions violation for publish to "{subject.lower()}"' in refusal


@pytest.mark.parametrize(
    ("role", "subject"), [(role, name) for role, all_ in FORBIDDEN_TO_READ.items() for name in all_]
)
async def test_a_role_is_refused_to_read(join: Join, role: NatsRole, subject: str) -> None:
    member = await join(role)
    refusal = await member.refusal(member.client.subscribe(subject))
    assert f'permissions violation for subscription to "{subject.lower()}"' in refusal


async def test_an_order_is_answered_by_whom_it_reached_and_once(join: Join) -> None:
    agent, coordinator = await join(AGENT), await join(COORDINATOR)
    asked: list[Msg] = []

    async def answer(message: Msg) -> None:
        asked.append(message)
        await message.respond(b"done")

    await agent.client.subscribe(subjects.order_subject("node-1"), cb=answer)
    await agent.client.flush()
    reply = await coordinator.client.request(subjects.order_subject("node-1"), b"order", timeout=SOON_S)
    assert reply.data == b"done"
    assert agent.refusals == []
    assert "violation" in await agent.refusal(agent.client.publish(asked[0].reply, b"done again"))
    other = await join(AGENT)
    assert "violation" in await other.refusal(other.client.publish(asked[0].reply, b"done by another"))


async def test_a_registration_is_answered_to_agents_only(join: Join) -> None:
    agent, coordinator = await join(AGENT), await join(COORDINATOR)

    async def answer(message: Msg) -> None:
        await message.respond(b"registered")

    await coordinator.client.subscribe(subjects.REGISTER, queue="coordinators", cb=answer)
    await coordinator.client.flush()
    assert (await agent.client.request(subjects.REGISTER, b"", timeout=SOON_S)).data == b"registered"
    # By its answer the coordinator would otherwise publish where an agent may not.
    await agent.client.publish(subjects.REGISTER, b"", reply=subjects.verdict_subject("node-1"))
    await coordinator.refused_more_than(0)
    assert subjects.verdict_subject("node-1") in coordinator.refusals[0]


async def test_imports_are_exchanged_in_the_bucket_that_the_coordinator_makes(join: Join) -> None:
    coordinator, agent = await join(COORDINATOR), await join(AGENT)
    await broker.ensure_imports_bucket(coordinator.client)
    await broker.ensure_imports_bucket(coordinator.client)
    bucket = await agent.client.jetstream().key_value(subjects.IMPORTS_BUCKET)
    await bucket.put("job-1", b'["torch"]')
    assert (await bucket.get("job-1")).value == b'["torch"]'
    assert agent.refusals == coordinator.refusals == []


@pytest.mark.parametrize("options", [{}, {"user": "agent", "password": "guessed"}, {"token": "guessed"}])
async def test_who_has_no_credentials_is_refused(server: NatsServer, options: dict[str, str]) -> None:
    client = Client()

    async def ignore(_: Exception) -> None:
        """`connect` raises it as well."""

    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        await client.connect(server.url, **options, allow_reconnect=False, error_cb=ignore)
    await client.close()
