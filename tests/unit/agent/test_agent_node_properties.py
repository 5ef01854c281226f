"""Whatever is lost, repeated or late: the fence is monotone, and what is old changes nothing."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gemini_ft.agent.node import Node
from gemini_ft.agent.pages import RankProgress
from gemini_ft.agent.records import JobRecord, ProcessIdentity
from gemini_ft.contracts.errors import GeminiError
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.local_protocol import Finished, LauncherHello, RankHello, Restored, WorkersExited
from gemini_ft.contracts.messages import Address, Assign, CloseJob, Fence, Hold, JobOutcome, JobSpec, StartJob

ME, JOB, KEY = "node-me", "job-1", "00" * 32
ADDRESS = Address(host="127.0.0.1", port=4000)
SPEC = JobSpec(name="test", command=("train.py",), num_nodes=1, num_ranks_per_node=2, num_replicas=1)

generations = st.integers(1, 6)
ranks = st.integers(0, 1)
pids = st.integers(10, 14)


def process(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid=pid, started=f"boot/{pid}")


class NodeMachine(RuleBasedStateMachine):
    """Every event at any time; an agent's death and return between any two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(new_incarnation(), ME, 2)
        self.highest_fence = 0

    @rule()
    def start_job(self) -> None:
        with contextlib.suppress(GeminiError):
            self.node.start_job(StartJob(job_id=JOB, job_key=KEY, spec=SPEC))

    @rule(generation=generations)
    def fence(self, generation: int) -> None:
        with contextlib.suppress(GeminiError):
            self.node.fence(Fence(job_id=JOB, generation=generation))
            self.highest_fence = max(self.highest_fence, generation)

    @rule(generation=generations)
    def fence_enforced(self, generation: int) -> None:
        self.node.fence_enforced(generation)

    @rule(generation=generations, is_member=st.booleans())
    def assign(self, generation: int, is_member: bool) -> None:
        with contextlib.suppress(GeminiError):
            self.node.assign(
                Assign(
                    job_id=JOB,
                    generation=generation,
                    slots={0: ME if is_member else "node-other"},
                    addresses={ME: ADDRESS},
                    placement={0: (0,)},
                    restore_step=None,
                )
            )

    @rule(generation=generations)
    def assignment_taken(self, generation: int) -> None:
        self.node.assignment_taken(generation)

    @rule(generation=generations)
    def hold(self, generation: int) -> None:
        with contextlib.suppress(GeminiError):
            assert self.node.hold(Hold(job_id=JOB, generation=generation))
            assert generation == self.highest_fence

    @rule(generation=generations, pid=pids, workers=st.dictionaries(ranks, pids))
    def launcher_hello(self, generation: int, pid: int, workers: dict[int, int]) -> None:
        message = LauncherHello(request_id=1, job_id=JOB, pid=pid, num_local_ranks=2, generation=generation)
        with contextlib.suppress(GeminiError):
            self.node.launcher_hello(message, process(pid), {rank: process(p) for rank, p in workers.items()})

    @rule(generation=generations, rank=ranks, pid=pids)
    def rank_hello(self, generation: int, rank: int, pid: int) -> None:
        message = RankHello(request_id=1, generation=generation, rank=rank, job_id=JOB, pid=pid, world_size=2)
        with contextlib.suppress(GeminiError):
            self.node.rank_hello(message, process(pid))
            self.node.rank_opened(message, process(pid), f"/page/{generation}/{rank}")

    @rule(
        generation=generations,
        event=st.sampled_from(["started", "exited", "finished", "restored", "observed", "failed"]),
        rank=ranks,
        pid=pids,
    )
    def told_of_a_rank(self, generation: int, event: str, rank: int, pid: int) -> None:
        events: dict[str, Any] = {
            "started": lambda: self.node.workers_started(generation, {rank: process(pid)}),
            "exited": lambda: self.node.workers_exited(
                WorkersExited(request_id=1, generation=generation, exit_codes={rank: 1})
            ),
            "finished": lambda: self.node.node_finished(Finished(request_id=1, generation=generation)),
            "restored": lambda: self.node.restored(
                Restored(request_id=1, generation=generation, rank=rank, step=3, phases_s={})
            ),
            "observed": lambda: self.node.observe(rank, generation, RankProgress(finished_step=pid)),
            "failed": lambda: self.node.restore_failed(rank, generation, {}),
        }
        before = self.node.record() if self.node.job else None
        beat = self.node.heartbeat(1, ADDRESS, 1.0, False, 0, 0)
        is_old = before is not None and generation < before.generation
        left = set() if not self.node.job else {r.generation for r in self.node.job.ranks.values()}
        with contextlib.suppress(GeminiError):
            events[event]()
        # A rank that the fence has not reached yet may still be observed: its last steps count.
        if is_old and not (event == "observed" and generation in left):
            assert self.node.record() == before
            assert self.node.heartbeat(1, ADDRESS, 1.0, False, 0, 0) == beat

    @rule(pid=pids, code=st.none() | st.integers(-9, 3))
    def process_ended(self, pid: int, code: int | None) -> None:
        self.node.process_ended(process(pid), code)

    @rule()
    def agent_dies_and_returns(self) -> None:
        if self.node.job is None:
            return
        record = JobRecord.model_validate_json(self.node.record().model_dump_json())
        is_closing = self.node.job.closing is not None
        self.node = Node(new_incarnation(), ME, 2)
        self.node.adopt(record, is_closing)
        assert self.node.record() == record

    @rule()
    def close_job(self) -> None:
        self.node.close_job(CloseJob(job_id=JOB, outcome=JobOutcome.STOPPED))

    @rule()
    def job_closed(self) -> None:
        self.node.job_closed()
        if self.node.job is None:
            self.highest_fence = 0

    @invariant()
    def the_fence_holds(self) -> None:
        job = self.node.job
        if job is None:
            return
        assert job.generation == self.highest_fence
        assert job.assigned_generation <= job.generation
        assert all(rank.generation <= job.generation for rank in job.ranks.values())

    @invariant()
    def only_the_newest_generation_is_handed_out(self) -> None:
        with contextlib.suppress(GeminiError):
            found = self.node.next_assignment(0)
            assert found is None or found[0] == self.highest_fence


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
