"""`gemini-ft run`: the exit code is the job's, the output is the ranks', and the cluster goes with the command."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gemini_ft.localstack.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

COMMAND = [sys.executable, "-m", "gemini_ft.cli.main", "run"]
GREETING = "import os, sys; print('hello from', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], *sys.argv[1:])\n"


def _run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_CONFIG_HOME": str(directory)}  # nobody has logged in there
    return subprocess.run([*COMMAND, *arguments], cwd=directory, capture_output=True, text=True, timeout=200, env=env)


@contextmanager
def _started(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        yield process
        process.kill()


def _leftovers(owner: int) -> list[str]:
    """Processes and memory folders of the cluster that process `owner` has brought up."""
    left = [str(path) for path in Path("/dev/shm").glob(f"gemini-ft-{owner}-*")]
    for process in psutil.process_iter():
        try:
            if process.environ().get("GEMINI_FT_RUN", "").startswith(f"{owner}-"):
                left.append(f"{process.pid} {' '.join(process.cmdline())}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return left


def test_a_script_runs_on_all_ranks_and_its_arguments_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "greet.py").write_text(GREETING)

    done = _run(tmp_path, "--standalone", "--nproc-per-node", "2", "greet.py", "--nodes", "7")

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] hello from {rank} of 2 --nodes 7" for rank in range(2)]


def test_a_script_that_keeps_failing_fails_the_job(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("raise SystemExit('no data set')\n")

    done = _run(tmp_path, "--standalone", "fail.py")

    assert done.returncode == 1
    assert "[rank 0] no data set" in done.stdout
    assert "the job has failed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train.py"], "give --standalone, or --api URL of a running coordinator, or log in to one"),
        (["--standalone", "--api", "http://127.0.0.1:1", "train.py"], "leave --api and --context out"),
        (["--standalone", "train.py"], "there is no script train.py in"),
        (["--api", "http://127.0.0.1:1", "train.py"], "give --token-file"),
        (["--api", "http://127.0.0.1:1", "--token-file", "none", "train.py"], "--token-file: none cannot be read"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done = _run(tmp_path, *arguments)

    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_or_killed_command_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "wait.py").write_text("print('waiting', flush=True)\nimport time\ntime.sleep(3600)\n")
    with _started(tmp_path, "--standalone", "wait.py") as process:
        assert process.stdout is not None
        seen = next((line for line in process.stdout if "waiting" in line), None)
        assert seen == "[rank 0] waiting\n"
        assert _leftovers(process.pid)

        process.send_signal(number)

        assert process.wait(60) == code
    wait_until(lambda: not _leftovers(process.pid), "the cluster to go with its command", 30.0)


def test_a_cluster_that_is_up_takes_jobs_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "greet.py").write_text(GREETING + f"open(f'{tmp_path}/rank-' + os.environ['RANK'], 'w').close()\n")
    (tmp_path / "guessed").touch(0o600)
    (tmp_path / "guessed").write_text("guessed")
    up = [sys.executable, "-m", "gemini_ft.cli.main", "up", "--nodes", "1", "--standbys", "0"]
    env = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(up, cwd=tmp_path, env=env, text=True, **pipes) as cluster:
        try:
            assert cluster.stdout is not None
            told: dict[str, str] = {}
            for line in cluster.stdout:
                if line.startswith("Ctrl-C"):
                    break
                name, _, value = line.rpartition(" ")
                told[name.strip()] = value.strip()
            api = told["API"].removesuffix("/v1")

            done = _run(tmp_path, "--api", api, "--token-file", told["token file"], "--nproc-per-node", "2", "greet.py")
            refused = _run(tmp_path, "--api", api, "--token-file", "guessed", "greet.py")

            cluster.send_signal(signal.SIGINT)
            assert cluster.wait(60) == 0
        finally:
            cluster.kill()
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] hello from {rank} of 2" for rank in range(2)]
    assert (refused.returncode, "the bearer token is wrong" in refused.stderr) == (3, True)
    wait_until(lambda: not _leftovers(cluster.pid), "the cluster to go with its command", 30.0)
    assert not Path(told["logs"]).exists()
