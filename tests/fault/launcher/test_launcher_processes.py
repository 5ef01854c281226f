"""Launchers as people run them: real processes, real signals, Gloo between the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gemini_ft.agent.launcher.local_agents import LocalAgents
from gemini_ft.contracts.local_protocol import Finished, LauncherHello, WorkersExited

JOB = "job-1"
ALL_REDUCE = """
    import os, signal, sys, time, torch
    import torch.distributed as dist
    print("at entry: torch", "torch" in WARM, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    generation, last = int(os.environ["GEMINI_FT_GENERATION"]), int(sys.argv[1])
    for step in range(10_000):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        if step == 0:
            print(f"trains as rank {dist.get_rank()} of {dist.get_world_size()} since restart",
                  os.environ["TORCHELASTIC_RESTART_COUNT"])
        if generation >= last and step == 20:
            break
        time.sleep(0.01)
    dist.destroy_process_group()
"""


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class Job:
    """Launchers of one job, each with the agent of its node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agents: LocalAgents
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}

    def script(self, text: str) -> str:
        path = self.folder / "script.py"
        path.write_text("import sys; WARM = list(sys.modules)\n" + textwrap.dedent(text))
        return str(path)

    def launch(self, node: int, *command: str, options: tuple[str, ...] = ()) -> None:
        own = ["--agent-socket", self.agents.socket_path(node), "--job", JOB, *options]
        own += ["--log-dir", str(self.folder / f"log-{node}"), "--state-dir", str(self.folder / f"state-{node}")]
        self.start(node, [sys.executable, "-m", "gemini_ft.agent.launcher", *own, "--", *command])

    def start(self, node: int, command: list[str]) -> None:
        with (self.folder / f"launcher-{node}.log").open("wb") as log:
            self.launchers[node] = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)

    def output(self, node: int) -> str:
        return (self.folder / f"launcher-{node}.log").read_text()

    def log(self, node: int, generation: int, rank: int) -> str:
        path = self.folder / f"log-{node}" / f"generation-{generation}" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, what: str, is_true: Callable[[], object], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_true():
            outputs = "\n".join(self.output(node) for node in self.launchers)
            assert time.monotonic() < deadline, f"waited in vain for {what}; the launchers say:\n{outputs}"
            time.sleep(0.02)

    def wait_until_trained(self, generation: int, slots: dict[int, int]) -> None:
        for slot, node in slots.items():
            self.wait_for(
                f"rank {slot} to train in generation {generation}",
                lambda slot=slot, node=node: "trains" in self.log(node, generation, slot),
            )

    def exit_code(self, node: int) -> int:
        return self.launchers[node].wait(60)

    def end(self) -> None:
        for launcher in self.launchers.values():
            launcher.kill()
            launcher.wait(10)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.end()


@pytest.fixture
def pair(job: Job) -> Iterator[Job]:
    """Two nodes of one rank each, and a standby."""
    with LocalAgents(job.folder, JOB, num_slots=2, num_standbys=1) as job.agents:
        yield job


@pytest.fixture
def single(job: Job) -> Iterator[Job]:
    """One node whose job fails with its first failed rank."""
    with LocalAgents(job.folder, JOB, num_slots=1, restarts=False) as job.agents:
        yield job


def test_killed_ranks_start_again_warm_twice_in_a_row(pair: Job) -> None:
    script = pair.script(ALL_REDUCE)
    for node in (0, 1):
        pair.launch(node, script, "3")
    pair.agents.order()
    for generation in (1, 2):
        pair.wait_until_trained(generation, {0: 0, 1: 1})
        pids = pair.agents.pids(generation)
        os.kill(pids[generation % 2], signal.SIGKILL)
        pair.wait_for("the end of the old ranks", lambda pids=pids: all(map(is_gone, pids.values())))
    assert [pair.exit_code(node) for node in (0, 1)] == [0, 0]
    for rank in (0, 1):
        log = pair.log(rank, 3, rank)
        assert "at entry: torch True" in log
        assert f"trains as rank {rank} of 2 since restart 2" in log
    killed = [m.exit_codes for _, m in pair.agents.of_kind(WorkersExited) if -signal.SIGKILL in m.exit_codes.values()]
    assert killed == [{1: -9}, {0: -9}]
    assert sorted(node for node, _ in pair.agents.of_kind(Finished)) == [0, 1]


def test_a_rank_that_is_blocked_in_a_collective_and_deaf_to_sigterm_leaves_at_once(pair: Job) -> None:
    script = pair.script(
        """
        import os, signal, sys, time, torch
        import torch.distributed as dist
        signal.signal(signal.SIGTERM, lambda *_: print("heard SIGTERM", flush=True))
        dist.init_process_group("gloo")
        if os.environ["GEMINI_FT_GENERATION"] == "1":
            if dist.get_rank() == 1:
                time.sleep(1000)
            print("blocks", flush=True)
        dist.all_reduce(torch.ones(1))
        print("unblocked")
        """
    )
    for node in (0, 1):
        pair.launch(node, script)
    pair.agents.order()
    pair.wait_for("rank 0 to block", lambda: "blocks" in pair.log(0, 1, 0))
    blocked = pair.agents.pids(1)
    pair.agents.order()
    pair.wait_for("the end of both ranks", lambda: all(map(is_gone, blocked.values())), timeout_s=10)
    assert [pair.exit_code(node) for node in (0, 1)] == [0, 0]
    assert pair.log(0, 1, 0) == "blocks\n"
    assert "unblocked" in pair.log(0, 2, 0)


def test_a_standby_takes_a_lost_slot(pair: Job) -> None:
    script = pair.script(ALL_REDUCE)
    for node in (0, 1, 2):
        pair.launch(node, script, "2")
    pair.agents.order()
    pair.wait_until_trained(1, {0: 0, 1: 1})
    pair.wait_for("the standby to park", lambda: any(node == 2 for node, _ in pair.agents.of_kind(LauncherHello)))
    pair.launchers[1].kill()
    generation = pair.agents.order(slots={0: 0, 1: 2})
    assert [pair.exit_code(node) for node in (0, 2)] == [0, 0]
    assert f"trains as rank 1 of 2 since restart {generation - 1}" in pair.log(2, generation, 1)


def test_a_parked_standby_ends_well_when_the_job_is_closed(pair: Job) -> None:
    pair.agents.order()
    pair.launch(2, pair.script("raise SystemExit('never run')"))
    pair.wait_for("the standby to park", lambda: pair.agents.of_kind(LauncherHello))
    pair.agents.close_job("succeeded")
    assert pair.exit_code(2) == 0


def test_a_killed_launcher_takes_server_and_ranks_along(pair: Job) -> None:
    pair.launch(0, pair.script("import time; print('trains', flush=True); time.sleep(1000)"))
    pair.agents.order()
    pair.wait_until_trained(1, {0: 0})
    family = psutil.Process(pair.launchers[0].pid).children(recursive=True)
    assert pair.agents.pids(1)[0] in [process.pid for process in family]
    pair.launchers[0].kill()
    pair.wait_for("the end of its processes", lambda: all(is_gone(process.pid) for process in family))


def test_ranks_outlive_the_agent_and_the_launcher_ends_with_them(pair: Job) -> None:
    script = pair.script(
        """
        import os, time
        print("trains", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        """
    )
    for node in (0, 1):
        pair.launch(node, script)
    pair.agents.order()
    pair.wait_until_trained(1, {0: 0, 1: 1})
    for node in (0, 1):
        pair.agents.stop_agent(node)
    pids = pair.agents.pids(1)
    (pair.folder / "go").touch()
    assert [pair.exit_code(node) for node in (0, 1)] == [0, 0]
    assert all(map(is_gone, pids.values()))
    assert not pair.agents.of_kind(WorkersExited)


def test_a_script_s_error_fails_the_job_with_its_traceback(single: Job) -> None:
    single.launch(0, single.script("def broken():\n    raise ValueError('what went wrong')\nbroken()"))
    single.agents.order()
    assert single.exit_code(0) == 1
    assert "in broken" in single.log(0, 1, 0)
    (_, exited), *_ = single.agents.of_kind(WorkersExited)
    assert exited.exit_codes == {0: 1}
    assert "ValueError: what went wrong" in exited.detail
    assert "ValueError: what went wrong" in single.output(0)


def test_a_module_runs_with_several_ranks_that_are_shown_on_request(single: Job) -> None:
    (single.folder / "trainer.py").write_text("import os, sys; print('rank', os.environ['RANK'], sys.argv[1:])")
    single.launch(0, "trainer", "x", options=("--nproc-per-node", "2", "--tee", "1", "-m"))
    single.agents.order()
    assert single.exit_code(0) == 0
    assert single.log(0, 1, 0) == "rank 0 ['x']\n"
    assert "rank 1 ['x']" in single.output(0)
    assert "rank 0 ['x']" not in single.output(0)


def test_a_rank_that_ends_before_its_neighbour_is_told_at_once(single: Job) -> None:
    script = """
        import os, time
        while os.environ["RANK"] == "1" and not os.path.exists("go"):
            time.sleep(0.01)
    """
    single.launch(0, single.script(script), options=("--nproc-per-node", "2"))
    single.agents.order()
    single.wait_for("rank 0's exit code", lambda: single.agents.of_kind(WorkersExited))
    (single.folder / "go").touch()
    assert single.exit_code(0) == 0
    assert [message.exit_codes for _, message in single.agents.of_kind(WorkersExited)] == [{0: 0}, {1: 0}]


def test_terminated_launchers_end_their_ranks_and_say_so(single: Job) -> None:
    single.launch(0, single.script("import time; print('trains', flush=True); time.sleep(1000)"))
    single.agents.order()
    single.wait_until_trained(1, {0: 0})
    pid = single.agents.pids(1)[0]
    single.launchers[0].terminate()
    assert single.exit_code(0) == 128 + signal.SIGTERM
    assert is_gone(pid)


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--job", JOB, "--", "absent.py"), 2, "there is no script absent.py"),
        (("--job", JOB, "--nproc-per-node", "0", "--", "script.py"), 2, "must be at least 1, not 0"),
        (("--job", "job-2", "--", "script.py"), 69, "job job-2 is not known on this node"),
    ],
)
def test_wrong_usage_is_one_sentence(single: Job, options: tuple[str, ...], code: int, sentence: str) -> None:
    single.script("")
    socket_path = single.agents.socket_path(0)
    single.start(0, [sys.executable, "-m", "gemini_ft.agent.launcher", "--agent-socket", socket_path, *options])
    assert single.exit_code(0) == code
    assert sentence in single.output(0)
    assert "Traceback" not in single.output(0)


def test_plain_torchrun_works_with_this_rendezvous(single: Job) -> None:
    script = single.script(
        """
        import os, signal, torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        names = ["GEMINI_FT_JOB", "GEMINI_FT_GENERATION", "RANK", "WORLD_SIZE"]
        print(*[os.environ[name] for name in names], os.path.basename(os.environ["GEMINI_FT_AGENT_SOCKET"]), flush=True)
        if os.environ["GEMINI_FT_GENERATION"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    endpoint = ["--rdzv-backend=gemini", f"--rdzv-endpoint={single.agents.socket_path(0)}", f"--rdzv-id={JOB}"]
    options = ["--nnodes=1", "--nproc-per-node=1", "--max-restarts=3"]
    single.start(0, [sys.executable, "-m", "torch.distributed.run", *endpoint, *options, script])
    single.agents.order()
    first = f"{JOB} 1 0 1 agent-0.sock"
    single.wait_for("the first life", lambda: first in single.output(0))
    single.agents.order()
    assert single.exit_code(0) == 0
    assert f"{JOB} 2 0 1 agent-0.sock" in single.output(0)
    assert [message.generation for _, message in single.agents.of_kind(Finished)] == [2]
