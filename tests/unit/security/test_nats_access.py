"""What a process shows to NATS, and what it refuses to do for safety."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import CertificateAuthority

from gemini_ft.agent.replicas.tls import PeerTls
from gemini_ft.agent.settings import AgentSettings
from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.security.exposure import is_loopback
from gemini_ft.security.nats_access import NatsAccess
from gemini_ft.security.secret_files import write_secret

LOCAL, REMOTE, ENCRYPTED = "nats://127.0.0.1:4222", "nats://nats.example:4222", "tls://nats.example:4222"
SECRET = Path("secret")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_what_counts_as_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"url": "http://127.0.0.1:4222"}, "give nats://HOST:PORT or tls://HOST:PORT"),
        ({"url": "nats://user:password@127.0.0.1:4222"}, "put USER:PASSWORD into a --nats-credentials-file"),
        ({"url": LOCAL, "credentials_file": SECRET, "token_file": SECRET}, "not both"),
        ({"url": LOCAL, "ca_file": SECRET}, "--nats-ca-file is for tls://"),
        ({"url": REMOTE}, "would be used without credentials"),
        ({"url": REMOTE, "insecure_plaintext": True}, "would be used without credentials"),
        ({"url": ENCRYPTED}, "would be used without credentials"),
        ({"url": REMOTE, "credentials_file": SECRET}, "would carry secrets over the network unencrypted; use tls://"),
    ],
)
def test_what_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        NatsAccess(**options)  # type: ignore[arg-type]
    assert "password@" not in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"url": LOCAL},
        {"url": REMOTE, "credentials_file": SECRET, "insecure_plaintext": True},
        {"url": ENCRYPTED, "credentials_file": SECRET},
        {"url": ENCRYPTED, "token_file": SECRET},
    ],
)
def test_what_is_accepted(options: dict[str, object]) -> None:
    NatsAccess(**options)  # type: ignore[arg-type]


def test_credentials_and_tokens_are_read_anew(tmp_path: Path) -> None:
    file = write_secret(tmp_path / "secret", "agent:pass:word\n")
    options = NatsAccess(url=LOCAL, credentials_file=file).options(NatsRole.AGENT)
    assert options == {"inbox_prefix": "_INBOX.gemini-agent", "user": "agent", "password": "pass:word"}
    access = NatsAccess(url=LOCAL, token_file=file)
    write_secret(file, "token\n")
    assert access.options(NatsRole.COORDINATOR) == {"inbox_prefix": "_INBOX.gemini-coordinator", "token": "token"}


@pytest.mark.parametrize("content", ["agent", ":password", "agent:"])
def test_credentials_of_another_form_are_refused(tmp_path: Path, content: str) -> None:
    file = write_secret(tmp_path / "secret", content)
    with pytest.raises(ConfigurationError, match="does not hold USER:PASSWORD in one line"):
        NatsAccess(url=LOCAL, credentials_file=file).options(NatsRole.AGENT)


def agent(environ: dict[str, str] | None = None, **options: object) -> AgentSettings:
    given = {"nats_url": LOCAL, "state_dir": Path("state"), "memory_dir": Path("memory")} | options
    return AgentSettings.load(environ or {}, given)


def test_an_agent_without_credentials_stays_on_loopback() -> None:
    with pytest.raises(ConfigurationError, match=r"--host 10\.0\.0\.1 lets other machines reach this agent"):
        agent(host="10.0.0.1")
    assert agent(host="127.0.0.2").host == "127.0.0.2"
    assert agent(host="10.0.0.1", nats_credentials_file=SECRET).host == "10.0.0.1"


def test_an_agent_is_told_by_its_environment_that_the_network_is_trusted() -> None:
    remote = {"nats_url": REMOTE, "nats_credentials_file": SECRET}
    with pytest.raises(ConfigurationError, match="unencrypted"):
        _ = agent({"GEMINI_FT_AGENT_INSECURE_PLAINTEXT": "0"}, **remote).nats_access
    assert agent({"GEMINI_FT_AGENT_INSECURE_PLAINTEXT": "1"}, **remote).nats_access.insecure_plaintext
    with pytest.raises(ConfigurationError, match="give 1 or 0"):
        agent({"GEMINI_FT_AGENT_INSECURE_PLAINTEXT": "yes"})


def test_an_agents_certificates_come_together() -> None:
    assert agent().peer_tls() is None
    with pytest.raises(ConfigurationError, match="--tls-certificate-file, --tls-key-file and --tls-ca-file together"):
        agent(tls_certificate_file=SECRET).peer_tls()


def test_an_agents_certificates_are_loaded(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    issued = authority.issue("node")
    tls = agent(
        tls_certificate_file=issued.certificate_file, tls_key_file=issued.key_file, tls_ca_file=authority.ca_file
    ).peer_tls()
    assert isinstance(tls, PeerTls)
