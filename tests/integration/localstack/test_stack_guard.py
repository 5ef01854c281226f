"""Whatever way the owner of a local stack ends, its processes and folders go."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gemini_ft.localstack.processes import Marker, marked_processes
from gemini_ft.localstack.waiting import wait_until

OWNER = """
import os, subprocess, sys
from pathlib import Path
from gemini_ft.localstack._guard import Guard
from gemini_ft.localstack.processes import Marker

marker, folder = Marker(sys.argv[1]), Path(sys.argv[2])
guard = Guard(marker, [folder])
program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0).wait()"
reader, writer = os.pipe()
subprocess.Popen(
    [sys.executable, "-c", program], env={**os.environ, **marker.environment()}, stdin=reader, start_new_session=True
)
print("started", flush=True)
if input() == "close":
    guard.close()
    print("closed", flush=True)
    input()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "buffer").write_bytes(b"shard")
    argv = [sys.executable, "-c", OWNER, str(tmp_path), str(tmp_path / "memory")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
        process.kill()


def _orphans(run_id: str) -> list[psutil.Process]:
    return marked_processes(Marker(run_id))


def test_a_killed_owner_leaves_nothing_behind(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_until(lambda: len(_orphans(str(tmp_path))) == 2, "both processes of the run to appear", 20.0)

    owner.kill()

    wait_until(lambda: not _orphans(str(tmp_path)), "the guard to end the processes", 20.0)
    wait_until(lambda: not (tmp_path / "memory").exists(), "the guard to remove the memory", 20.0)


def test_close_returns_when_all_is_gone(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    assert owner.stdin is not None
    assert owner.stdout is not None
    owner.stdin.write("close\n")
    owner.stdin.flush()

    assert owner.stdout.readline() == "closed\n"
    assert _orphans(str(tmp_path)) == []
    assert not (tmp_path / "memory").exists()
