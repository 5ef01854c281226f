"""An external job: the user's own torchrun on every node, with this rendezvous."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_stack import FaultStack

from gemini_ft.agent.local_server import default_socket_path
from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import JobModel
from gemini_ft.contracts.messages import JobOutcome, JobSpec, LauncherKind
from gemini_ft.localstack.processes import ManagedProcess, Marker
from gemini_ft.localstack.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"
PATIENCE_S = 90.0
NUM_STEPS = 60
STEP_OF_FAILURE = 20
TRAINING = [str(EXAMPLE), "--steps", str(NUM_STEPS), "--batch", "1"]
SPEC = JobSpec(name="external", num_nodes=2, num_ranks_per_node=1, num_replicas=2, launcher=LauncherKind.EXTERNAL)


@pytest.fixture(scope="module")
def api(stack: FaultStack) -> Iterator[ApiClient]:
    with stack.client() as client:
        yield client


Torchrun = Callable[..., ManagedProcess]


@pytest.fixture
def torchrun(stack: FaultStack, tmp_path: Path) -> Iterator[Torchrun]:
    """Starts torchrun as somebody logged in on a node would."""
    started: list[ManagedProcess] = []

    def start(name: str, *argv: str) -> ManagedProcess:
        process = ManagedProcess(
            [sys.executable, "-m", "torch.distributed.run", *argv],
            name=f"torchrun on {name}",
            log_path=tmp_path / f"torchrun.{name}.log",
            env={**os.environ, "OMP_NUM_THREADS": "1", **Marker(stack.marker.run_id, name).environment()},
        )
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.stop()


def rendezvous(stack: FaultStack, name: str, job: JobModel, num_ranks: int = 1) -> list[str]:
    socket = default_socket_path(stack.nodes[name].directory / "state")
    return [
        *("--rdzv-backend=gemini", f"--rdzv-endpoint={socket}", f"--rdzv-id={job.job_id}"),
        *(f"--nnodes={SPEC.num_nodes}", f"--nproc-per-node={num_ranks}", "--max-restarts=3"),
    ]


def test_a_killed_rank_costs_nothing(stack: FaultStack, api: ApiClient, torchrun: Torchrun, tmp_path: Path) -> None:
    expected, found, losses = (tmp_path / name for name in ("expected", "found", "losses"))
    reference = [*TRAINING, "--no-checkpoint", "--digest-out", str(expected)]
    torchrun("nowhere", "--standalone", f"--nproc-per-node={SPEC.num_nodes}", *reference)
    job = api.create_job(SPEC)
    training = [*TRAINING, "--digest-out", str(found), "--loss-log", str(losses)]
    running = [torchrun(name, *rendezvous(stack, name, job), *training) for name in stack.nodes]

    def last_step() -> int:
        path = tmp_path / "losses.0"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines[:-1]), default=-1)

    wait_until(lambda: last_step() >= STEP_OF_FAILURE, f"step {STEP_OF_FAILURE}", PATIENCE_S)
    stack.kill_rank(job.job_id, 1)
    wait_until(lambda: api.job(job.job_id).outcome is not None, "the job to end", PATIENCE_S)

    assert api.job(job.job_id).outcome is JobOutcome.SUCCEEDED
    assert [process.wait(PATIENCE_S) for process in running] == [0, 0]
    (recovery,) = api.recoveries(job.job_id)
    assert recovery.restored_step is not None
    assert recovery.restored_step >= STEP_OF_FAILURE - 2
    wait_until(expected.exists, "the undisturbed run to end", PATIENCE_S)
    assert json.loads(found.read_text()) == json.loads(expected.read_text())


def test_another_number_of_ranks_is_refused_by_name(stack: FaultStack, api: ApiClient, torchrun: Torchrun) -> None:
    job = api.create_job(SPEC)
    running = [torchrun(name, *rendezvous(stack, name, job, num_ranks=2), *TRAINING) for name in stack.nodes]
    sentence = re.compile(r"a world of 4 ranks, but job \S+ has 2 nodes of 1 ranks; start just as many")
    wait_until(
        lambda: any(sentence.search(process.log_tail(100_000)) for process in running),
        "the refusal in torchrun's output",
        PATIENCE_S,
    )
    assert api.job(job.job_id).committed_step is None
    api.stop_job(job.job_id, now=True)
