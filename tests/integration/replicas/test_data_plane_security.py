"""Nobody speaks on the data plane without the key of the job, and nothing malformed gets through."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

import pytest
from pydantic import TypeAdapter
from replica_cluster import JOB_ID, Cluster, eventually
from tcp_proxy import TcpProxy

from gemini_ft.agent.replicas.challenge import Credentials, pass_challenge
from gemini_ft.agent.replicas.connection import Connection, connect
from gemini_ft.agent.replicas.peers import open_connection
from gemini_ft.contracts.data_protocol import Challenge, Hello, Holdings, Refused
from gemini_ft.contracts.errors import (
    AuthenticationError,
    ConflictError,
    GeminiError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
    WaitTimeoutError,
    from_wire,
)
from gemini_ft.contracts.frames import Message, encode_frame
from gemini_ft.contracts.handshake import new_job_key, new_nonce
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import Address

SECOND = timedelta(seconds=1)
replies: TypeAdapter[Challenge | Refused] = TypeAdapter(Challenge | Refused)


async def raw(address: Address) -> Connection:
    return await connect(address.host, address.port, "a stranger's target", SECOND, 5 * SECOND, 10 * SECOND)


def stranger(job_key: str, job_id: str = JOB_ID) -> Credentials:
    return Credentials(job_id, job_key, "node-0", new_incarnation())


async def refusal(connection: Connection) -> GeminiError:
    reply, _ = await connection.receive(replies)
    assert isinstance(reply, Refused)
    return from_wire(reply.error)


async def assert_closed(connection: Connection) -> None:
    with pytest.raises(UnavailableError):
        await connection.receive(replies)


@pytest.fixture
async def target(cluster: Cluster) -> Address:
    await cluster.start(2, connect_timeout=SECOND)
    await cluster.begin()
    return cluster.nodes["node-1"].address


async def test_a_wrong_key_is_refused_by_either_side(cluster: Cluster, target: Address) -> None:
    connection = await raw(target)
    with pytest.raises(AuthenticationError, match="does not hold the key"):
        await pass_challenge(connection, stranger(new_job_key()), "node-1")
    connection.close()


async def test_a_client_that_cannot_prove_itself_gets_nothing_but_a_refusal(target: Address) -> None:
    class FalseProof(Message):
        kind: str = "proof"
        proof: str

    connection = await raw(target)
    await connection.send(Hello(job_id=JOB_ID, node_id="node-0", incarnation=new_incarnation(), nonce=new_nonce()))
    assert isinstance((await connection.receive(replies))[0], Challenge)
    await connection.send(FalseProof(proof=new_nonce()))
    assert isinstance(await refusal(connection), AuthenticationError)
    await assert_closed(connection)
    connection.close()


async def test_another_job_is_not_found(cluster: Cluster, target: Address) -> None:
    connection = await raw(target)
    with pytest.raises(NotFoundError, match="job-other"):
        await pass_challenge(connection, stranger(cluster.job_key, "job-other"), "node-1")
    connection.close()


async def test_a_recorded_handshake_is_worth_nothing(cluster: Cluster, target: Address) -> None:
    proxy = TcpProxy(target)
    address = await proxy.start()
    connection = await raw(address)
    await pass_challenge(connection, stranger(cluster.job_key), "node-1")
    connection.close()
    await proxy.close()
    hello, proof = split_frames(proxy.recorded[0])
    replayed = await raw(target)
    await asyncio.get_running_loop().sock_sendall(replayed._sock, hello)
    assert isinstance((await replayed.receive(replies))[0], Challenge)
    await asyncio.get_running_loop().sock_sendall(replayed._sock, proof)
    assert isinstance(await refusal(replayed), AuthenticationError)
    await assert_closed(replayed)
    replayed.close()


def split_frames(stream: bytes) -> tuple[bytes, bytes]:
    first = 24 + int.from_bytes(stream[8:12], "little")
    return stream[:first], stream[first:]


async def test_another_node_at_the_address_is_noticed(cluster: Cluster, target: Address) -> None:
    connection = await raw(target)
    with pytest.raises(ConflictError, match="is node-1 by now, not node-7"):
        await pass_challenge(connection, stranger(cluster.job_key), "node-7")
    connection.close()


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.1\r\nHost: node-1\r\n\r\n",
        os.urandom(100),
        encode_frame(Holdings(generation=1, rank=0)),
        encode_frame(Holdings(generation=1, rank=0), payload_bytes=60 << 20),
    ],
    ids=["http", "noise", "request", "large"],
)
async def test_what_is_no_handshake_is_refused_before_it_is_read(target: Address, bytes_sent: bytes) -> None:
    connection = await raw(target)
    await asyncio.get_running_loop().sock_sendall(connection._sock, bytes_sent)
    assert isinstance(await refusal(connection), ProtocolError)
    await assert_closed(connection)
    connection.close()


async def test_a_silent_stranger_is_hung_up_on(target: Address) -> None:
    connection = await raw(target)
    await asyncio.get_running_loop().sock_sendall(connection._sock, b"GmFT")
    await assert_closed(connection)
    connection.close()


async def test_a_stranger_that_dribbles_is_hung_up_on(target: Address) -> None:
    connection = await raw(target)
    frame = encode_frame(Hello(job_id=JOB_ID, node_id="node-0", incarnation=new_incarnation(), nonce=new_nonce()))
    with pytest.raises(ConnectionError):
        await dribble(connection, frame[:-1])
    connection.close()


async def dribble(connection: Connection, data: bytes) -> None:
    """Make progress all the time, but slowly."""
    for byte in data:
        await asyncio.get_running_loop().sock_sendall(connection._sock, bytes([byte]))
        await asyncio.sleep(0.05)


async def test_strangers_without_number_do_not_shut_peers_out_for_long(cluster: Cluster, target: Address) -> None:
    strangers = [await raw(target) for _ in range(70)]
    await eventually("those above the limit to be turned away", lambda: len(closed(strangers)) >= 6)
    for connection in strangers:
        connection.close()
    await cluster.rank(0).reserve(1000)


def closed(connections: list[Connection]) -> list[Connection]:
    gone = []
    for connection in connections:
        try:
            if connection._sock.recv(1) == b"":
                gone.append(connection)
        except BlockingIOError:
            continue
        except ConnectionError:
            gone.append(connection)
    return gone


@pytest.mark.parametrize(
    "noise",
    [os.urandom(64), encode_frame(Holdings(generation=1, rank=0))[:-1] + b"X"],
    ids=["random bytes", "a damaged frame"],
)
async def test_garbage_after_the_handshake_ends_that_connection_only(
    cluster: Cluster, target: Address, noise: bytes
) -> None:
    job = cluster.nodes["node-0"].service._job
    assert job is not None
    async with open_connection(job, "node-1", cluster.nodes["node-0"].settings) as connection:
        await asyncio.get_running_loop().sock_sendall(connection._sock, noise)
        await assert_closed(connection)
    rank, _ = await cluster.ranks(1000)
    rank.checkpoint(0, b"x" * 1000, None)
    await rank.sealed_everywhere(0)


async def test_a_port_where_nobody_listens_is_named(cluster: Cluster) -> None:
    await cluster.start(1, num_replicas=1)
    address = cluster.nodes["node-0"].address
    await cluster.nodes["node-0"].service.close()
    with pytest.raises(UnavailableError, match=f"target at 127.0.0.1:{address.port} cannot be reached"):
        await raw(address)


async def test_a_peer_that_goes_silent_is_given_up(cluster: Cluster, target: Address) -> None:
    proxy = TcpProxy(target)
    address = await proxy.start()
    proxy.hold.clear()
    connection = await connect(address.host, address.port, "node-1", SECOND, SECOND / 10, SECOND)
    with pytest.raises(WaitTimeoutError, match=f"progress on the connection to node-1 at 127.0.0.1:{address.port}"):
        await pass_challenge(connection, stranger(cluster.job_key), "node-1")
    connection.close()
    await proxy.close()
