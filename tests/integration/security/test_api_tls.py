"""The REST API over https, as a process that people start."""

from __future__ import annotations

import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from certificates import CertificateAuthority

from gemini_ft.localstack.nats import NatsServer
from gemini_ft.localstack.postgres import PostgresServer
from gemini_ft.localstack.processes import ManagedProcess
from gemini_ft.localstack.waiting import wait_until
from gemini_ft.security.secret_files import write_secret

TOKEN = "token-of-the-tests"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, authority: CertificateAuthority) -> Iterator[str]:
    """Where a coordinator serves https, beyond loopback."""
    folder = tmp_path_factory.mktemp("api")
    certificate = authority.issue("coordinator")
    with (
        PostgresServer(folder / "postgres", settings={"fsync": "off"}) as postgres,
        NatsServer(folder / "nats") as nats_server,
    ):
        assert nats_server.token
        options = {
            "--database-url-file": write_secret(folder / "database-url", postgres.url),
            "--nats": nats_server.url,
            "--nats-token-file": nats_server.token_file,
            "--api-token-file": write_secret(folder / "api-token", TOKEN),
            "--listen": "0.0.0.0:0",
            "--ready-file": folder / "ready",
            "--tls-certificate-file": certificate.certificate_file,
            "--tls-key-file": certificate.key_file,
        }
        words = [str(word) for pair in options.items() for word in pair]
        process = ManagedProcess(
            [sys.executable, "-m", "gemini_ft.coordinator", *words],
            name="coordinator",
            log_path=folder / "coordinator.log",
            parent_death_signal=signal.SIGKILL,
        )
        process.start()
        wait_until((folder / "ready").exists, "the coordinator to serve", 60.0)
        yield (folder / "ready").read_text().strip().replace("0.0.0.0", "127.0.0.1")
        process.stop()


def test_a_client_that_trusts_the_authority_is_served(url: str, authority: CertificateAuthority) -> None:
    context = ssl.create_default_context(cafile=authority.ca_file)
    with httpx.Client(base_url=url, verify=context, headers={"Authorization": f"Bearer {TOKEN}"}) as api:
        assert url.startswith("https://")
        assert api.get("/v1/jobs").status_code == 200
        assert api.get("/v1/jobs", headers={"Authorization": "Bearer guessed"}).status_code == 401


def test_a_client_that_trusts_another_authority_sends_no_token(url: str, tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=CertificateAuthority(tmp_path, "other-ca").ca_file)
    with httpx.Client(verify=context) as api, pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        api.get(f"{url}/healthz")


def test_nothing_is_served_in_the_clear(url: str) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url.replace('https', 'http')}/healthz")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_1])
def test_old_versions_of_tls_are_refused(url: str, authority: CertificateAuthority, version: ssl.TLSVersion) -> None:
    context = ssl.create_default_context(cafile=authority.ca_file)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = version
    with httpx.Client(verify=context) as api, pytest.raises(httpx.ConnectError):
        api.get(f"{url}/healthz")
