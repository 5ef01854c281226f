"""The coordinator at work: hears, decides, acts. Woken by whatever it hears, and by a tick."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig
from pydantic import ValidationError
from sqlalchemy.pool import QueuePool

from gemini_ft.contracts.errors import UnavailableError
from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.contracts.messages import Assign, Heartbeat, Order, OrderReply, Verdict, VerdictKind
from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.contracts.subjects import HEARTBEATS, VERDICT_CONSUMER, VERDICT_STREAM, VERDICTS
from gemini_ft.coordinator import broker
from gemini_ft.coordinator.actions import Action, AssignPlan, Explain, RecordVersion, Revive, Send
from gemini_ft.coordinator.cluster_view import ClusterView
from gemini_ft.coordinator.database import DATABASE_ERRORS, create_engine, describe, migrate
from gemini_ft.coordinator.event_feed import EventFeed
from gemini_ft.coordinator.leader import Leadership
from gemini_ft.coordinator.metrics import CoordinatorMetrics
from gemini_ft.coordinator.observations import Observations
from gemini_ft.coordinator.orders import Orders
from gemini_ft.coordinator.queries import Queries
from gemini_ft.coordinator.reconcile import decisions
from gemini_ft.coordinator.registration import Registration
from gemini_ft.coordinator.settings import CoordinatorSettings
from gemini_ft.coordinator.store import Store
from gemini_ft.coordinator.tokens import Tokens
from gemini_ft.coordinator.wishes import Wishes
from gemini_ft.security.nats_access import NatsAccess

__all__ = ["Coordinator"]

_log = logging.getLogger("gemini_ft.coordinator")
_FETCH_S = 1.0
_REDELIVER_S = 2.0
_RETRY_S = 0.2
_MAX_ROUNDS = 20


class Coordinator:
    """One coordinator process; `open` before `run`."""

    def __init__(
        self,
        database_url: str,
        access: NatsAccess,
        settings: CoordinatorSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.seen = Observations(clock)
        self.engine = create_engine(database_url, settings, settings.num_api_connections)
        self._control_engine = create_engine(database_url, settings, settings.num_control_connections)
        self.store = Store(self._control_engine, settings.num_kept_versions)
        self.wishes = Wishes(self.engine.begin)
        self.queries = Queries(self.engine)
        self.view = ClusterView(lambda: self.store.load(self.seen.job_ids()), clock, settings.tick)
        self.feed = EventFeed(self.queries, settings.tick)
        self.metrics = CoordinatorMetrics(self)
        self.leadership = Leadership(database_url, settings, lambda: self.is_connected, self._leadership_changed)
        self._clock = clock
        self._nats_url = access.url
        self._nats_options = access.options(NatsRole.COORDINATOR)
        self._news = asyncio.Event()
        self._leading = asyncio.Event()
        self._verdicts: list[Msg] = []
        self._recorded_at: dict[tuple[JobId, type[Action]], float] = {}
        self._client: Client | None = None
        self._orders: Orders | None = None

    async def open(self) -> None:
        """Migrate the database, connect to NATS and listen.

        Raises:
            AuthenticationError: Postgres or NATS refuse this coordinator.
            UnavailableError: one of them does not answer in time.
        """
        await self._migrate()
        client = await broker.connect(
            self._nats_url, self._nats_options, self.settings.startup_timeout, on_reconnect=self._on_reconnect
        )
        self._client = client
        self._orders = Orders(client, self._clock, self.settings.order_repeat, self._on_reply)
        self.seen.listening_since = self._clock()
        await client.subscribe(HEARTBEATS, cb=self._on_heartbeat)
        await self._orders.start()
        tokens = Tokens(self._control_engine)
        await Registration(client, self.store, self.seen, self._clock, self.settings, tokens, self.wake).start()
        await client.flush()

    async def run(self) -> None:
        """Lead whenever possible, until cancelled."""
        running = {
            asyncio.create_task(part)
            for part in (
                self.leadership.run(),
                self._hear_verdicts(),
                self._reconcile(),
                self.view.run(),
                self.feed.run(),
            )
        }
        try:
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for part in ended:
                part.result()
        finally:
            # Once is not enough: Python 3.11's wait_for, which the NATS client uses, may swallow a cancellation.
            while running:
                for part in running:
                    part.cancel()
                _, running = await asyncio.wait(running, timeout=_RETRY_S)

    async def close(self) -> None:
        """Let go of both connections."""
        if self._client is not None:
            await self._client.close()
        for engine in (self.engine, self._control_engine):
            await engine.dispose()

    def wake(self) -> None:
        """The database has changed: look at it now."""
        self.view.invalidate()
        self._news.set()

    @property
    def is_connected(self) -> bool:
        """Whether NATS can be talked to now."""
        return self._client is not None and self._client.is_connected

    def num_database_connections(self) -> dict[str, int]:
        """Count the connections of both pools by what they do."""
        counts = {"in_use": 0, "idle": 0}
        for engine in (self.engine, self._control_engine):
            assert isinstance(engine.pool, QueuePool)
            counts["in_use"] += engine.pool.checkedout()
            counts["idle"] += engine.pool.checkedin()
        return counts

    async def unready(self) -> str | None:
        """Why this process cannot serve at present; None if it can."""
        if not self.is_connected:
            return f"NATS at {self._nats_url} is not connected"
        try:
            async with asyncio.timeout(self.settings.database_timeout.total_seconds()):
                await self.queries.write()
        except DATABASE_ERRORS as error:
            return f"the database takes no writes: {describe(error)}"
        return None

    async def ask(self, subject: str, question: bytes, timeout: timedelta) -> bytes:
        """Ask whoever listens on `subject`.

        Raises:
            TimeoutError: no answer has come in time.
            nats.errors.Error: nobody listens, or NATS is away.
        """
        assert self._client is not None
        return (await self._client.request(subject, question, timeout=timeout.total_seconds())).data

    # ---- hearing

    async def _on_heartbeat(self, message: Msg) -> None:
        try:
            heartbeat = Heartbeat.model_validate_json(message.data)
        except ValidationError as error:
            _log.warning("ignored a message on %s that is no heartbeat: %s", message.subject, _first(error))
            return
        self.metrics.heartbeats.inc()
        if self.seen.hear(heartbeat):
            self._news.set()

    def _on_reply(self, node_id: NodeId, order: Order, reply: OrderReply) -> None:
        self.seen.hear_reply(node_id, order, reply)
        self._news.set()

    async def _on_reconnect(self) -> None:
        _log.info("connected to NATS again")
        self.metrics.nats_reconnects.inc()
        if self._orders is not None:
            self._orders.repeat_all()
        self._news.set()

    def _leadership_changed(self) -> None:
        if self.leadership.held:
            self._leading.set()
        else:
            self._leading.clear()
        self.wake()

    async def _hear_verdicts(self) -> None:
        while True:
            await self._leading.wait()
            try:
                await self._hear_verdicts_while_leading()
            except broker.BROKER_ERRORS as error:
                _log.warning("verdicts cannot be heard: %s", error)
            await asyncio.sleep(_RETRY_S)

    async def _hear_verdicts_while_leading(self) -> None:
        assert self._client is not None
        await broker.ensure_verdict_stream(self._client)
        await broker.ensure_imports_bucket(self._client)
        subscription = await self._client.jetstream().pull_subscribe(
            VERDICTS, durable=VERDICT_CONSUMER, stream=VERDICT_STREAM, config=ConsumerConfig(ack_wait=_REDELIVER_S)
        )
        try:
            while self.leadership.held:
                with contextlib.suppress(TimeoutError):  # there was none
                    # One at a time: a larger batch is handed over only when it is full or the time is up.
                    self._verdicts += await subscription.fetch(1, timeout=_FETCH_S)
                    self._news.set()
        finally:
            await subscription.unsubscribe()

    # ---- deciding and acting

    async def _reconcile(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # time itself may be news
                async with asyncio.timeout(self.settings.tick.total_seconds()):
                    await self._news.wait()
            self._news.clear()
            if not self.leadership.held:
                continue
            try:
                with self.metrics.pass_seconds.time():
                    await self._pass()
            except DATABASE_ERRORS as error:
                _log.warning("will try again: %s", describe(error))
                await asyncio.sleep(_RETRY_S)
            except broker.BROKER_ERRORS as error:
                _log.warning("will try again: NATS: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _pass(self) -> None:
        verdicts = list(self._verdicts)
        for message in verdicts:
            await self._take_verdict(message)
        phases: list[tuple[JobId, int, dict[str, float]]] = []
        for _ in range(_MAX_ROUNDS):
            cluster = await self.view.current()
            for job in cluster.jobs.values():
                self.seen.note_phase(job.job_id, job.generation, job.phase)
            begun_at = self._clock()
            actions: list[Action] = []
            for part in decisions(cluster, self.seen, begun_at, self.settings):
                actions += part
                await asyncio.sleep(0)  # requests and heartbeats need not wait for all of it
            changed = [await self._act(action, begun_at, phases) for action in actions]
            if not any(changed):
                break
            self.view.invalidate(for_readers=False)
        for job_id, generation, added in phases:
            await self.store.add_phases(job_id, generation, added)
            self.metrics.recoveries.add_phases(generation, added)
        # Only now are the verdicts' effects stored: had this process died before, they would be delivered again.
        for message in verdicts:
            self._verdicts.remove(message)
            await message.ack()
        lives = [(node.node_id, node.incarnation) for node in cluster.nodes.values()]
        self._recorded_at = {key: at for key, at in self._recorded_at.items() if key[0] in cluster.jobs}
        generations = {job.job_id: job.generation for job in cluster.jobs.values()}
        self.seen.forget(generations, lives, 10 * self.settings.silence.total_seconds())

    async def _act(self, action: Action, begun_at: float, phases: list[tuple[JobId, int, dict[str, float]]]) -> bool:
        """Carry out an action; True if it has changed what the next decision is made from."""
        match action:
            case Send():
                assert self._orders is not None
                if await self._orders.submit(action) and isinstance(action.order, Assign):
                    about = action.order.model_dump(include={"job_id", "generation"}) | {"node_id": action.node_id}
                    _log.info("assign generation %d to %s", action.order.generation, action.node_id, extra=about)
                return False
            case Revive():
                return await self.store.revive(action)
            case RecordVersion() | Explain():
                key = (action.job_id, type(action))
                last = self._recorded_at.get(key, float("-inf"))
                if self._clock() - last >= self.settings.record_interval.total_seconds():
                    self._recorded_at[key] = self._clock()
                    await self.store.apply(action)  # to be read with the next tick, nobody waits for it
                return False
            case _:
                applied = await self.store.apply(action)
                about = {"job_id": action.job_id, "generation": action.generation}
                _log.info("%s %s", "done:" if applied else "too late:", action, extra=about)
                if applied:
                    self.metrics.recoveries.note(action)
                if applied and isinstance(action, AssignPlan):
                    self.seen.note_assigned(action.job_id, action.generation)
                    phases.append((action.job_id, action.generation, {"plan": self._clock() - begun_at}))
                # Refused means that the state has moved on, which is news as well.
                return True

    async def _take_verdict(self, message: Msg) -> None:
        try:
            verdict = Verdict.model_validate_json(message.data)
        except ValidationError as error:
            _log.warning("ignored a message on %s that is no verdict: %s", message.subject, _first(error))
            return
        if verdict.kind in (VerdictKind.RANK_EXITED, VerdictKind.RANK_HUNG):
            self.seen.hear_rank_verdict(verdict)
        elif self.seen.hear_node_verdict(verdict):
            await self.store.record_verdict(verdict)
            self.view.invalidate(for_readers=False)

    async def _migrate(self) -> None:
        deadline = self._clock() + self.settings.startup_timeout.total_seconds()
        while True:
            try:
                return await migrate(self._control_engine)
            except DATABASE_ERRORS as error:
                if self._clock() > deadline:
                    raise UnavailableError(
                        f"the database cannot be used: {describe(error)}; check --database-url-file"
                    ) from error
                _log.warning("the database cannot be used yet: %s", describe(error))
            await asyncio.sleep(_RETRY_S)


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
