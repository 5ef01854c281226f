"""Coordinators in this process, and simulated agents that speak the real protocol over real NATS."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from gemini_ft.contracts.errors import WaitTimeoutError, from_wire
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import (
    Address,
    Assign,
    CheckpointNow,
    CloseJob,
    Fence,
    Heartbeat,
    HeldVersion,
    Hold,
    Inventory,
    OrderDone,
    RankState,
    RankStatus,
    Register,
    Registered,
    StartJob,
    Verdict,
    VerdictKind,
    orders,
    registration_replies,
)
from gemini_ft.contracts.subjects import REGISTER, heartbeat_subject, order_subject, verdict_subject
from gemini_ft.coordinator import broker
from gemini_ft.coordinator.api.app import create_app
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.settings import CoordinatorSettings
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.localstack.postgres import PostgresServer
from gemini_ft.security.nats_access import NatsAccess

API_TOKEN = "token-of-the-tests"
FAST = CoordinatorSettings(
    tick=timedelta(milliseconds=50),
    order_repeat=timedelta(milliseconds=200),
    silence=timedelta(milliseconds=600),
    launcher_grace=timedelta(milliseconds=600),
    record_interval=timedelta(milliseconds=50),
    leader_retry=timedelta(milliseconds=50),
    leader_ping=timedelta(milliseconds=200),
    database_timeout=timedelta(seconds=2),
)


async def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    """Return the first true value of `condition()`; it may be a coroutine function."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if asyncio.get_running_loop().time() > deadline:
            raise WaitTimeoutError.of(what, timeout_s)
        await asyncio.sleep(0.01)


@dataclass
class Stack:
    """Where a test's Postgres and NATS are."""

    postgres: PostgresServer
    nats: NatsServer
    database_url: str
    nats_url: str | None = None
    """Where the coordinator finds NATS, if not where it is."""

    @property
    def nats_token(self) -> str:
        assert self.nats.token is not None
        return self.nats.token

    @property
    def nats_access(self) -> NatsAccess:
        assert self.nats_token
        return NatsAccess(url=self.nats_url or self.nats.url, token_file=self.nats.token_file)

    async def client(self) -> Client:
        async def ignore(_: Exception) -> None:
            """The tests stop the server on purpose."""

        return await nats.connect(
            self.nats.url,
            token=self.nats_token,
            reconnect_time_wait=0.05,
            max_reconnect_attempts=-1,
            error_cb=ignore,
        )


@dataclass
class Running:
    """A coordinator in this process, with a client of its API."""

    coordinator: Coordinator
    api: httpx.AsyncClient

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.api.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def items(self, path: str, **query: Any) -> list[Any]:
        """The items of the first page of a list."""
        return list((await self.get(path, **query))["items"])

    async def job(self, job_id: str) -> Any:
        return await self.get(f"/v1/jobs/{job_id}")

    async def create(self, **spec: Any) -> str:
        answer = await self.api.post("/v1/jobs", json={"name": "test", "num_ranks_per_node": 1} | spec)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["job_id"])

    async def until(self, job_id: str, phase: str, generation: int | None = None, timeout_s: float = 10.0) -> Any:
        """Wait until the job is in `phase`, at that generation or a later one."""

        async def there() -> Any:
            job = await self.job(job_id)
            return job if job["phase"] == phase and job["generation"] >= (generation or 0) else None

        return await eventually(there, f"{job_id} to be {phase} at generation {generation}", timeout_s)


@asynccontextmanager
async def coordinating(stack: Stack, settings: CoordinatorSettings = FAST) -> AsyncIterator[Running]:
    coordinator = Coordinator(stack.database_url, stack.nats_access, settings)
    await coordinator.open()
    running = asyncio.create_task(coordinator.run())
    transport = httpx.ASGITransport(create_app(coordinator, API_TOKEN))
    headers = {"Authorization": f"Bearer {API_TOKEN}"}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator", headers=headers) as api:
            yield Running(coordinator, api)
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await coordinator.close()
        if not running.cancelled() and running.exception() is not None:
            raise running.exception()  # type: ignore[misc]


@dataclass
class SimulatedAgent:
    """Speaks for one node: takes orders, sends heartbeats, and keeps copies as if its ranks trained."""

    client: Client
    address: Address
    hostname: str = "host"
    node_id: str | None = None
    incarnation: str = field(default_factory=new_incarnation)
    copies: dict[tuple[int, int], HeldVersion] = field(default_factory=dict)
    job: StartJob | None = None
    closed: CloseJob | None = None
    ordered_generation: int = 0
    assign: Assign | None = None
    assigns: list[Assign] = field(default_factory=list)
    exited: bool = False
    finished: bool = False
    finished_step: int | None = None
    committed_step: int | None = None
    sealed_everywhere_step: int | None = None
    held_step: int | None = None
    hold_generation: int = 0
    checkpoint_request: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    token: str = ""
    restore_error: dict[str, Any] | None = None
    deaf_to: tuple[type, ...] = ()
    launcher_pid: int | None = 77
    _sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    sent_sequence: int = 0
    _running: AsyncExitStack | None = None

    async def register(self) -> None:
        request = Register(
            node_id=self.node_id,
            incarnation=self.incarnation,
            hostname=self.hostname,
            labels=self.labels,
            address=self.address,
            token=self.token,
        )
        reply = registration_replies.validate_json(
            (await self.client.request(REGISTER, request.model_dump_json().encode(), timeout=5)).data
        )
        if not isinstance(reply, Registered):
            raise from_wire(reply.error)
        self.node_id = reply.node_id

    async def start(self) -> SimulatedAgent:
        await self.register()
        await self.wake()
        return self

    async def wake(self) -> None:
        """Begin, or go on after `sleep`."""
        assert self.node_id is not None
        subscription = await self.client.subscribe(order_subject(self.node_id), cb=self._on_order)
        beating = asyncio.create_task(self._beat_forever())
        self._running = AsyncExitStack()
        self._running.push_async_callback(subscription.unsubscribe)
        self._running.callback(beating.cancel)

    async def sleep(self) -> None:
        """Fall silent, as if stopped or cut off."""
        if self._running is not None:
            await self._running.aclose()
            self._running = None

    async def restart(self, *, memory: bool) -> None:
        """A new life of the agent; with `memory` it finds its job, its copies and its running ranks again."""
        await self.sleep()
        self.incarnation = new_incarnation()
        self._sequence = itertools.count(1)
        if not memory:
            self.copies, self.job, self.assign, self.ordered_generation = {}, None, None, 0
            self.finished_step = self.committed_step = None
        await self.start()

    async def beat(self) -> None:
        ranks: tuple[RankStatus, ...] = ()
        if self.assign is not None and self.job is not None:
            ranks = tuple(
                RankStatus(
                    rank=rank,
                    generation=self.assign.generation,
                    pid=1000 + rank,
                    state=RankState.EXITED if self.exited or self.finished else RankState.RUNNING,
                    exit_code=-9 if self.exited else 0 if self.finished else None,
                    finished_step=self.finished_step,
                    committed_step=self.committed_step,
                    sealed_everywhere_step=self.sealed_everywhere_step,
                    held_step=self.held_step,
                    restored=True,
                    restored_step=self.assign.restore_step,
                    phases_s={"fetch": 0.01, "load": 0.02},
                    restore_error=self.restore_error,
                )
                for rank in self.ranks
            )
        self.sent_sequence = next(self._sequence)
        assert self.node_id is not None
        heartbeat = Heartbeat(
            node_id=self.node_id,
            incarnation=self.incarnation,
            sequence=self.sent_sequence,
            address=self.address,
            interval_s=0.05,
            job_id=self.job.job_id if self.job is not None else None,
            ordered_generation=self.ordered_generation,
            assigned_generation=self.assign.generation if self.assign is not None else 0,
            slot=self.slot,
            ranks=ranks,
            launcher_pid=self.launcher_pid,
            launcher_connected=self.launcher_pid is not None,
            finished=self.finished,
        )
        await self.client.publish(heartbeat_subject(self.node_id), heartbeat.model_dump_json().encode())

    @property
    def slot(self) -> int | None:
        if self.assign is None:
            return None
        return next((slot for slot, node_id in self.assign.slots.items() if node_id == self.node_id), None)

    @property
    def ranks(self) -> list[int]:
        if self.slot is None or self.job is None:
            return []
        num_ranks = self.job.spec.num_ranks_per_node
        return list(range(self.slot * num_ranks, (self.slot + 1) * num_ranks))

    @property
    def trains_in(self) -> int | None:
        """Generation in which this node's ranks can take a step."""
        halted = self._running is None or self.exited or self.finished or self.restore_error is not None
        return None if halted or self.assign is None else self.assign.generation

    async def _beat_forever(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(0.05)

    async def _on_order(self, message: Msg) -> None:
        order = orders.validate_json(message.data)
        if isinstance(order, self.deaf_to):
            return
        assert self.node_id is not None
        reply: OrderDone | Inventory = OrderDone(node_id=self.node_id, incarnation=self.incarnation)
        match order:
            case StartJob():
                self.job = order
            case Fence():
                assert self.job is not None
                assert order.generation >= self.ordered_generation, "the generation went back"
                self.ordered_generation = order.generation
                if self.assign is not None and self.assign.generation < order.generation:
                    self.assign = None
                    self.exited = self.finished = False
                    self.restore_error = None
                reply = Inventory(
                    node_id=self.node_id,
                    incarnation=self.incarnation,
                    generation=order.generation,
                    held=tuple(self.copies.values()),
                    committed_step=self.committed_step,
                )
            case Assign():
                assert order.generation >= self.ordered_generation
                assert len(set(order.slots.values())) == len(order.slots)
                self.assigns.append(order)
                if self.assign is None or self.assign.generation < order.generation:
                    self.finished_step = order.restore_step
                    self.sealed_everywhere_step = self.held_step = None
                    newest = -1 if order.restore_step is None else order.restore_step
                    self.copies = {key: copy for key, copy in self.copies.items() if key[1] <= newest}
                self.assign = order
            case Hold():
                assert self.assign is not None
                assert order.generation == self.ordered_generation
                self.hold_generation = order.generation
            case CheckpointNow():
                assert self.assign is not None
                self.checkpoint_request = order.request
            case CloseJob():
                self.closed = order
                self.job = self.assign = None
                self.copies = {}
                self.finished = self.exited = False
                self.finished_step = self.committed_step = None
                self.ordered_generation = self.hold_generation = self.checkpoint_request = 0
        await message.respond(reply.model_dump_json().encode())
        await self.beat()


@dataclass
class SimulatedCluster:
    """Agents whose ranks take a step together whenever all of them can, and seal it on all holders."""

    client: Client
    agents: list[SimulatedAgent] = field(default_factory=list)
    paused: bool = False

    async def add(self, num_agents: int, **labels: str) -> list[SimulatedAgent]:
        added = []
        for _ in range(num_agents):
            port = 20_000 + len(self.agents)
            agent = SimulatedAgent(self.client, Address(host="127.0.0.1", port=port), labels=labels)
            self.agents.append(await agent.start())
            added.append(agent)
        return added

    def by_id(self, node_id: str) -> SimulatedAgent:
        return next(agent for agent in self.agents if agent.node_id == node_id)

    def newest_step(self) -> int:
        """The newest version that all have committed; 0 if there is none."""
        return min(agent.committed_step or 0 for agent in self.agents)

    async def goes_on(self) -> None:
        """Training takes ten more steps."""
        step = self.newest_step()
        await eventually(lambda: self.newest_step() > step + 10, f"ten steps after step {step}")

    async def train_forever(self) -> None:
        while True:
            for assign in {agent.assign.job_id: agent.assign for agent in self.agents if agent.assign}.values():
                self._step(assign)
            await asyncio.sleep(0.02)

    def _step(self, newest: Assign) -> None:
        assigns = [a.assign for a in self.agents if a.assign is not None and a.assign.job_id == newest.job_id]
        assign = max(assigns, key=lambda assign: assign.generation)
        members = [self.by_id(node_id) for _, node_id in sorted(assign.slots.items())]
        if self.paused or any(member.trains_in != assign.generation for member in members):
            return
        if any(member.held_step is not None for member in members):
            return
        held = any(member.hold_generation == assign.generation for member in members)
        step = 0 if members[0].finished_step is None else members[0].finished_step + 1
        for slot, member in enumerate(members):
            member.committed_step = step if held else None if step == 0 else step - 1
            member.held_step = step if held else None
            member.finished_step = member.sealed_everywhere_step = step
            for rank in member.ranks:
                for holder in assign.placement[slot]:
                    copies = members[holder].copies
                    copies[rank, step] = HeldVersion(
                        rank=rank, step=step, generation=assign.generation, shard_digest=f"{rank:04x}{step:028x}"
                    )
                    copies.pop((rank, step - 2), None)

    async def verdict(self, agent: SimulatedAgent, kind: VerdictKind, **facts: Any) -> None:
        """Publish what the detector would."""
        assert agent.node_id is not None
        verdict = Verdict(
            kind=kind,
            node_id=agent.node_id,
            incarnation=agent.incarnation,
            job_id=agent.job.job_id if agent.job is not None else None,
            sequence=agent.sent_sequence,
            **facts,
        )

        async def published() -> bool:
            with suppress(*broker.BROKER_ERRORS):
                await self.client.jetstream(timeout=0.5).publish(
                    verdict_subject(verdict.node_id),
                    verdict.model_dump_json().encode(),
                    headers={"Nats-Msg-Id": verdict.verdict_id},
                )
                return True
            return False

        await eventually(published, f"the verdict {kind} to be stored")

    async def exit_rank(self, agent: SimulatedAgent) -> None:
        """A rank dies, its agent sees it, the detector says so."""
        assert agent.assign is not None
        agent.exited = True
        generation = agent.assign.generation
        await agent.beat()
        await self.verdict(
            agent, VerdictKind.RANK_EXITED, generation=generation, rank=agent.ranks[0], detail="ended by signal 9"
        )

    async def lose(self, agent: SimulatedAgent) -> None:
        """A node vanishes with its memory; the detector says so."""
        await agent.sleep()
        agent.copies = {}
        await self.verdict(agent, VerdictKind.FAILED, silent_s=0.5, detail="silent")
