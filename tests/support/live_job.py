"""A job of `small_training.py` on a local stack, and the same training undisturbed, compared step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from fault_stack import FaultStack
from replica_cluster import map_file

from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import EventModel, JobModel, NodeModel
from gemini_ft.contracts.buffer_format import BufferState, ShardBuffer
from gemini_ft.contracts.errors import UnavailableError
from gemini_ft.contracts.messages import JobOutcome, JobSpec, RankState
from gemini_ft.localstack.processes import kill_processes

__all__ = ["LiveJob", "Mark", "Undisturbed"]

SCRIPT = Path(__file__).with_name("small_training.py")
PATIENCE_S = 60.0
MOST_STEPS_REDONE = 2
_POLL_S = 0.02
_GLANCE_S = 1.0
_KILL_TIMEOUT_S = 10.0
_STUCK_S = 1.0
_NUM_REFERENCE_STEPS = 200


@dataclass(frozen=True)
class Line:
    """What a rank wrote: `restored`, `step` or `end`."""

    rank: int
    kind: str
    generation: int
    step: int | None
    digest: str
    committed_step: int | None


class Logs:
    """The lines of all ranks, followed while they are written."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._paths = [folder / f"log.{rank}" for rank in range(num_ranks)]
        self._num_read_bytes = [0] * num_ranks

    def new_lines(self) -> list[Line]:
        """Lines since the last call, in the order of each rank."""
        lines = []
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._num_read_bytes[rank])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._num_read_bytes[rank] += len(whole)
            lines += [Line(rank=rank, **json.loads(line)) for line in whole.splitlines()]
        return lines


class Undisturbed:
    """The same training without Gemini-FT, in processes of its own, only as far as somebody has asked."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._logs = Logs(folder, num_ranks)
        self._digests: dict[tuple[int, int], str] = {}
        self._limit = -1
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder), "--undisturbed"],
                stdin=subprocess.PIPE,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def digest(self, rank: int, step: int) -> str:
        """Of the state of `rank` after `step`."""
        while step > self._limit:
            self._limit += _NUM_REFERENCE_STEPS
            for process in self._ranks:
                assert process.stdin is not None
                print(self._limit, file=process.stdin, flush=True)
        _wait(lambda: (rank, step) in self._digests, f"step {step} of the undisturbed run", PATIENCE_S, self._look)
        return self._digests[rank, step]

    def close(self) -> None:
        """End it."""
        for process in self._ranks:
            process.communicate(timeout=PATIENCE_S)

    def _look(self) -> None:
        for line in self._logs.new_lines():
            assert line.step is not None
            self._digests[line.rank, line.step] = line.digest
        for process in self._ranks:
            assert process.poll() is None, f"the undisturbed run ended with status {process.returncode}"


@dataclass(frozen=True)
class Mark:
    """Where a job was when something was done to it."""

    generation: int
    num_lines: int


class LiveJob:
    """A running job. Every line that its ranks write is compared with the undisturbed run by `check`."""

    def __init__(self, stack: FaultStack, undisturbed: Undisturbed, folder: Path, spec: JobSpec) -> None:
        self.stack = stack
        self.folder = folder
        self.num_ranks = spec.num_nodes * spec.num_ranks_per_node
        self.api: ApiClient = stack.client()
        self.lines: list[Line] = []
        self._events: list[EventModel] = []
        self._undisturbed = undisturbed
        self._logs = Logs(folder, self.num_ranks)
        self._num_checked = 0
        self._is_closed = False
        command = (str(SCRIPT), str(folder), *spec.command)
        environment = {"OMP_NUM_THREADS": "1", **spec.environment}
        job = self.api.create_job(spec.model_copy(update={"command": command, "environment": environment}))
        self.job_id = job.job_id

    # ---- what is seen

    @property
    def info(self) -> JobModel:
        return self.api.job(self.job_id)

    @property
    def generation(self) -> int:
        return self.info.generation

    @property
    def members(self) -> list[NodeModel]:
        """Nodes in slots, by slot."""
        nodes = [node for node in self.api.nodes() if node.job_id == self.job_id and node.slot is not None]
        return sorted(nodes, key=lambda node: node.slot or 0)

    @property
    def has_ended(self) -> bool:
        return self.info.outcome is not None

    def memory(self, node: str) -> Path:
        """Folder of this job's buffers on a node."""
        return self.stack.nodes[node].memory / self.job_id

    def held_steps(self, node: str, rank: int) -> list[int]:
        """Steps of the sealed copies of a rank's shard on a node."""
        headers = [ShardBuffer.open(map_file(path)).header() for path in self.memory(node).glob(f"rank{rank}.[01]")]
        return [header.step for header in headers if header.state is BufferState.SEALED]

    def ready_standbys(self) -> list[str]:
        """Names of the standbys whose heartbeats show that they know the job, in the order in which they are taken."""
        knowing = {node.node_id: node for node in self.api.nodes() if node.job_id == self.job_id}
        return [
            knowing[node_id].name for node_id in self.info.standbys if node_id in knowing and knowing[node_id].is_alive
        ]

    def free_nodes(self) -> list[str]:
        """Names of the nodes that belong to no job."""
        return [node.name for node in self.api.nodes() if node.is_alive and node.job_id is None]

    def node_of(self, rank: int) -> str:
        """Name of the node that a rank runs on."""
        return self.members[rank * len(self.members) // self.num_ranks].name

    @property
    def members_are_heard(self) -> bool:
        """Whether the coordinator hears all members."""
        members = self.members
        return len(members) == len(self.info.slots) and all(node.is_alive for node in members)

    def runs(self, rank: int) -> bool:
        """Whether heartbeats show a rank to run in the newest generation."""
        newest = self.generation
        return any(
            (known.rank, known.generation, known.state) == (rank, newest, RankState.RUNNING)
            for node in self.members
            for known in node.ranks
        )

    def restore_source(self, rank: int) -> str:
        """Where a rank of the newest generation got its copy from."""
        with self.stack.http() as http:
            nodes = http.get("/nodes").raise_for_status().json()["items"]
        newest = self.generation
        (source,) = (
            known["restore_source"]
            for node in nodes
            for known in node["ranks"]
            if node["job_id"] == self.job_id and (known["rank"], known["generation"]) == (rank, newest)
        )
        return str(source)

    def look(self) -> None:
        self.lines += self._logs.new_lines()

    def steps_since(self, mark: Mark) -> list[int]:
        """rank -> steps finished since `mark`, repeated ones included."""
        return self._steps_after(mark.num_lines)

    # ---- waiting

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        """Return once the condition holds. A job that has failed fails the test at once."""
        started = time.monotonic()
        next_glance = started + _GLANCE_S
        while True:
            self.look()
            if condition():
                return
            now = time.monotonic()
            if now > next_glance:
                next_glance = now + _GLANCE_S
                assert not self._has_failed(), f"while waiting for {what}: {self._describe()}"
            assert now - started < timeout_s, f"waited {timeout_s:g} s in vain for {what}; {self._describe()}"
            time.sleep(_POLL_S)

    def mark(self) -> Mark:
        self.look()
        return Mark(self.generation, len(self.lines))

    def wait_steps(self, num_steps: int = 3, what: str = "steps and commits") -> None:
        """Wait until every rank has finished `num_steps` more steps, and as many versions are committed.

        The control plane is not asked.
        """
        self.look()
        num_lines = len(self.lines)
        self.wait(
            what,
            lambda: min(self._steps_after(num_lines)) >= num_steps and self._commits_after(num_lines) >= num_steps,
        )

    def wait_calm(self) -> None:
        """Wait until the job runs and new versions are committed, so that every copy of them is in its place."""
        self.wait("the job to run", lambda: self.info.phase == "running")
        self.wait_steps()
        self.wait("all members to be heard", lambda: self.members_are_heard)

    def wait_stuck(self, rank: int) -> None:
        """Wait until a rank has not finished a step for long: it is blocked in a collective."""
        self.look()
        seen, since = self._num_lines(rank), time.monotonic()

        def is_stuck() -> bool:
            nonlocal seen, since
            if self._num_lines(rank) != seen:
                seen, since = self._num_lines(rank), time.monotonic()
            return time.monotonic() - since > _STUCK_S

        self.wait(f"rank {rank} to be blocked", is_stuck)

    def wait_generation(self, mark: Mark, what: str, num_generations: int = 1) -> Mark:
        """Wait until the job is that many generations further; return a mark just before the newest of them."""
        wanted = mark.generation + num_generations
        self.wait(what, lambda: self.generation >= wanted)
        return Mark(wanted - 1, mark.num_lines)

    def wait_phase(self, phase: str, timeout_s: float = PATIENCE_S) -> JobModel:
        self.wait(f"the job to be {phase}", lambda: self.info.phase == phase, timeout_s)
        return self.info

    def recovered(self, mark: Mark, *, most_steps_redone: int | None = MOST_STEPS_REDONE) -> int:
        """Wait for the end of a recovery that began after `mark`, check what it restored; return the generation.

        Not less than the newest version known to be committed before, on every rank the same; at most
        `most_steps_redone` steps are redone (None: the agent was away, so that versions were skipped).
        """
        self.wait(
            f"steps in a generation after {mark.generation}",
            lambda: all(self._num_new_steps(rank, mark.generation) >= 2 for rank in range(self.num_ranks)),
        )
        self.wait("the recovery to be over", lambda: self.info.phase == "running")
        newest = self.generation
        restored = {line.step for line in self._restored(newest)}
        assert len(restored) == 1, f"generation {newest} restored {restored}"
        (step,) = restored
        assert step is not None, f"generation {newest} began from zero"
        before = [line for line in self._since_zero(self.lines) if line.generation < newest]
        committed = _newest_commit(before)
        assert step >= committed, f"step {committed} was committed, but {step} was restored"
        if most_steps_redone is not None:
            reached = max((line.step for line in before if line.step is not None), default=-1)
            assert reached - step <= most_steps_redone, f"step {reached} was reached, but {step} was restored"
        self.check()
        return newest

    def started_from_zero(self, mark: Mark) -> None:
        """Wait until the job, which has lost everything after `mark`, trains again from the beginning."""
        self.wait("a start from zero", lambda: self.generation > mark.generation and self._restored(self.generation))
        assert {line.step for line in self._restored(self.generation)} == {None}
        self.wait_calm()
        self.check()

    # ---- doing

    def kill_rank(self, rank: int) -> None:
        kill_processes([self.rank_process(rank)], _KILL_TIMEOUT_S)

    def rank_process(self, rank: int) -> psutil.Process:
        """The process of a rank, as soon as heartbeats show it."""
        self.wait(f"rank {rank} to run", lambda: self.runs(rank))
        return self.stack.rank_process(self.job_id, rank)

    def arm_agent(self, name: str, fault: str) -> None:
        """Let the agent of a node live its next life with an armed fault point; returns when it is back."""
        lives = self._num_lives(name)
        self.stack.arm_agent(name, fault)
        self.wait(
            f"the agent of {name} to be back", lambda: self._num_lives(name) > lives and self._node(name).is_alive
        )

    def arm_rank(self, rank: int, fault: str) -> None:
        """Arm a fault point in a rank, at the end of its next step."""
        self.arm_ranks({rank: fault})

    def arm_ranks(self, faults: dict[int, str]) -> None:
        """Arm a fault point in several ranks at the end of the same step."""
        for rank, fault in faults.items():
            (self.folder / f"arm.{rank}").write_text(fault)
        (self.folder / "arm").touch()

    def arm_rank_at_start(self, rank: int, fault: str) -> None:
        """Arm a fault point in a rank when it is started next."""
        path = self.folder / f"arm-at-start.{rank}"
        draft = path.with_suffix(".draft")
        draft.write_text(fault)
        draft.rename(path)

    def decide(self, decision: str) -> None:
        """Decide about the blocked job."""
        with self.stack.http() as http:
            http.post(f"/jobs/{self.job_id}/decision", json={"decision": decision}).raise_for_status()

    def end(self) -> None:
        """Let the training come to its end, which must be the same as the undisturbed one's."""
        (self.folder / "end").touch()
        self.wait("the job to end", lambda: self.info.outcome is not None)
        assert self.info.outcome is JobOutcome.SUCCEEDED, self._describe()
        self.look()
        assert {line.rank for line in self.lines if line.kind == "end"} == set(range(self.num_ranks))
        self.check()

    def close(self) -> None:
        """Stop it if it runs, and wait until its nodes are free again; harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.info.outcome is None:
            self.api.stop_job(self.job_id, now=True)
        try:
            # Not `self.wait`: the job may have failed, which is no failure here.
            _wait(self._nodes_are_free, f"the nodes of {self.job_id} to be free", PATIENCE_S, self.look)
        finally:
            self.api.close()

    def check(self) -> None:
        """Compare every new line with the undisturbed run."""
        self.look()
        for line in self.lines[self._num_checked :]:
            if line.step is None:
                continue
            expected = self._undisturbed.digest(line.rank, line.step)
            assert line.digest == expected, f"{line} differs from the undisturbed run, which has {expected}"
        self._num_checked = len(self.lines)

    # ---- inside

    def _steps_after(self, num_lines: int) -> list[int]:
        new = [line.rank for line in self.lines[num_lines:] if line.kind == "step"]
        return [new.count(rank) for rank in range(self.num_ranks)]

    def _commits_after(self, num_lines: int) -> int:
        """How many newly committed versions ranks have learnt of."""
        before = _newest_commit(self._since_zero(self.lines[:num_lines]))
        return len({step for line in self._since_zero(self.lines) if (step := _newest_commit([line])) > before})

    def _since_zero(self, lines: Sequence[Line]) -> list[Line]:
        """What still counts after the last start from zero."""
        zero = max((line.generation for line in self._restored() if line.step is None), default=0)
        return [line for line in lines if line.generation >= zero]

    def _restored(self, generation: int | None = None) -> list[Line]:
        """What ranks said that they restored, in a generation or in all of them."""
        lines = (line for line in self.lines if line.kind == "restored")
        return [line for line in lines if generation is None or line.generation == generation]

    def _node(self, name: str) -> NodeModel:
        return next(node for node in self.api.nodes() if node.name == name)

    def _num_lives(self, name: str) -> int:
        node_id = self._node(name).node_id
        return sum((event.kind, event.node_id) == ("node_restarted", node_id) for event in self._all_events())

    def _all_events(self) -> list[EventModel]:
        self._events += list(self.api.events(after=self._events[-1].id if self._events else 0))
        return self._events

    def _num_lines(self, rank: int) -> int:
        return sum(line.rank == rank for line in self.lines)

    def _num_new_steps(self, rank: int, generation: int) -> int:
        lines: Iterable[Line] = (line for line in self.lines if line.rank == rank and line.kind == "step")
        return sum(line.generation > generation for line in lines)

    def _nodes_are_free(self) -> bool:
        return all(node.job_id is None for node in self.api.nodes() if node.is_alive)

    def _has_failed(self) -> bool:
        try:
            return self.info.outcome is JobOutcome.FAILED
        except UnavailableError:
            return False  # the control plane is dead, which is no reason to fail

    def _describe(self) -> str:
        job = self.info
        newest = self.lines[-self.num_ranks :]
        return (
            f"the job is {job.phase} in generation {job.generation}, waiting for {job.waiting_for!r}, because of "
            f"{job.cause!r}; newest lines: {newest}; logs in {self.stack.directory}"
        )


def _newest_commit(lines: Iterable[Line]) -> int:
    return max((line.committed_step for line in lines if line.committed_step is not None), default=-1)


def _wait(condition: Callable[[], object], what: str, timeout_s: float, look: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        look()
        if condition():
            return
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
        time.sleep(_POLL_S)
