"""Managed and marked processes, with real processes and signals."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from gemini_ft.contracts.errors import UnavailableError, WaitTimeoutError
from gemini_ft.localstack.processes import (
    ManagedProcess,
    Marker,
    kill_marked,
    kill_processes,
    marked_processes,
)
from gemini_ft.localstack.waiting import wait_until

_SLEEP = ["sleep", "600"]


@pytest.fixture
def marker() -> Iterator[Marker]:
    marker = Marker(f"test-{uuid4().hex}")
    yield marker
    kill_marked(marker)


def _managed(tmp_path: Path, argv: list[str], **options: object) -> ManagedProcess:
    return ManagedProcess(argv, name="sleeper", log_path=tmp_path / "log", **options)


def _ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_pid_file(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path.name} to be written", 10)
    return int(path.read_text())


def test_a_process_starts_logs_stops_and_starts_again(tmp_path: Path) -> None:
    process = _managed(tmp_path, ["sh", "-c", "echo ready; exec sleep 600"], env=dict(os.environ))
    with pytest.raises(UnavailableError, match="sleeper has not been started"):
        _ = process.pid
    process.start()
    wait_until(lambda: "ready" in process.log_tail(), "the process to log", 10)
    assert os.getsid(process.pid) == process.pid
    with pytest.raises(UnavailableError, match="runs already"):
        process.start()
    process.stop()
    assert process.returncode == -signal.SIGTERM
    process.stop()
    process.start()
    process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_ignores_sigterm_is_killed_after_the_bound(tmp_path: Path) -> None:
    process = _managed(tmp_path, ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
    process.start()
    wait_until(lambda: "ready" in process.log_tail(), "the process to ignore SIGTERM", 10)
    with pytest.raises(WaitTimeoutError, match="sleeper"):
        process.wait(0.01)
    process.stop(timeout_s=0.1)
    assert process.returncode == -signal.SIGKILL


def test_the_end_of_the_thread_that_started_it_does_not_end_a_process(tmp_path: Path) -> None:
    process = _managed(tmp_path, _SLEEP, parent_death_signal=signal.SIGKILL)
    thread = threading.Thread(target=process.start)
    thread.start()
    thread.join()
    with pytest.raises(WaitTimeoutError):
        process.wait(0.2)
    process.stop()


def test_servers_end_with_the_command_that_started_them_even_by_sigkill(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from gemini_ft.localstack.nats import NatsServer\n"
        "from gemini_ft.localstack.postgres import PostgresServer\n"
        "directory = Path(sys.argv[1])\n"
        "nats, postgres = NatsServer(directory / 'nats'), PostgresServer(directory / 'postgres')\n"
        "nats.start(); postgres.start()\n"
        "print(nats.pid, postgres.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        pids = [int(word) for word in command.stdout.readline().split()]
        assert len(pids) == 2
        command.kill()
    for pid in pids:
        wait_until(lambda pid=pid: _ended(pid), f"server process {pid} to end with its command", 10)


def test_a_node_is_lost_with_all_its_processes_and_its_neighbour_lives(tmp_path: Path, marker: Marker) -> None:
    node, neighbour = Marker(marker.run_id, "node-0"), Marker(marker.run_id, "node-1")
    orphan_file, stripped_file = tmp_path / "orphan", tmp_path / "stripped"
    # An orphan in a session of its own, and a child whose environment was emptied.
    script = (
        f"(setsid sh -c 'echo $$ > {orphan_file}; exec sleep 600' &)\n"
        f"env -i sh -c 'echo $$ > {stripped_file}; exec sleep 600' & wait\n"
    )
    root = _managed(tmp_path, ["sh", "-c", script], env=os.environ | node.environment())
    other = _managed(tmp_path, _SLEEP, env=os.environ | neighbour.environment())
    root.start()
    other.start()
    expected = {root.pid, _wait_pid_file(orphan_file), _wait_pid_file(stripped_file)}

    assert expected <= {process.pid for process in marked_processes(node)}
    assert expected <= set(kill_marked(node))
    assert all(_ended(pid) for pid in expected)
    assert [process.pid for process in marked_processes(marker)] == [other.pid]
    assert kill_marked(marker) == [other.pid]
    assert marked_processes(marker) == []
    root.wait(10)
    other.wait(10)


def test_processes_that_keep_forking_are_all_killed(tmp_path: Path, marker: Marker) -> None:
    script = "while :; do setsid sleep 600 & setsid sleep 600 & sleep 0.01; done"
    process = _managed(tmp_path, ["sh", "-c", script], env=os.environ | marker.environment())
    process.start()
    wait_until(lambda: len(marked_processes(marker)) > 10, "the process to fork ten children", 10)
    kill_marked(marker)
    assert marked_processes(marker) == []
    process.wait(10)


def test_the_caller_never_kills_itself(marker: Marker) -> None:
    code = (
        "from gemini_ft.localstack.processes import *; import os\n"
        "print(kill_marked(Marker(os.environ[RUN_VARIABLE])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | marker.environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n")


def test_a_process_that_ended_meanwhile_is_not_signalled(tmp_path: Path) -> None:
    process = _managed(tmp_path, _SLEEP)
    process.start()
    remembered = psutil.Process(process.pid)
    process.stop()
    kill_processes([remembered], timeout_s=10)
    assert process.returncode == -signal.SIGTERM
