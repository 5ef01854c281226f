"""Each service of docker-compose.yml runs by its very command, up to a finished demo job.

support/composed_stack.py says what differs from containers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from composed_stack import ComposedStack

from gemini_ft.agent.capacity import CapacityFacts, check_capacity, replica_memory_bytes
from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import JobModel
from gemini_ft.contracts.messages import JobOutcome
from gemini_ft.localstack.demo.observe import shard_bytes
from gemini_ft.localstack.processes import ManagedProcess

_NUM_STEPS = 40
_NUM_REPLICAS = 2
_OURS = ("postgres", "nats", "coordinator", "failure-detector", "dashboard", *(f"node-{n}" for n in range(5)))

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[ComposedStack]:
    with ComposedStack(tmp_path, GEMINI_FT_DEMO_STEPS=str(_NUM_STEPS), GEMINI_FT_DEMO_PACE_S="0.3") as composed:
        yield composed


def test_the_demo_job_survives_the_end_of_a_node_and_finishes(stack: ComposedStack) -> None:
    stack.up("dashboard")
    demo = stack.up("demo")
    highest = dict.fromkeys(_OURS, (0, 0))

    def measure() -> None:
        for name in _OURS:
            usage = stack.services[name].usage()
            highest[name] = (max(highest[name][0], usage[0]), max(highest[name][1], usage[1]))

    with ApiClient(stack.api_url, stack.api_token) as client:

        def training(generation: int) -> JobModel | None:
            """The job, if it has committed something since it began that generation or a newer one."""
            assert demo.running, stack.log("demo")
            for job in client.jobs(name="demo"):
                versions = client.versions(job.job_id)
                if job.generation >= generation and any(version.generation >= generation for version in versions):
                    return job
            return None

        def wait_training(generation: int) -> JobModel:
            what = f"the job to commit in generation {generation}"
            stack.wait(lambda: training(generation) is not None, lambda: f"{what} ({stack.log('demo')})")
            job = training(generation)
            assert job is not None
            measure()
            return job

        before = wait_training(1)
        names = {node.node_id: node.name for node in client.nodes()}
        members = {names[node_id] for node_id in before.slots.values()}
        standbys = {f"node-{number}" for number in range(5)} - members
        shard = max(shard_bytes(stack.services[name].memory) for name in members)

        lost = min(members)
        stack.kill(lost)
        after = wait_training(before.generation + 1)
        assert {names[node_id] for node_id in after.slots.values()} == (members - {lost}) | standbys

        stack.wait(lambda: not demo.running, lambda: f"the demo to end ({stack.log('demo')})")
        (ended,) = client.jobs(name="demo")
        assert ended.outcome is JobOutcome.SUCCEEDED
        newest = max(client.versions(ended.job_id), key=lambda version: version.step)
        assert newest.generation == after.generation
        # Ranks agree on a version one step later, and those of a job's last second are not all recorded.
        assert newest.step >= _NUM_STEPS - 8

    assert isinstance(demo.process, ManagedProcess)
    assert demo.process.returncode == 0, stack.log("demo")
    for name in set(_OURS) - {lost}:
        done = stack.check_health(name)
        assert done.returncode == 0, f"{name}: {done.stderr}"
    assert stack.check_health(lost).returncode != 0

    need_bytes = replica_memory_bytes(shard, _NUM_REPLICAS, 1)
    for name, (num_bytes, num_threads) in highest.items():
        definition = stack.services[name].definition
        limit_bytes = int(definition["mem_limit"])
        assert num_bytes < 0.8 * limit_bytes, f"{name} took {num_bytes} bytes of {limit_bytes}"
        assert num_threads < 0.8 * definition["pids_limit"], f"{name} had {num_threads} threads"
        if name.startswith("node-"):
            # More than the node's own check would find: here the checkpoints count as taken and as needed.
            free_bytes = limit_bytes - num_bytes
            facts = CapacityFacts("/dev/shm", "tmpfs", int(definition["shm_size"]), free_bytes, limit_bytes)
            check_capacity(need_bytes, facts).require()
