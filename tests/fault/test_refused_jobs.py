"""Jobs that cannot train: they end before the first step, and the sentence says what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_stack import FaultStack
from live_job import LiveJob

from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import JobModel
from gemini_ft.contracts.messages import JobSpec
from gemini_ft.localstack.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

END_TIMEOUT_S = 60.0
ONE_NODE = JobSpec(name="refused", num_nodes=1, num_ranks_per_node=1, num_replicas=1, max_recoveries_without_progress=1)


@pytest.fixture(scope="module")
def api(stack: FaultStack) -> Iterator[ApiClient]:
    with stack.client() as client:
        yield client


def outcome_of(api: ApiClient, spec: JobSpec) -> JobModel:
    job_id = api.create_job(spec).job_id
    wait_until(lambda: api.job(job_id).outcome is not None, "the job to end", END_TIMEOUT_S)
    return api.job(job_id)


def test_too_little_memory_is_refused_before_the_first_step(
    stack: FaultStack, make_job: Callable[[JobSpec], LiveJob]
) -> None:
    stack.kill_agent("n1")
    stack.nodes["n1"].agent.start({"GEMINI_FT_AGENT_MEMORY_LIMIT_BYTES": "123456"})
    spec = ONE_NODE.model_copy(update={"num_nodes": 2, "num_replicas": 2})
    job = make_job(spec)
    failed = job.wait_phase("failed")
    assert "bytes of memory_limit_bytes (123456) are left; raise that limit" in failed.cause
    assert job.lines == []
    job.close()


def test_a_script_that_fails_at_once_ends_the_job_with_its_last_words(api: ApiClient, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('there is no data set')\n")
    failed = outcome_of(api, ONE_NODE.model_copy(update={"command": (str(script),)}))
    assert failed.generation == 2
    assert "1 recoveries in a row brought no newly committed version; last cause: " in failed.cause
    assert "there is no data set" in failed.cause


def test_a_script_that_is_not_there_is_named(api: ApiClient, tmp_path: Path) -> None:
    script = tmp_path / "missing.py"
    job_id = api.create_job(ONE_NODE.model_copy(update={"command": (str(script),)})).job_id
    refusal = f"refuses: job {job_id} is to run {script}, which is no file on this node"
    wait_until(lambda: refusal in api.job(job_id).waiting_for, "the missing script to be named", END_TIMEOUT_S)
    api.stop_job(job_id, now=True)
