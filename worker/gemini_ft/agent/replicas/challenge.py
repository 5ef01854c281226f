"""Both sides of the mutual challenge that opens a connection. Until it is passed, only small frames are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, TypeAdapter

from gemini_ft.agent.replicas.connection import Connection
from gemini_ft.contracts.data_protocol import Challenge, Hello, Proof, Refused, Welcome
from gemini_ft.contracts.errors import ConflictError, NotFoundError, from_wire
from gemini_ft.contracts.handshake import check_proof, make_proof, new_nonce

__all__ = ["MAX_HANDSHAKE_FRAME_BYTES", "Credentials", "accept_challenge", "pass_challenge"]

MAX_HANDSHAKE_FRAME_BYTES: Final = 4096

_hellos: TypeAdapter[Hello] = TypeAdapter(Hello)
_proofs: TypeAdapter[Proof] = TypeAdapter(Proof)
_challenges: TypeAdapter[Challenge | Refused] = TypeAdapter(Annotated[Challenge | Refused, Field(discriminator="kind")])
_welcomes: TypeAdapter[Welcome | Refused] = TypeAdapter(Annotated[Welcome | Refused, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who this agent is in its job, and the key that proves it."""

    job_id: str
    job_key: str
    node_id: str
    incarnation: str


async def pass_challenge(connection: Connection, own: Credentials, expected_node: str) -> None:
    """Challenge the accepting side and answer its challenge.

    Raises:
        AuthenticationError: one side does not hold the job's key.
        ConflictError: another node than `expected_node` listens at this address.
        NotFoundError: the peer does not take part in the job.
    """
    nonce = new_nonce()
    await connection.send(Hello(job_id=own.job_id, node_id=own.node_id, incarnation=own.incarnation, nonce=nonce))
    challenge, _ = await connection.receive(_challenges, max_frame_bytes=MAX_HANDSHAKE_FRAME_BYTES)
    if isinstance(challenge, Refused):
        raise from_wire(challenge.error)
    names = (own.job_id, own.node_id, challenge.node_id, nonce, challenge.nonce)
    server_proof = make_proof(own.job_key, "server", *names, connection.binding)
    check_proof(challenge.proof, server_proof, connection.peer, own.job_id)
    if challenge.node_id != expected_node:
        raise ConflictError(f"{connection.peer} is {challenge.node_id} by now, not {expected_node}")
    await connection.send(Proof(proof=make_proof(own.job_key, "client", *names, connection.binding)))
    welcome, _ = await connection.receive(_welcomes, max_frame_bytes=MAX_HANDSHAKE_FRAME_BYTES)
    if isinstance(welcome, Refused):
        raise from_wire(welcome.error)
    connection.node_id = challenge.node_id


async def accept_challenge(connection: Connection, own: Callable[[], Credentials | None]) -> None:
    """The accepting side; `own` is read once, when the peer has named its job.

    Raises:
        AuthenticationError: the peer does not hold the job's key.
        NotFoundError: the peer asks for a job that this node does not take part in.
    """
    hello, _ = await connection.receive(_hellos, max_frame_bytes=MAX_HANDSHAKE_FRAME_BYTES)
    credentials = own()
    if credentials is None or hello.job_id != credentials.job_id:
        raise NotFoundError(f"{connection.peer}: this node does not take part in {hello.job_id}")
    nonce = new_nonce()
    names = (hello.job_id, hello.node_id, credentials.node_id, hello.nonce, nonce)
    server_proof = make_proof(credentials.job_key, "server", *names, connection.binding)
    await connection.send(Challenge(node_id=credentials.node_id, nonce=nonce, proof=server_proof))
    answer, _ = await connection.receive(_proofs, max_frame_bytes=MAX_HANDSHAKE_FRAME_BYTES)
    who = f"{hello.node_id} at {connection.peer}"
    client_proof = make_proof(credentials.job_key, "client", *names, connection.binding)
    check_proof(answer.proof, client_proof, who, hello.job_id)
    await connection.send(Welcome())
    connection.peer, connection.node_id = who, hello.node_id
