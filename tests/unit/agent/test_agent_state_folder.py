"""What the agent writes down, and its settings."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from gemini_ft.agent.local_server import default_socket_path
from gemini_ft.agent.pages import JobPageFile
from gemini_ft.agent.persistence import StateFolder
from gemini_ft.agent.records import JobRecord, NodeRecord, ProcessIdentity, RankRecord
from gemini_ft.agent.settings import AgentSettings, parse_labels
from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES
from gemini_ft.contracts.errors import ConfigurationError, ConflictError
from gemini_ft.contracts.messages import JobSpec

PROCESS = ProcessIdentity(pid=7, started="boot/1")
JOB = JobRecord(
    job_id="job-1",
    job_key="00" * 32,
    spec=JobSpec(name="test", num_nodes=1, num_ranks_per_node=1),
    generation=3,
    assignment=None,
    committed_step=4,
    store=None,
    launcher=PROCESS,
    num_launcher_starts=1,
    finished=False,
    ranks=(RankRecord(rank=0, generation=3, process=PROCESS, page="/page", exited=True, exit_code=-9),),
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    with StateFolder(tmp_path / "state") as state:
        assert state.load_node() == NodeRecord()
        assert state.load_job() is None
        state.save_node(NodeRecord(node_id="node-1", data_port=5))
        state.save_job(JOB)
    with StateFolder(tmp_path / "state") as state:
        assert state.load_node() == NodeRecord(node_id="node-1", data_port=5)
        assert state.load_job() == JOB
        state.remove_job()
        state.remove_job()
        assert state.load_job() is None


def test_nobody_else_can_read_the_job_key(tmp_path: Path) -> None:
    with StateFolder(tmp_path / "state") as state:
        state.save_job(JOB)
        assert (state.path / "job.json").stat().st_mode & 0o777 == 0o600
        assert state.path.stat().st_mode & 0o777 == 0o700


def test_a_second_agent_in_the_folder_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    with StateFolder(tmp_path), pytest.raises(ConflictError, match=rf"agent {os.getpid()} already runs .*--state-dir"):
        StateFolder(tmp_path)
    StateFolder(tmp_path).close()


def test_a_killed_agent_leaves_no_lock(tmp_path: Path) -> None:
    text = "import os, sys, pathlib; from gemini_ft.agent.persistence import StateFolder; "
    text += "s = StateFolder(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=False).returncode == -9
    StateFolder(tmp_path).close()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with StateFolder(tmp_path) as state:
        (tmp_path / "job.json").write_text('{"job_id": "job-1"}')
        with pytest.raises(ConfigurationError, match=r"job\.json is damaged"):
            state.load_job()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--state-dir"):
        StateFolder(tmp_path / "file")


def test_the_job_page_keeps_its_file_and_contents_over_lives(tmp_path: Path) -> None:
    first = JobPageFile(tmp_path / "job.page")
    first.page.ordered_generation = 5
    inode = first.path.stat().st_ino
    first.close()
    second = JobPageFile(tmp_path / "job.page")
    assert (second.page.ordered_generation, second.page.closed) == (5, False)
    assert (second.path.stat().st_ino, second.path.stat().st_size) == (inode, CONTROL_PAGE_BYTES)
    second.remove()
    assert not second.path.exists()


def test_a_long_state_folder_gets_a_short_socket_path(tmp_path: Path) -> None:
    assert default_socket_path(Path("/run/node")) == Path("/run/node/run/agent.sock")
    long = tmp_path / ("x" * 100)
    assert len(os.fsencode(default_socket_path(long))) <= 107
    assert default_socket_path(long) == default_socket_path(long)
    assert default_socket_path(long) != default_socket_path(long / "y")


def test_the_command_line_wins_over_the_environment(tmp_path: Path) -> None:
    environ = {
        "GEMINI_FT_AGENT_NATS_URL": "nats://a:1",
        "GEMINI_FT_AGENT_STATE_DIR": str(tmp_path),
        "GEMINI_FT_AGENT_HEARTBEAT_INTERVAL": "0.1",
        "GEMINI_FT_AGENT_MAX_LAUNCHER_STARTS": "7",
        "GEMINI_FT_AGENT_LABELS": "rack=a,zone=b",
    }
    settings = AgentSettings.load(environ, {"nats_url": "nats://b:2", "memory_dir": tmp_path, "state_dir": None})
    assert (settings.nats_url, settings.state_dir, settings.max_launcher_starts) == ("nats://b:2", tmp_path, 7)
    assert settings.heartbeat_interval == timedelta(milliseconds=100)
    assert settings.labels == {"rack": "a", "zone": "b"}
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({}, "--nats"),
        ({"GEMINI_FT_AGENT_HEARTBEAT_INTERVAL": "soon"}, "number of seconds"),
        ({"GEMINI_FT_AGENT_HEARTBEAT_INTERVAL": "nan"}, "number of seconds"),
        ({"GEMINI_FT_AGENT_CLOSE_GRACE": "0"}, "above zero"),
        ({"GEMINI_FT_AGENT_MAX_LAUNCHER_STARTS": "many"}, "whole number"),
        ({"GEMINI_FT_AGENT_MAX_LAUNCHER_STARTS": "0"}, "at least 1"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, environ: dict[str, str], sentence: str) -> None:
    given = {"nats_url": "nats://a:1", "state_dir": tmp_path, "memory_dir": tmp_path} if environ else {}
    with pytest.raises(ConfigurationError, match=sentence):
        AgentSettings.load(environ, given)


def test_a_label_has_a_key_and_a_value() -> None:
    assert parse_labels(["rack=a=b"]) == {"rack": "a=b"}
    with pytest.raises(ConfigurationError, match="key=value"):
        parse_labels(["rack"])
