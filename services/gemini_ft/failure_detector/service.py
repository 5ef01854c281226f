"""The detector on NATS: heartbeats in by core NATS, verdicts out through JetStream."""

import asyncio
import contextlib
import logging
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError
from nats.protocol.parser import AUTHORIZATION_VIOLATION
from pydantic import ValidationError

from gemini_ft.contracts import subjects
from gemini_ft.contracts.errors import AuthenticationError
from gemini_ft.contracts.messages import Heartbeat, Verdict, VerdictKind
from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.failure_detector.judge import Judge, NodeState
from gemini_ft.failure_detector.settings import DetectorSettings
from gemini_ft.security.nats_access import NatsAccess

__all__ = ["FailureDetector"]

_log = logging.getLogger("gemini_ft.failure_detector")
_CONNECT_TIMEOUT_S = 2
_CLOSE_TIMEOUT_S = 2.0
_REQUEST_TIMEOUT_S = 2.0
_PROBE_PERIOD_S = 0.25
_PROBE_LIMIT_S = 5.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 1.0
_DAY_S = 86_400.0


class _ConnectionLostError(Exception):
    """This connection is of no use any more."""


class FailureDetector:
    """Runs a `Judge` against NATS until it is cancelled; NATS may go away and come back at any time.

    A verdict is published again and again, with its id for JetStream to recognise it by, until it is stored.
    """

    def __init__(
        self,
        access: NatsAccess,
        settings: DetectorSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = access.url
        self._options = access.options(NatsRole.FAILURE_DETECTOR)
        self._settings = settings
        self._clock = clock
        self._judge = Judge(settings, clock())
        self._held_for = ""
        self._outbox: deque[Verdict] = deque()
        self._outbox_filled = asyncio.Event()
        self.num_heartbeats = 0
        self.num_verdicts: Counter[VerdictKind] = Counter()
        self.num_connections = 0
        self.is_connected = False
        self.ready = asyncio.Event()
        """Set once heartbeats have been subscribed to."""

    async def run(self) -> None:
        """Serve until cancelled. Raises AuthenticationError if NATS or the detector refuses the other."""
        retry_s = _FIRST_RETRY_S
        while True:
            connected_at = None
            try:
                client = await self._connect()
                connected_at = self._clock()
                self.num_connections += 1
                self.is_connected = True
                try:
                    await self._serve(client)
                finally:
                    self.is_connected = False
                    await client.close()
            except* (nats.errors.Error, OSError, TimeoutError, _ConnectionLostError) as lost:
                retry_s = _FIRST_RETRY_S if connected_at is not None else min(2 * retry_s, _LONGEST_RETRY_S)
                _log.warning("NATS at %s cannot be used: %s; trying again in %.1f s", self._url, _first(lost), retry_s)
            await asyncio.sleep(retry_s)

    def suspicions(self) -> dict[str, tuple[NodeState, float]]:
        """See Judge."""
        return self._judge.suspicions(self._clock())

    @property
    def holds_verdicts(self) -> bool:
        """Whether nobody is judged at present."""
        return bool(self._judge.held_for)

    @property
    def num_unpublished(self) -> int:
        """Verdicts that are not stored yet."""
        return len(self._outbox)

    async def _connect(self) -> Client:
        client = Client()
        try:
            # One connection is one session of the detector: it makes the next one itself, with grace for all nodes.
            await client.connect(
                self._url,
                **self._options,
                name="gemini-ft failure detector",
                connect_timeout=_CONNECT_TIMEOUT_S,
                allow_reconnect=False,
                error_cb=_log_error,
            )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            # nats-py leaves the socket open, and never closes it after a TLS handshake that has failed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await client.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise AuthenticationError(
                    f"the certificate of NATS at {self._url} is not accepted: {error.verify_message}; "
                    "check --nats-ca-file",
                    url=self._url,
                ) from error
            if AUTHORIZATION_VIOLATION in str(error).lower():  # nats-py has no type for it here
                raise AuthenticationError(
                    f"NATS at {self._url} refuses the failure detector; check its credentials or token file",
                    url=self._url,
                ) from error
            raise
        return client

    async def _serve(self, client: Client) -> None:
        await self._ensure_streams(client)
        async with asyncio.TaskGroup() as tasks:
            self._judge.reconnected(self._clock())
            await client.subscribe(subjects.HEARTBEATS, cb=self._on_heartbeat)
            await self._recall(client)
            _log.info("hearing heartbeats through NATS at %s", self._url)
            self.ready.set()
            tasks.create_task(self._probe(client))
            tasks.create_task(self._judge_all())
            tasks.create_task(self._publish(client))

    async def _ensure_streams(self, client: Client) -> None:
        jetstream = client.jetstream(timeout=_REQUEST_TIMEOUT_S)
        wanted = (
            StreamConfig(name=subjects.VERDICT_STREAM, subjects=[subjects.VERDICTS], max_age=7 * _DAY_S),
            StreamConfig(
                name=subjects.HEARTBEAT_STREAM, subjects=[subjects.HEARTBEATS], max_age=_DAY_S, max_msgs_per_subject=1
            ),
        )
        for config in wanted:
            assert config.name is not None
            try:
                await jetstream.stream_info(config.name)
            except NotFoundError:
                await jetstream.add_stream(config)

    async def _recall(self, client: Client) -> None:
        jetstream = client.jetstream(timeout=_REQUEST_TIMEOUT_S)
        info = await jetstream.stream_info(subjects.HEARTBEAT_STREAM, subjects_filter=subjects.HEARTBEATS)
        for subject in info.state.subjects or {}:
            try:
                kept = await jetstream.get_last_msg(subjects.HEARTBEAT_STREAM, subject)
            except NotFoundError:
                continue  # it has aged out meanwhile
            heartbeat = _parse(subject, kept.data or b"")
            if heartbeat is not None:
                self._judge.remember(heartbeat, self._clock())

    async def _on_heartbeat(self, message: Msg) -> None:
        heartbeat = _parse(message.subject, message.data)
        if heartbeat is not None:
            self.num_heartbeats += 1
            self._conclude(self._judge.hear(heartbeat, self._clock()))

    async def _probe(self, client: Client) -> None:
        """Send messages to ourselves: a connection that looks open may be dead."""
        inbox = client.new_inbox()
        echoed_at = self._clock()

        async def on_echo(_: Msg) -> None:
            nonlocal echoed_at
            echoed_at = self._clock()
            self._judge.echo(echoed_at)

        await client.subscribe(inbox, cb=on_echo)
        while not client.is_closed:
            if self._clock() - echoed_at > _PROBE_LIMIT_S:
                raise _ConnectionLostError(f"it has not returned a message for {_PROBE_LIMIT_S:g} s")
            await client.publish(inbox)
            await asyncio.sleep(_PROBE_PERIOD_S)
        raise _ConnectionLostError("the connection was closed")

    async def _judge_all(self) -> None:
        while True:
            self._conclude(self._judge.tick(self._clock()))
            if self._judge.held_for != self._held_for:
                self._held_for = self._judge.held_for
                _log.warning("holding all verdicts: %s", self._held_for) if self._held_for else _log.info(
                    "judging again"
                )
            await asyncio.sleep(self._settings.tick_s)

    def _conclude(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            self.num_verdicts[verdict.kind] += 1
            about = verdict.model_dump(include={"job_id", "node_id", "rank", "generation"})
            _log.info("%s %s: %s", verdict.node_id, verdict.kind, verdict.detail, extra=about)
        self._outbox.extend(verdicts)
        if self._outbox:
            self._outbox_filled.set()

    async def _publish(self, client: Client) -> None:
        jetstream = client.jetstream(timeout=_REQUEST_TIMEOUT_S)
        while True:
            await self._outbox_filled.wait()
            while self._outbox:
                verdict = self._outbox[0]
                await jetstream.publish(
                    subjects.verdict_subject(verdict.node_id),
                    verdict.model_dump_json().encode(),
                    stream=subjects.VERDICT_STREAM,
                    headers={"Nats-Msg-Id": verdict.verdict_id},
                )
                self._outbox.popleft()
            self._outbox_filled.clear()


def _parse(subject: str, data: bytes) -> Heartbeat | None:
    try:
        heartbeat = Heartbeat.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        _log.warning("ignored a message on %s that is no heartbeat: %s: %s", subject, where, first["msg"])
        return None
    if subject != subjects.heartbeat_subject(heartbeat.node_id):
        _log.warning("ignored a heartbeat of %s on %s, which is not its subject", heartbeat.node_id, subject)
        return None
    return heartbeat


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _log_error(error: Exception) -> None:
    _log.warning("NATS client: %s", error)
