"""TLS to a real NATS server: whom a client believes, and what it never sends in the clear."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import nats.errors
import pytest
from certificates import Certificate, CertificateAuthority
from nats.aio.client import Client

from gemini_ft.contracts.errors import AuthenticationError
from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.coordinator import broker
from gemini_ft.failure_detector.service import FailureDetector
from gemini_ft.failure_detector.settings import DetectorSettings
from gemini_ft.localstack._binaries import find_nats_server
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.security import nats_config
from gemini_ft.security.nats_access import NatsAccess
from gemini_ft.security.nats_config import credentials_file, role_authorization, tls_block

ROLE = NatsRole.COORDINATOR


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ca")


def server(folder: Path, certificate: Certificate) -> NatsServer:
    tls = tls_block(certificate.certificate_file, certificate.key_file)
    return NatsServer(folder / "nats", extra={"authorization": role_authorization(folder / "credentials"), "tls": tls})


def access(folder: Path, url: str, ca_file: Path) -> NatsAccess:
    return NatsAccess(url=url, credentials_file=credentials_file(folder / "credentials", ROLE), ca_file=ca_file)


@asynccontextmanager
async def connected(to: NatsAccess) -> AsyncIterator[Client]:
    client = Client()

    async def ignore(_: Exception) -> None:
        """`connect` raises it as well."""

    try:
        async with asyncio.timeout(10):
            await client.connect(to.url, **to.options(ROLE), allow_reconnect=False, connect_timeout=2, error_cb=ignore)
        yield client
    finally:
        with suppress(TimeoutError):  # nats-py waits for ever after a handshake that has failed
            async with asyncio.timeout(1):
                await client.close()


async def test_a_client_that_trusts_the_authority_is_served_again_after_a_restart(
    tmp_path: Path, authority: CertificateAuthority
) -> None:
    reconnected = asyncio.Event()

    async def note() -> None:
        reconnected.set()

    with server(tmp_path, authority.issue("nats")) as running:
        to = access(tmp_path, running.url, authority.ca_file)
        assert to.url.startswith("tls://")
        client = await broker.connect(to.url, to.options(ROLE), timedelta(seconds=10), on_reconnect=note)
        await broker.ensure_verdict_stream(client)
        running.kill()
        running.start()
        async with asyncio.timeout(20):
            await reconnected.wait()
        await broker.ensure_verdict_stream(client)
        await client.close()


@pytest.mark.parametrize("case", ["other authority", "expired", "other host"])
async def test_a_server_with_the_wrong_certificate_gets_no_password(
    tmp_path: Path, authority: CertificateAuthority, case: str
) -> None:
    shown = authority.issue("nats", expired=case == "expired", host="10.0.0.1" if case == "other host" else "127.0.0.1")
    trusted = CertificateAuthority(tmp_path / "other", "other-ca") if case == "other authority" else authority
    with server(tmp_path, shown) as running, pytest.raises((nats.errors.Error, OSError)) as refused:
        async with connected(access(tmp_path, running.url, trusted.ca_file)):
            pass
    expected = {
        "other authority": "certificate verify failed",
        "expired": "certificate has expired",
        "other host": "IP address mismatch",
    }
    assert expected[case] in str(refused.value)


async def test_services_end_with_one_sentence_when_the_certificate_is_wrong(
    tmp_path: Path, authority: CertificateAuthority
) -> None:
    other = CertificateAuthority(tmp_path / "other", "other-ca")
    with server(tmp_path, authority.issue("nats")) as running:
        to = access(tmp_path, running.url, other.ca_file)
        with pytest.raises(AuthenticationError, match=r"is not accepted: unable to get .*; check --nats-ca-file"):
            await broker.connect(to.url, to.options(ROLE), timedelta(seconds=10), on_reconnect=never)
        with pytest.raises(AuthenticationError, match=r"is not accepted: unable to get .*; check --nats-ca-file"):
            await FailureDetector(to, DetectorSettings()).run()


async def never() -> None:
    raise AssertionError("it was never connected")


async def test_nobody_talks_a_client_out_of_encryption(tmp_path: Path, authority: CertificateAuthority) -> None:
    heard: list[bytes] = []

    async def say_that_no_tls_is_needed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.12.0","auth_required":true,"max_payload":1048576}\r\n')
        while data := await reader.read(4096):
            heard.append(data)
        writer.close()

    role_authorization(tmp_path / "credentials")
    between = await asyncio.start_server(say_that_no_tls_is_needed, "127.0.0.1", 0)
    url = f"tls://127.0.0.1:{between.sockets[0].getsockname()[1]}"
    with pytest.raises((nats.errors.Error, OSError)):
        async with connected(access(tmp_path, url, authority.ca_file)):
            pass
    between.close()
    await between.wait_closed()
    assert heard[0].startswith(b"\x16\x03")  # a handshake of TLS
    assert b"CONNECT" not in b"".join(heard)


async def test_the_detector_serves_over_tls(tmp_path: Path, authority: CertificateAuthority) -> None:
    with server(tmp_path, authority.issue("nats")) as running:
        shown = credentials_file(tmp_path / "credentials", NatsRole.FAILURE_DETECTOR)
        to = NatsAccess(url=running.url, credentials_file=shown, ca_file=authority.ca_file)
        detector = FailureDetector(to, DetectorSettings())
        serving = asyncio.create_task(detector.run())
        async with asyncio.timeout(20):
            await detector.ready.wait()
        serving.cancel()
        await asyncio.wait([serving])


def test_the_written_configuration_is_one_that_the_server_takes(
    tmp_path: Path, authority: CertificateAuthority
) -> None:
    certificate = authority.issue("nats")
    arguments = [str(tmp_path / "out"), "--listen", "0.0.0.0:4222", "--store-dir", str(tmp_path / "store")]
    tls = ["--tls-certificate-file", str(certificate.certificate_file), "--tls-key-file", str(certificate.key_file)]
    assert nats_config.main([*arguments, *tls]) == 0
    first = credentials_file(tmp_path / "out", ROLE).read_text()
    assert nats_config.main([*arguments, *tls]) == 0
    assert credentials_file(tmp_path / "out", ROLE).read_text() == first
    written = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in written] == ["nats-agent", "nats-coordinator", "nats-failure-detector", "nats.conf"]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}
    checked = subprocess.run(
        [find_nats_server(), "-t", "-c", tmp_path / "out" / "nats.conf"], capture_output=True, text=True, timeout=30
    )
    assert checked.returncode == 0, checked.stderr


def test_a_server_beyond_this_machine_needs_tls_or_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "out"), "--listen", "0.0.0.0:4222", "--store-dir", "/data"]
    assert nats_config.main(arguments) == 2
    assert "NATS on 0.0.0.0:4222 would carry secrets over the network unencrypted" in capsys.readouterr().err
    assert nats_config.main([*arguments, "--insecure-plaintext"]) == 0
