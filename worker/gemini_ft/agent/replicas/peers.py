"""Connecting to the other agents of the job, and asking them one thing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Annotated

from pydantic import Field, TypeAdapter

from gemini_ft.agent.replicas.challenge import pass_challenge
from gemini_ft.agent.replicas.connection import Connection, connect
from gemini_ft.agent.replicas.job import Job
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.contracts.data_protocol import Acknowledged, HoldingsReply, Refused, StoreIs
from gemini_ft.contracts.errors import ProtocolError, WaitTimeoutError, from_wire
from gemini_ft.contracts.frames import Message

__all__ = ["Answer", "ask", "open_connection", "receive_answer", "retry_delays_s"]

Answer = Acknowledged | HoldingsReply | StoreIs | Refused
_answers: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


@asynccontextmanager
async def open_connection(job: Job, node_id: str, settings: ReplicaSettings) -> AsyncIterator[Connection]:
    """Open an authenticated connection to a node of the job, at the newest address that is known of it.

    Raises:
        UnavailableError, WaitTimeoutError: it cannot be reached.
        AuthenticationError, ConflictError, NotFoundError: who answers is not that node, or not in this job.
    """
    address = job.address(node_id)
    connection = await connect(
        address.host, address.port, node_id, settings.connect_timeout, settings.chunk_timeout, settings.keepalive_idle
    )
    try:
        try:
            async with asyncio.timeout(settings.connect_timeout.total_seconds()):
                if settings.tls is not None:
                    await connection.secure(settings.tls, is_server=False)
                await pass_challenge(connection, job.credentials, node_id)
        except TimeoutError:
            raise WaitTimeoutError.of(f"the challenge of {connection.peer}", settings.connect_timeout) from None
        yield connection
    finally:
        connection.close()


async def receive_answer(connection: Connection, *, may_idle: bool = False) -> Answer:
    """Receive the answer to a request; Refused is returned, not raised.

    Raises:
        ProtocolError: it is no answer.
    """
    answer, payload_bytes = await connection.receive(_answers, may_idle=may_idle)
    if payload_bytes:
        raise ProtocolError(f"{connection.peer} answered with a payload of {payload_bytes} bytes")
    return answer


async def ask(connection: Connection, request: Message, *, patience: timedelta | None = None) -> Answer:
    """Send a request without payload and return its answer.

    Args:
        patience: how long the peer may think; the progress timeout if not given.

    Raises:
        GeminiError: what the peer refused with, or what befell the connection.
    """
    await connection.send(request)
    if patience is None:
        answer = await receive_answer(connection)
    else:
        try:
            async with asyncio.timeout(patience.total_seconds()):
                answer = await receive_answer(connection, may_idle=True)
        except TimeoutError:
            raise WaitTimeoutError.of(f"an answer of {connection.peer}", patience) from None
    if isinstance(answer, Refused):
        raise from_wire(answer.error)
    return answer


def retry_delays_s(settings: ReplicaSettings) -> Iterator[float]:
    """Pauses between attempts to reach a peer: doubling, bounded, without end."""
    delay_s, last_s = settings.first_retry.total_seconds(), settings.last_retry.total_seconds()
    while True:
        yield delay_s
        delay_s = min(2 * delay_s, last_s)
