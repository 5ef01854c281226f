"""A cluster a module, and on it a training that goes on from test to test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from fault_stack import FaultStack
from live_job import LiveJob, Undisturbed

from gemini_ft.contracts.messages import JobSpec

TWO_NODES = JobSpec(name="live", num_nodes=2, num_ranks_per_node=1, num_replicas=2)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Undisturbed]]:
    """Returns the undisturbed run of a number of ranks."""
    runs: dict[int, Undisturbed] = {}

    def of(num_ranks: int) -> Undisturbed:
        if num_ranks not in runs:
            runs[num_ranks] = Undisturbed(tmp_path_factory.mktemp("undisturbed"), num_ranks)
        return runs[num_ranks]

    yield of
    for run in runs.values():
        run.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    """Two nodes."""
    with FaultStack(tmp_path_factory.mktemp("stack"), num_nodes=2) as stack:
        yield stack


@pytest.fixture(scope="module")
def make_job(
    stack: FaultStack, undisturbed: Callable[[int], Undisturbed], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[JobSpec], LiveJob]]:
    """Creates jobs, which end with the module."""
    with ExitStack() as jobs:

        def make(spec: JobSpec) -> LiveJob:
            num_ranks = spec.num_nodes * spec.num_ranks_per_node
            job = LiveJob(stack, undisturbed(num_ranks), tmp_path_factory.mktemp("job"), spec)
            jobs.callback(job.close)
            return job

        yield make


class LiveJobs:
    """The job that the tests of a module share. One that did not survive its test is replaced by a new one."""

    def __init__(self, make: Callable[[], LiveJob]) -> None:
        self._make = make
        self._current: LiveJob | None = None

    def current(self) -> LiveJob:
        if self._current is None:
            self._current = self._make()
            self._current.wait_calm()
        return self._current

    def survived(self) -> None:
        """The test is over: the training must be calm, and nothing in it differ from the undisturbed run."""
        job, self._current = self._current, None
        if job is None:
            return
        try:
            if job.has_ended:
                return
            job.wait_calm()
            job.check()
            self._current = job
        finally:
            if self._current is None:
                job.stack.start_dead()
                job.close()


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    """Of the shared job."""
    return TWO_NODES


@pytest.fixture(scope="module")
def live_jobs(make_job: Callable[[JobSpec], LiveJob], spec: JobSpec) -> LiveJobs:
    return LiveJobs(lambda: make_job(spec))


@pytest.fixture
def job(live_jobs: LiveJobs) -> Iterator[LiveJob]:
    """The calm training of this module; after the test it must be calm again, and as if nothing had happened."""
    yield live_jobs.current()
    live_jobs.survived()
