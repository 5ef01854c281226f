"""Managed launchers: really started, never twice, and started again when they die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_harness import JOB, assign, eventually, start_job

from gemini_ft.agent.launch import LauncherStarter
from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import CloseJob, Fence, JobOutcome, JobSpec, LauncherKind, OrderDone, OrderRefused

SCRIPT = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(f"{os.environ['GEMINI_FT_GENERATION']} {os.environ['COLOUR']} {os.getcwd()}")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


Lives = Callable[[], LauncherStarter]


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    """Starters of one node's successive lives; what they have started is ended."""
    starters: list[LauncherStarter] = []

    def life() -> LauncherStarter:
        starters.append(LauncherStarter(tmp_path, tmp_path / "logs", tmp_path / "agent.sock", os.environ))
        return starters[-1]

    yield life
    for starter in starters:
        for child in starter._children:
            child.kill()
            child.wait()


def test_a_second_launcher_of_a_job_is_not_started_while_one_lives(lives: Lives, script: Path) -> None:
    spec = JobSpec(name="test", command=(str(script),), num_nodes=1, num_ranks_per_node=1)
    first_life = lives()
    launcher = first_life.start(JOB, spec)
    assert launcher is not None
    # What a restarted agent, whose former life died before it could write the pid down, would do.
    second_life = lives()
    assert second_life.start(JOB, spec) is None
    os.kill(launcher.pid, signal.SIGKILL)
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    first_life.reap()
    assert second_life.start(JOB, spec) is not None


@pytest.mark.parametrize(
    ("command", "directory", "sentence"), [((), "", "no command"), (("train.py",), "/no/such", "no folder")]
)
def test_a_job_that_cannot_be_started_is_refused(
    tmp_path: Path, command: tuple[str, ...], directory: str, sentence: str
) -> None:
    starter = LauncherStarter(tmp_path, tmp_path, tmp_path / "agent.sock", os.environ)
    spec = JobSpec(name="test", command=command, working_directory=directory, num_nodes=1, num_ranks_per_node=1)
    with pytest.raises(ConfigurationError, match=sentence):
        starter.start(JOB, spec)


async def test_a_refused_start_is_told_to_the_coordinator(run_agent) -> None:
    async with run_agent() as agent:
        refused = await agent.order(start_job(launcher=LauncherKind.MANAGED))
        assert isinstance(refused, OrderRefused)
        assert "no command" in refused.error["message"]


async def test_a_managed_job_runs_its_script_although_its_first_launcher_is_killed(
    run_agent, script: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    order = start_job(
        launcher=LauncherKind.MANAGED,
        command=(str(script), str(out)),
        environment={"COLOUR": "green", "GEMINI_FT_JOB": "stolen"},
        working_directory=str(tmp_path),
    )
    async with run_agent() as agent:
        assert isinstance(await agent.order(order), OrderDone)
        first = agent.heartbeat().launcher_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually("another launcher", lambda: agent.heartbeat().launcher_pid not in (None, first))
        await agent.order(Fence(job_id=JOB, generation=1))
        await agent.order(assign(1))
        await eventually("the job's end", lambda: agent.heartbeat().finished, timeout_s=60)
        assert out.read_text() == f"1 green {tmp_path}"
        assert [(rank.rank, rank.exit_code) for rank in agent.heartbeat().ranks] == [(0, 0)]
        assert isinstance(await agent.order(CloseJob(job_id=JOB, outcome=JobOutcome.SUCCEEDED)), OrderDone)
        assert agent.heartbeat().launcher_pid is None
