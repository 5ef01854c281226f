"""The secrets of docker-compose.yml: generated, private, kept, and made with nothing but Python."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.security.compose_secrets import main, write_secrets

_ROOT = Path(__file__).parents[3]


def _contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_files_are_private_and_a_second_time_they_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    write_secrets(directory)
    made = _contents(directory)
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    write_secrets(directory)
    assert _contents(directory) == made


def test_no_two_clusters_share_a_secret(tmp_path: Path) -> None:
    write_secrets(tmp_path / "one")
    write_secrets(tmp_path / "two")
    one, two = _contents(tmp_path / "one"), _contents(tmp_path / "two")
    assert one.keys() == two.keys()
    assert not [name for name in one if one[name] == two[name]]


def test_who_connects_shows_what_the_server_expects(tmp_path: Path) -> None:
    write_secrets(tmp_path)
    made = _contents(tmp_path)
    assert f":{made['postgres-password']}@postgres:5432/" in made["database-url"]
    users = json.loads(made["nats.conf"])["authorization"]["users"]
    assert {f"{user['user']}:{user['password']}" for user in users} == {
        made[f"nats-{role}"].strip() for role in NatsRole
    }


def test_the_command_needs_no_packages_and_prints_whom_containers_run_as(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "gemini_ft.security.compose_secrets", str(tmp_path / "secrets")],
        env={"PYTHONPATH": str(_ROOT / "shared"), "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    owner = (tmp_path / "secrets" / "api-token").stat()
    assert owner.st_uid != 0, "containers would run as root"
    assert done.stdout == f"GEMINI_FT_USER={owner.st_uid}:{owner.st_gid}\n"


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nats-agent").write_text("somebody\n")
    (tmp_path / "nats-agent").chmod(0o600)
    assert main([str(tmp_path)]) == 2
    assert str(tmp_path / "nats-agent") in capsys.readouterr().err
