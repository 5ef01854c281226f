"""The dashboard as a process, encrypted on both sides."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from certificates import CertificateAuthority
from coordinator_cluster import API_TOKEN, Running, eventually

from gemini_ft.coordinator.server import bind, make_server
from gemini_ft.localstack.processes import ManagedProcess
from gemini_ft.security.tls import client_context, optional_server_context


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "authority")


@pytest.fixture
async def api_url(running: Running, authority: CertificateAuthority) -> AsyncIterator[str]:
    """A coordinator's API over https."""
    certificate = authority.issue("coordinator")
    tls = optional_server_context(certificate.certificate_file, certificate.key_file)
    listening, url = bind("127.0.0.1:0", encrypted=True)
    server = make_server(running.coordinator, API_TOKEN, url, tls=tls)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await eventually(lambda: server.started, "the API to be served")
    yield url
    server.should_exit = True
    await serving


@asynccontextmanager
async def dashboard(
    folder: Path, api_url: str, ca_file: Path, authority: CertificateAuthority
) -> AsyncIterator[httpx.AsyncClient]:
    """A dashboard over https that trusts `ca_file`, and a client that follows no redirects."""
    certificate, ready = authority.issue("dashboard"), folder / "ready"
    process = ManagedProcess(
        [
            *(sys.executable, "-m", "gemini_ft.dashboard", "--api", api_url, "--api-ca-file", str(ca_file)),
            *("--listen", "127.0.0.1:0", "--ready-file", str(ready)),
            *("--cookie-secret-file", str(folder / "cookie-secret"), "--log-format", "json"),
            *("--tls-certificate-file", str(certificate.certificate_file), "--tls-key-file", str(certificate.key_file)),
        ],
        name="dashboard",
        log_path=folder / "dashboard.log",
        cwd=folder,
        parent_death_signal=signal.SIGKILL,
    )
    process.start()
    try:
        await eventually(lambda: ready.exists() or not process.running, "the dashboard to be served", 60)
        assert process.running, process.log_tail()
        trust: ssl.SSLContext = client_context(authority.ca_file, "")
        async with httpx.AsyncClient(base_url=ready.read_text().strip(), verify=trust, timeout=10) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(process.wait, 10)
    assert status == -signal.SIGTERM
    assert "Traceback" not in process.log_tail(1 << 20)


async def test_tokens_and_cookies_are_encrypted_all_the_way(
    tmp_path: Path, api_url: str, authority: CertificateAuthority
) -> None:
    async with dashboard(tmp_path, api_url, authority.ca_file, authority) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        answer = await client.post("/login", data={"token": API_TOKEN})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        attributes = answer.headers["set-cookie"].lower().split("; ")
        assert {"httponly", "secure", "samesite=strict"} <= set(attributes)
        page = await client.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        cookie = page.request.headers["cookie"].partition("=")[2]
        client.cookies.set("gemini_ft_dashboard", ("y" if cookie[0] == "x" else "x") + cookie[1:])
        assert (await client.get("/")).headers["location"] == "/login"
    assert stat.S_IMODE((tmp_path / "cookie-secret").stat().st_mode) == 0o600
    assert set(os.listdir(tmp_path)) == {"authority", "cookie-secret", "dashboard.log", "ready"}


async def test_an_api_of_another_authority_is_not_trusted(
    tmp_path: Path, api_url: str, authority: CertificateAuthority
) -> None:
    other = CertificateAuthority(tmp_path / "other")
    async with dashboard(tmp_path, api_url, other.ca_file, authority) as client:
        assert (await client.post("/login", data={"token": API_TOKEN})).headers["location"] == "/login"
        page = (await client.get("/login")).text
        assert "cannot be reached" in page
        assert "CERTIFICATE_VERIFY_FAILED" in page
        assert (await client.get("/")).headers["location"] == "/login"
