"""The holder's side of the data plane: accept, challenge, and carry out what peers ask.

The fence is read at every message, and again once its payload is here, so that it takes effect on connections
that are open. One connection is served by one task; a parked request holds up no other connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from gemini_ft.agent.replicas._changes import Changes
from gemini_ft.agent.replicas.challenge import accept_challenge
from gemini_ft.agent.replicas.connection import Connection
from gemini_ft.agent.replicas.counts import DamageFound
from gemini_ft.agent.replicas.job import Job
from gemini_ft.agent.replicas.sender import send_version
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.agent.replicas.versions import IncomingVersion, OutgoingVersion, geometry_of
from gemini_ft.contracts.buffer_format import BufferGeometry
from gemini_ft.contracts.data_protocol import (
    Acknowledged,
    AskStore,
    Begin,
    Chunk,
    Fetch,
    Held,
    Holdings,
    HoldingsReply,
    Refused,
    ReserveReplica,
    Seal,
    StoreIs,
)
from gemini_ft.contracts.errors import (
    AuthenticationError,
    CapacityError,
    ConflictError,
    GeminiError,
    IntegrityError,
    NotFoundError,
    ProtocolError,
    WaitTimeoutError,
)
from gemini_ft.contracts.frames import Message
from gemini_ft.contracts.messages import Address
from gemini_ft.faults import fault_point

__all__ = ["DataServer"]

_log = logging.getLogger(__name__)

_Request = ReserveReplica | Holdings | Begin | Chunk | Seal | Fetch | AskStore
_requests: TypeAdapter[_Request] = TypeAdapter(Annotated[_Request, Field(discriminator="kind")])

_LONGEST_PARKING = timedelta(seconds=60)
_ACCEPT_PAUSE_S = 0.1


class DataServer:
    """Listens for peers. `job` returns the job that this node takes part in, None while there is none."""

    def __init__(self, settings: ReplicaSettings, job: Callable[[], Job | None]) -> None:
        self._settings = settings
        self._job = job
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._in_challenge: set[Connection] = set()

    def start(self, preferred_port: int | None) -> Address:
        """Listen on `preferred_port` if that is free, else on any port."""
        try:
            self._listener = _listen(self._settings.host, preferred_port or 0)
        except OSError:
            if not preferred_port:
                raise
            self._listener = _listen(self._settings.host, 0)
        self._watch(self._listener)
        return Address(host=self._settings.host, port=self._listener.getsockname()[1])

    async def close_connections(self) -> None:
        """End all connections of peers."""
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await self.close_connections()

    def _watch(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            _log.error("the data plane cannot accept a connection: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_ACCEPT_PAUSE_S, self._watch, listener)
            return
        if len(self._in_challenge) >= self._settings.max_pending_handshakes:
            _log.warning("%s:%d was turned away: too many connections are in the challenge", *address[:2])
            sock.close()
            return
        connection = Connection(
            sock, f"{address[0]}:{address[1]}", self._settings.chunk_timeout, self._settings.keepalive_idle
        )
        self._in_challenge.add(connection)
        task = asyncio.create_task(self._run(connection), name=f"peer {connection.peer}")
        self._connections.add(task)
        task.add_done_callback(partial(self._ended, connection))

    def _ended(self, connection: Connection, task: asyncio.Task[None]) -> None:
        # Here and not in the task, which may be cancelled before it has begun.
        connection.close()
        self._in_challenge.discard(connection)
        self._connections.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s ended by an unexpected error", task.get_name(), exc_info=error)

    async def _run(self, connection: Connection) -> None:
        try:
            job = await self._challenge(connection)
            if job is not None:
                await self._serve(connection, job)
        except (ProtocolError, AuthenticationError) as error:
            _log.warning("closing a connection: %s", error)
        except GeminiError as error:
            _log.info("a connection ended: %s", error)

    async def _challenge(self, connection: Connection) -> Job | None:
        try:
            async with asyncio.timeout(self._settings.connect_timeout.total_seconds()):
                if self._settings.tls is not None:
                    await connection.secure(self._settings.tls, is_server=True)
                try:
                    job = self._job()
                    await accept_challenge(connection, lambda: job.credentials if job is not None else None)
                    return job
                except GeminiError as error:
                    _log.warning("refusing a connection: %s", error)
                    await connection.send(Refused(error=error.to_wire()))
                    return None
        except TimeoutError:
            raise WaitTimeoutError.of(f"the challenge of {connection.peer}", self._settings.connect_timeout) from None
        finally:
            self._in_challenge.discard(connection)

    async def _serve(self, connection: Connection, job: Job) -> None:
        peer = _Peer(connection.node_id, job, self._settings)
        try:
            while True:
                message, payload_bytes = await connection.receive(_requests, may_idle=True)
                if peer.in_refused_version and isinstance(message, Chunk | Seal):
                    await connection.discard_payload(payload_bytes)
                    continue
                try:
                    target = peer.payload_target(message, payload_bytes)
                except GeminiError as error:
                    await connection.discard_payload(payload_bytes)
                    await self._refuse(connection, peer, error)
                    continue
                await connection.receive_payload(target)
                try:
                    answer = await peer.carry_out(message, target)
                except GeminiError as error:
                    if isinstance(error, IntegrityError):
                        job.counts.num_damaged[DamageFound.RECEIVED] += 1
                    await self._refuse(connection, peer, error)
                    continue
                if isinstance(answer, OutgoingVersion):
                    await send_version(connection, answer, message.generation, job.counts)
                elif answer is not None:
                    await connection.send(answer)
                if isinstance(message, Seal):
                    fault_point("holder.after_ack")
        finally:
            peer.leave()

    async def _refuse(self, connection: Connection, peer: _Peer, error: GeminiError) -> None:
        _log.warning("refusing %s: %s", connection.peer, error)
        peer.leave()
        peer.in_refused_version = True
        await connection.send(Refused(error=error.to_wire()))
        if isinstance(error, ProtocolError):
            raise error


class _Peer:
    """Carries out the requests of one connection. Raises what `Refused` is to carry."""

    def __init__(self, node_id: str, job: Job, settings: ReplicaSettings) -> None:
        self._node_id = node_id
        self._job = job
        self._settings = settings
        self._incoming: IncomingVersion | None = None
        self.in_refused_version = False
        """What is still on its way of a version that was refused is dropped without another answer."""

    def leave(self) -> None:
        """Give up the version that is being received; its buffer stays FILLING."""
        if self._incoming is not None:
            self._incoming.give_up()
            self._incoming = None

    def payload_target(self, message: _Request, payload_bytes: int) -> memoryview:
        """Return where the payload of a message goes; for a chunk, straight into the buffer."""
        self._check(message)
        match message:
            case Chunk():
                return self._version(message).chunk_view(message, payload_bytes)
            case Seal():
                return memoryview(bytearray(payload_bytes))
            case _ if payload_bytes:
                raise ProtocolError(f"a {message.kind} came with a payload of {payload_bytes} bytes")
            case _:
                return memoryview(b"")

    async def carry_out(self, message: _Request, payload: memoryview) -> Message | OutgoingVersion | None:
        """Do what the message asks, now that its payload is here."""
        # The fence may have risen while the payload was on its way.
        self._check(message)
        match message:
            case Chunk():
                self._job.counts.received_bytes += len(payload)
                self._version(message).chunk_arrived(message)
                return None
            case Seal():
                self._version(message).seal(message, payload)
                self._incoming = None
                fault_point("holder.before_ack")
                return Acknowledged(rank=message.rank, step=message.step)
            case Begin():
                await self._begin(message)
                return None
            case Holdings():
                return HoldingsReply(rank=message.rank, held=self._held(message.rank))
            case Fetch():
                return self._find(message)
            case ReserveReplica():
                return await self._reserve(message)
            case AskStore():
                return await self._store(message)

    def _check(self, message: _Request) -> None:
        self._job.require_generation(f"a {message.kind} of {self._node_id}", message.generation)

    def _version(self, message: Chunk | Seal) -> IncomingVersion:
        if self._incoming is None:
            raise ProtocolError(f"a {message.kind} of {self._node_id} came without a begin")
        return self._incoming

    async def _begin(self, message: Begin) -> None:
        self.leave()
        self.in_refused_version = False
        self._job.require_owner(self._node_id, message.rank, message.generation)
        for _, _, copy in self._job.store.copies(message.rank):
            if (copy.step, copy.generation) == (message.step, message.version_generation):
                # It may be committed, and must not be given up for a second copy of itself.
                raise ConflictError(f"rank {message.rank} at step {message.step} is sealed here already")
        target = await self._job.store.buffer_for(
            message.rank, message.world_size, geometry_of(message), message.base_step
        )
        self._job.require_owner(self._node_id, message.rank, message.generation)
        self._incoming = IncomingVersion(target, message, self._job.credentials.job_id)

    def _held(self, rank: int) -> tuple[Held, ...]:
        return tuple(
            Held(step=copy.step, generation=copy.generation, shard_digest=copy.shard_digest.hex())
            for _, _, copy in self._job.store.copies(rank)
        )

    def _find(self, message: Fetch) -> OutgoingVersion:
        for _, buffer_file, copy in self._job.store.copies(message.rank):
            if copy.step == message.step:
                return OutgoingVersion(buffer_file.buffer, copy, None, Changes())
        raise NotFoundError(
            f"{self._job.credentials.node_id} has no verified copy of rank {message.rank} at step {message.step}"
        )

    async def _reserve(self, message: ReserveReplica) -> Acknowledged:
        self._job.require_owner(self._node_id, message.rank, message.generation)
        geometry = BufferGeometry.for_shard(message.data_bytes, message.manifest_bytes, self._settings.chunk_bytes)
        try:
            await self._job.store.reserve(message.rank, message.world_size, geometry)
        except CapacityError as error:
            raise CapacityError(f"{self._job.credentials.node_id}: {error}", **error.facts) from None
        return Acknowledged(rank=message.rank)

    async def _store(self, message: AskStore) -> StoreIs:
        timeout = min(timedelta(seconds=max(0.0, message.timeout_s)), _LONGEST_PARKING)
        address = await self._job.store_address(message.generation, timeout)
        if address is None:
            return StoreIs(generation=message.generation, host="", port=0)
        return StoreIs(generation=message.generation, host=address.host, port=address.port)


def _listen(host: str, port: int) -> socket.socket:
    family: Any = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    listener.setblocking(False)
    return listener
