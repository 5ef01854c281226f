"""The agent's line to the control plane over NATS. It may be down for any time; the agent works without it.

Each connection is a fresh one: what a client library does on reconnect (subscriptions, old pings, callbacks
that never come) is not relied on. A connection counts as lost as soon as a ping of our own is not answered in time.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from pydantic import ValidationError

from gemini_ft.agent.imports_exchange import JobImports, exchange_imports
from gemini_ft.agent.rank_logs import answer_log_requests
from gemini_ft.agent.tasks import end_tasks, first_to_end
from gemini_ft.contracts.errors import ConfigurationError, ConflictError, UnavailableError, from_wire
from gemini_ft.contracts.messages import (
    Heartbeat,
    Order,
    OrderReply,
    Register,
    Registered,
    orders,
    registration_replies,
)
from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.contracts.subjects import REGISTER, heartbeat_subject, order_subject
from gemini_ft.security.nats_access import NatsAccess

__all__ = ["ControlLink", "ControlNode"]

_CONNECT_TIMEOUT_S = 3
_CLOSE_TIMEOUT_S = 2.0
_RETRY_S = 0.1
_MAX_RETRY_S = 1.0
_REGISTER_TIMEOUT_S = 2.0
_PING_INTERVAL_S = 1.0
_PING_TIMEOUT_S = 3
_MAX_ORDERS = 256

_NETWORK_ERRORS = (OSError, TimeoutError, nats.errors.Error, UnavailableError, ConfigurationError)
"""A file of credentials that cannot be used may be in the middle of its replacement."""

logger = logging.getLogger(__name__)


class ControlNode(Protocol):
    """What the link carries both ways."""

    @property
    def node_id(self) -> str | None:
        """The identity of this node, None before the coordinator has issued one."""

    def registration(self) -> Register:
        """Return what to register with now."""

    @property
    def log_dir(self) -> Path:
        """Where the ranks' logs are."""

    async def registered(self, node_id: str) -> None:
        """The coordinator has issued or confirmed an identity."""

    def heartbeat(self, sequence: int) -> Heartbeat | None:
        """Return the heartbeat to send now."""

    def imports(self) -> JobImports | None:
        """Return where this node's learned imports are, None without a job."""

    async def obey(self, order: Order) -> OrderReply:
        """Carry out an order."""


class ControlLink:
    """Registers, sends heartbeats and takes orders whenever NATS can be reached.

    Args:
        access: its files are read anew for each connection, so that they may be replaced.
    """

    def __init__(self, access: NatsAccess, interval: timedelta, node: ControlNode) -> None:
        self._access = access
        self._url = access.url
        self._interval_s = interval.total_seconds()
        self._node = node
        self._beat = asyncio.Event()
        self.is_connected = False
        self.num_connections = 0
        self.num_heartbeats = 0
        """Also the sequence number of the newest one."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._outage = _Complaint()
        self._unregistered = _Complaint()

    def beat(self) -> None:
        """Send a heartbeat at once; many calls in one turn of the loop make one."""
        self._beat.set()

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            ConflictError: the coordinator refuses this node's identity.
        """
        retry_s = _RETRY_S
        try:
            while True:
                try:
                    connection = await self._connect()
                    retry_s = _RETRY_S
                    self.num_connections += 1
                    await self._use(connection)
                except _NETWORK_ERRORS as error:
                    self._outage.make(
                        f"the control plane at {self._url} is out of reach, which stops no training: {_sentence(error)}"
                    )
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
        finally:
            await end_tasks(self._tasks)

    async def _connect(self) -> NatsClient:
        connection = NatsClient()
        try:
            # The library's own limit does not cover all of the handshake.
            async with asyncio.timeout(2 * _CONNECT_TIMEOUT_S):
                await connection.connect(
                    self._url,
                    **self._access.options(NatsRole.AGENT),
                    allow_reconnect=False,
                    # Even so it tries a refused connection again by itself, by default every 2 s.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=_RETRY_S,  # type: ignore[arg-type]
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    error_cb=_note_error,
                )
        except BaseException:
            # A refused handshake leaves the socket open.
            await _close(connection)
            raise
        return connection

    async def _use(self, connection: NatsClient) -> None:
        self.is_connected = True
        try:
            if self._node.node_id is None:
                await first_to_end(self._register(connection), self._ping(connection))
                await self._serve(connection)
            else:
                # An agent that is known is of use although the coordinator does not answer.
                await first_to_end(self._register_then_wait(connection), self._serve(connection))
        finally:
            self.is_connected = False
            await _close(connection)

    async def _register_then_wait(self, connection: NatsClient) -> None:
        before = self._node.node_id
        await self._register(connection)
        if self._node.node_id != before:
            raise UnavailableError("this node has a new identity and connects anew under it")
        await asyncio.Event().wait()

    async def _register(self, connection: NatsClient) -> None:
        retry_s = _RETRY_S
        while True:
            request = self._node.registration().model_dump_json().encode()
            try:
                message = await connection.request(REGISTER, request, timeout=_REGISTER_TIMEOUT_S)
                reply = registration_replies.validate_json(message.data)
            except (nats.errors.NoRespondersError, nats.errors.TimeoutError) as error:
                self._unregistered.make(f"no coordinator answers the registration: {_sentence(error)}")
            except ValidationError as error:
                self._unregistered.make(f"the answer to the registration cannot be read: {error.errors()[0]['msg']}")
            else:
                if isinstance(reply, Registered):
                    await self._node.registered(reply.node_id)
                    self._unregistered.clear()
                    logger.info("registered as %s", reply.node_id)
                    self.beat()
                    return
                refusal = from_wire(reply.error)
                if isinstance(refusal, ConflictError):
                    raise refusal
                self._unregistered.make(f"the coordinator refused the registration: {refusal}")
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _serve(self, connection: NatsClient) -> None:
        node_id = self._node.node_id
        assert node_id is not None
        await connection.subscribe(order_subject(node_id), cb=self._take_order)
        await answer_log_requests(connection, node_id, self._node.log_dir)
        logger.info("connected to the control plane as %s", node_id)
        await first_to_end(
            self._send_heartbeats(connection, node_id),
            self._ping(connection),
            exchange_imports(connection, self._node.imports),
        )

    async def _send_heartbeats(self, connection: NatsClient, node_id: str) -> None:
        while True:
            self._beat.clear()
            self.num_heartbeats += 1
            heartbeat = self._node.heartbeat(self.num_heartbeats)
            if heartbeat is not None:
                async with asyncio.timeout(_PING_TIMEOUT_S):
                    await connection.publish(heartbeat_subject(node_id), heartbeat.model_dump_json().encode())
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._beat.wait()
            except TimeoutError:
                continue

    async def _ping(self, connection: NatsClient) -> None:
        while connection.is_connected:
            # A flush is a ping that was answered.
            await connection.flush(timeout=_PING_TIMEOUT_S)
            self._outage.clear()
            await asyncio.sleep(_PING_INTERVAL_S)
        raise UnavailableError(f"the connection to {self._url} was lost")

    async def _take_order(self, message: Msg) -> None:
        if len(self._tasks) >= _MAX_ORDERS:
            logger.warning("an order was dropped: %d are being carried out", len(self._tasks))
            return
        # Beside the subscription, so that a long fence keeps nobody from being heard.
        task = asyncio.create_task(self._obey(message))
        self._tasks.add(task)
        task.add_done_callback(self._order_ended)

    def _order_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an order failed; it will be ordered again", exc_info=error)

    async def _obey(self, message: Msg) -> None:
        try:
            order = orders.validate_json(message.data)
        except ValidationError as error:
            logger.warning("an order cannot be read and was dropped: %s", error.errors()[0]["msg"])
            return
        reply = await self._node.obey(order)
        self.beat()
        if message.reply:
            try:
                await message.respond(reply.model_dump_json().encode())
            except _NETWORK_ERRORS as error:
                logger.warning("the answer to %s was lost: %s; it will be ordered again", order.kind, _sentence(error))


class _Complaint:
    """A warning that is logged once for as long as it is true."""

    def __init__(self) -> None:
        self._sentence = ""

    def make(self, sentence: str) -> None:
        if sentence != self._sentence:
            self._sentence = sentence
            logger.warning("%s", sentence)

    def clear(self) -> None:
        self._sentence = ""


async def _close(connection: NatsClient) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await connection.close()
    except _NETWORK_ERRORS as error:
        logger.debug("closing a lost connection: %s", error)


async def _note_error(error: Exception) -> None:
    logger.debug("NATS: %s", _sentence(error))


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__
