"""Encrypted connections between agents: what passes, who is refused, and what somebody in between gets."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from certificates import Certificate, CertificateAuthority
from pydantic import TypeAdapter
from replica_cluster import JOB_ID, Cluster, eventually, shard_bytes
from tcp_proxy import TcpProxy

from gemini_ft.agent.replicas.challenge import Credentials, pass_challenge
from gemini_ft.agent.replicas.connection import Connection, connect
from gemini_ft.agent.replicas.peers import open_connection
from gemini_ft.agent.replicas.tls import PeerTls
from gemini_ft.contracts.data_protocol import Fetch, Hello, Refused
from gemini_ft.contracts.errors import (
    AuthenticationError,
    ConfigurationError,
    FencedError,
    GeminiError,
    UnavailableError,
    from_wire,
)
from gemini_ft.contracts.handshake import new_nonce
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import Address

SECOND = timedelta(seconds=1)
SIZE_BYTES = 5_000_000
refusals: TypeAdapter[Refused] = TypeAdapter(Refused)


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ca")


def load(certificate: Certificate, authority: CertificateAuthority) -> PeerTls:
    return PeerTls.load(certificate.certificate_file, certificate.key_file, authority.ca_file)


@pytest.fixture
async def target(cluster: Cluster, authority: CertificateAuthority) -> Address:
    """Node 1 of a cluster that encrypts."""
    for name in ("node-0", "node-1"):
        await cluster.add_node(name, 2, tls=load(authority.issue(name), authority), connect_timeout=SECOND)
    cluster.slots = {0: "node-0", 1: "node-1"}
    await cluster.begin()
    return cluster.nodes["node-1"].address


async def raw(address: Address) -> Connection:
    return await connect(address.host, address.port, "a stranger's target", SECOND, 5 * SECOND, 10 * SECOND)


def own(cluster: Cluster) -> Credentials:
    return Credentials(JOB_ID, cluster.job_key, "node-0", new_incarnation())


async def test_versions_are_replicated_and_fetched(cluster: Cluster, target: Address) -> None:
    ranks = await cluster.ranks(SIZE_BYTES)
    for step in range(3):
        for rank in ranks:
            rank.checkpoint(step, shard_bytes(rank.rank, step, SIZE_BYTES), step - 1 if step else None)
        for rank in ranks:
            await rank.sealed_everywhere(step)
    assert cluster.copy_at("node-1", 0, 2) == shard_bytes(0, 2, SIZE_BYTES)
    for rank in ranks:
        rank.die()
    for path in cluster.nodes["node-0"].folder.glob("rank0.*"):
        path.unlink()
    await cluster.nodes["node-0"].service.close()
    await cluster.nodes["node-0"].start_agent()
    await cluster.begin(restore_step=2)
    rank = cluster.rank(0)
    await rank.reserve(SIZE_BYTES)
    copy, restored = await rank.restored_bytes()
    assert (copy.source, restored) == ("peer", shard_bytes(0, 2, SIZE_BYTES))


async def test_a_connection_may_be_silent_and_is_kept(cluster: Cluster, target: Address) -> None:
    proxy = TcpProxy(target)
    cluster.addresses["node-1"] = await proxy.start()
    await cluster.begin()
    ranks = await cluster.ranks(1000)
    for step in range(5):
        ranks[0].checkpoint(step, shard_bytes(0, step, 1000), step - 1 if step else None)
        await ranks[0].sealed_everywhere(step)
    # One to reserve memory, one for all versions.
    assert proxy.num_connections == 2
    await proxy.close()


@pytest.mark.parametrize("encrypted", [True, False])
async def test_what_is_seen_on_the_wire(cluster: Cluster, authority: CertificateAuthority, encrypted: bool) -> None:
    tls = load(authority.issue("node"), authority) if encrypted else None
    await cluster.start(2, tls=tls)
    proxy = TcpProxy(cluster.nodes["node-1"].address)
    cluster.addresses["node-1"] = await proxy.start()
    await cluster.begin()
    ranks = await cluster.ranks(1000)
    ranks[0].checkpoint(0, shard_bytes(0, 0, 1000), None)
    await ranks[0].sealed_everywhere(0)
    seen = b"".join(proxy.recorded)
    assert (shard_bytes(0, 0, 1000) in seen) is (JOB_ID.encode() in seen) is not encrypted
    await proxy.close()


@pytest.mark.parametrize("case", ["wrong authority", "expired", "no certificate"])
async def test_who_has_no_good_certificate_gets_nothing(
    cluster: Cluster, authority: CertificateAuthority, target: Address, tmp_path: Path, case: str
) -> None:
    other = CertificateAuthority(tmp_path / "other", "other-ca")
    issued = (other if case == "wrong authority" else authority).issue("stranger", expired=case == "expired")
    # It believes the agents; they do not believe it.
    tls = load(issued, authority)
    if case == "no certificate":
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.load_verify_locations(authority.ca_file)
        tls = PeerTls(bare, tls.server_context, tls.certificate)
    connection = await raw(target)
    # In TLS 1.3 the client is through before the server has looked at its certificate.
    await connection.secure(tls, is_server=False)
    with pytest.raises(UnavailableError):
        await pass_challenge(connection, own(cluster), "node-1")
    connection.close()


@pytest.mark.parametrize(
    ("case", "sentence"),
    [("wrong authority", "unable to get local issuer certificate"), ("expired", "certificate has expired")],
)
async def test_an_agent_believes_nobody_without_a_good_certificate(
    cluster: Cluster, authority: CertificateAuthority, tmp_path: Path, case: str, sentence: str
) -> None:
    other = CertificateAuthority(tmp_path / "other", "other-ca")
    shown = (other if case == "wrong authority" else authority).issue("stranger", expired=case == "expired")
    await cluster.start(2, tls=load(shown, authority), connect_timeout=SECOND)
    connection = await raw(cluster.nodes["node-1"].address)
    with pytest.raises(AuthenticationError, match=rf"does not pass TLS: {sentence}; all agents of a cluster need"):
        await connection.secure(load(authority.issue("node-0"), authority), is_server=False)
    connection.close()


async def test_plain_and_encrypted_agents_do_not_speak(
    cluster: Cluster, authority: CertificateAuthority, target: Address, memory_root: Path
) -> None:
    plain = await raw(target)
    with pytest.raises(GeminiError):
        await pass_challenge(plain, own(cluster), "node-1")
    plain.close()
    unprotected = await cluster.add_node("node-2", 2)
    connection = await raw(unprotected.address)
    with pytest.raises(AuthenticationError, match="does not pass TLS: wrong version number"):
        await connection.secure(load(authority.issue("node-0"), authority), is_server=False)
    connection.close()


async def test_a_member_of_the_cluster_in_between_gets_nothing(
    cluster: Cluster, authority: CertificateAuthority, target: Address
) -> None:
    """It has a good certificate and passes every frame on; the proofs cover the certificates that both sides saw."""
    tls = load(authority.issue("in-between"), authority)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection(target.host, target.port, ssl=tls.client_context)
        with suppress(OSError):
            await asyncio.gather(_pass_on(reader, onward[1]), _pass_on(onward[0], writer))

    between = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=tls.server_context)
    connection = await raw(Address(host="127.0.0.1", port=between.sockets[0].getsockname()[1]))
    await connection.secure(load(authority.issue("node-0"), authority), is_server=False)
    with pytest.raises(AuthenticationError, match="does not hold the key"):
        await pass_challenge(connection, own(cluster), "node-1")
    connection.close()
    between.close()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    finally:
        sink.close()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00"], ids=["silence", "half a hello"])
async def test_a_slow_handshake_is_hung_up_on(target: Address, sent: bytes) -> None:
    connection = await raw(target)
    await asyncio.get_running_loop().sock_sendall(connection._sock, sent)
    with pytest.raises(UnavailableError):
        await connection.receive(refusals)
    connection.close()


async def test_handshakes_without_number_do_not_shut_peers_out_for_long(cluster: Cluster, target: Address) -> None:
    strangers = [await raw(target) for _ in range(70)]
    server = cluster.nodes["node-1"].service._server
    await eventually("the handshakes that are allowed", lambda: len(server._in_challenge) == 64)
    for connection in strangers:
        connection.close()
    await cluster.rank(0).reserve(1000)


async def test_a_generation_that_is_over_gets_nothing(cluster: Cluster, target: Address) -> None:
    ranks = await cluster.ranks(1000)
    for rank in ranks:
        rank.checkpoint(0, shard_bytes(rank.rank, 0, 1000), None)
        await rank.sealed_everywhere(0)
    job = cluster.nodes["node-0"].service._job
    assert job is not None
    old, settings = cluster.generation, cluster.nodes["node-0"].settings
    await cluster.begin(restore_step=0)
    async with open_connection(job, "node-1", settings) as connection:
        await connection.send(Fetch(generation=old, rank=1, step=0))
        reply, payload_bytes = await connection.receive(refusals)
        assert isinstance(from_wire(reply.error), FencedError)
        assert payload_bytes == 0


async def test_a_certificate_without_the_key_of_the_job_gets_nothing(
    cluster: Cluster, authority: CertificateAuthority, target: Address
) -> None:
    connection = await raw(target)
    await connection.secure(load(authority.issue("member"), authority), is_server=False)
    await connection.send(Fetch(generation=cluster.generation, rank=1, step=0))
    reply, _ = await connection.receive(refusals)
    assert "a frame body is not an accepted message" in str(from_wire(reply.error))
    connection.close()
    connection = await raw(target)
    await connection.secure(load(authority.issue("member"), authority), is_server=False)
    hello = Hello(job_id="job-other", node_id="node-0", incarnation=new_incarnation(), nonce=new_nonce())
    await connection.send(hello)
    reply, _ = await connection.receive(refusals)
    assert "does not take part in job-other" in str(from_wire(reply.error))
    connection.close()


@pytest.mark.parametrize("damage", ["key of another", "no authority", "readable key", "no certificate"])
def test_files_that_cannot_be_used_are_refused_with_one_sentence(
    authority: CertificateAuthority, tmp_path: Path, damage: str
) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    files = {"certificate_file": one.certificate_file, "key_file": one.key_file, "ca_file": authority.ca_file}
    match damage:
        case "key of another":
            files["key_file"], sentence = other.key_file, "--tls-key-file .* cannot be used: KEY_VALUES_MISMATCH"
        case "no authority":
            files["ca_file"], sentence = one.key_file, "--tls-ca-file .* holds no certificate authority"
        case "readable key":
            one.key_file.chmod(0o644)
            sentence = "--tls-key-file: others can read the secret in"
        case _:
            files["certificate_file"], sentence = tmp_path / "absent", "cannot be used: No such file or directory"
    with pytest.raises(ConfigurationError, match=sentence):
        PeerTls.load(**files)
