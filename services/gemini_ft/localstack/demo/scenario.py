"""What is broken, in which order, and what has to be seen before and after.

A drill never sleeps: it begins when the observed state is right, and ends when the state that it is about
has been seen.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import JobPhase, NodeModel, RecoveryModel
from gemini_ft.contracts.errors import GeminiError, NotFoundError, WaitTimeoutError
from gemini_ft.contracts.messages import JobOutcome
from gemini_ft.localstack.demo.observe import JobObserver
from gemini_ft.localstack.demo.records import DETECT, SET_UP, DrillRecord
from gemini_ft.localstack.processes import kill_processes
from gemini_ft.localstack.stack import LocalStack

__all__ = ["DRILLS", "Drill", "DrillFailedError", "Stage", "kill_agent", "kill_control_plane", "kill_rank", "lose_node"]

_POLL_S = 0.005
_PATIENCE_S = 90.0
_WARM_PATIENCE_S = 180.0
_KILL_TIMEOUT_S = 10.0
_NUM_STEPS_BETWEEN = 4


class DrillFailedError(GeminiError):
    """The run did not survive as promised."""


class Stage:
    """The running job, with the waits that drills are made of. Every wait keeps the observation and the view going."""

    def __init__(
        self, stack: LocalStack, client: ApiClient, observer: JobObserver, *, on_look: Callable[[], None]
    ) -> None:
        self.stack = stack
        self.observer = observer
        self._client = client
        self._on_look = on_look

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = _PATIENCE_S) -> None:
        """Return once `condition()` holds.

        Raises:
            DrillFailedError: the job has ended, or is blocked.
            WaitTimeoutError: it did not hold in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.observer.poll()
            self._on_look()
            if condition():
                return
            job = self.observer.job
            if job.outcome is JobOutcome.SUCCEEDED:
                raise DrillFailedError(f"the training ended while the demo waited for {what}; give it more steps")
            if job.outcome is not None or job.phase is JobPhase.BLOCKED:
                raise DrillFailedError(f"the job is {job.phase} while waiting for {what}: {job.cause}")
            if time.monotonic() > deadline:
                raise WaitTimeoutError.of(what, timeout_s)
            time.sleep(_POLL_S)

    def wait_calm(self) -> None:
        """Wait until the job runs, some new steps and commits have been seen, and all copies are in place."""
        self.wait_warm()
        losses = self.observer.losses
        step, committed = losses.last_step, losses.committed_step
        self.wait(
            lambda: (
                self.observer.job.phase is JobPhase.RUNNING
                and losses.last_step >= step + _NUM_STEPS_BETWEEN
                and losses.committed_step >= committed + _NUM_STEPS_BETWEEN
                and self.observer.is_whole(step)
            ),
            "an undisturbed stretch of training",
        )

    def wait_warm(self) -> None:
        """Wait until all launchers, the standbys' too, have preloaded what the script imports.

        From then on a restart costs what it always costs; until then their imports take time from it.
        """
        job_id = self.observer.job.job_id
        names = {node.name for node in self.observer.nodes if node.job_id == job_id}
        self.wait(
            lambda: all(self.stack.nodes[name].has_learned for name in names),
            f"the launchers of {', '.join(sorted(names))} to have learned imports",
            _WARM_PATIENCE_S,
        )

    def wait_whole(self, step: int, since: float) -> float:
        """Wait until versions of `step` or newer are in all their places; return the milliseconds since `since`."""
        self.wait(lambda: self.observer.is_whole(step), "redundancy to be whole again")
        return _ms_since(since)

    def wait_first_step(self, generation: int, since: float) -> float:
        """Wait until every rank has finished a step of `generation` or a newer one; return the milliseconds it took."""
        finished_at: list[float] = []

        def is_finished() -> bool:
            finished_at[:] = filter(None, [self.observer.losses.first_finished_at(generation)])
            return bool(finished_at)

        self.wait(is_finished, f"the first step of generation {generation}")
        return (finished_at[0] - since) * 1000

    def wait_recovery(self, generation: int) -> RecoveryModel:
        """Wait until the recovery that made `generation`, or a newer one, is over; return its record."""
        completed: list[RecoveryModel] = []

        def is_over() -> bool:
            if self.observer.job.phase is JobPhase.RUNNING and self.observer.job.generation >= generation:
                records = self._client.recoveries(self.observer.job.job_id)
                completed[:] = [record for record in records if record.outcome == "completed"][:1]
            return bool(completed) and completed[0].generation >= generation

        self.wait(is_over, f"the end of the recovery to generation {generation}")
        return completed[0]

    def wait_end(self) -> None:
        """Wait until the job has ended, as long as it makes progress; raises WaitTimeoutError when it does not."""
        observer = self.observer
        step, deadline = observer.losses.last_step, time.monotonic() + _PATIENCE_S
        while observer.job.outcome is None:
            observer.poll()
            self._on_look()
            if observer.losses.last_step > step:
                step, deadline = observer.losses.last_step, time.monotonic() + _PATIENCE_S
            if time.monotonic() > deadline:
                raise WaitTimeoutError.of(f"a step after step {step}, or the end of the job", _PATIENCE_S)
            time.sleep(_POLL_S)

    def member(self, slot: int) -> NodeModel:
        """The node in a slot."""
        for node in self.observer.members:
            if node.slot == slot:
                return node
        raise NotFoundError(f"no node is in slot {slot}")


@dataclass(frozen=True)
class Drill:
    """One thing that goes wrong. `perform` breaks it, waits for what was promised, and returns what it cost."""

    key: str
    title: str
    perform: Callable[[Stage, "Drill"], DrillRecord]


def kill_rank(rank: int) -> Callable[[Stage, Drill], DrillRecord]:
    """SIGKILL a rank in the middle of an iteration."""

    def perform(stage: Stage, drill: Drill) -> DrillRecord:
        stage.wait_calm()
        losses, generation = stage.observer.losses, stage.observer.job.generation
        process = stage.stack.rank_process(stage.observer.job.job_id, rank)
        _wait_mid_iteration(stage)
        at_step, killed = losses.last_step, _Moment.now()
        kill_processes([process], _KILL_TIMEOUT_S)
        what = f"SIGKILL of rank {rank} (process {process.pid}) in the middle of step {at_step + 1}"
        return _recovered(stage, drill, what, at_step, generation, killed)

    return perform


def _wait_mid_iteration(stage: Stage) -> None:
    """Wait until a step has just ended, and about half of the next one is over."""
    losses = stage.observer.losses
    step = losses.last_step
    stage.wait(lambda: losses.last_step > step, "the end of a step")
    half_way = time.monotonic() + (losses.median_step_s() or 0.0) / 2
    stage.wait(lambda: time.monotonic() >= half_way, "the middle of a step")


def _recovered(stage: Stage, drill: Drill, what: str, at_step: int, generation: int, killed: "_Moment") -> DrillRecord:
    step_after_ms = stage.wait_first_step(generation + 1, killed.monotonic)
    recovery = stage.wait_recovery(generation + 1)
    # The coordinator cannot know when it happened, only when it heard of it; here all share one machine's clocks.
    detect_ms = 1000 * (recovery.started_at.timestamp() - killed.wall)
    known_ms = {**recovery.phases_ms, DETECT: detect_ms}
    return DrillRecord(
        key=drill.key,
        title=drill.title,
        what=what,
        at_step=at_step,
        step_after_ms=step_after_ms,
        phases_ms={**known_ms, SET_UP: step_after_ms - sum(known_ms.values())},
        restored_step=recovery.restored_step,
        num_steps_lost=recovery.num_steps_lost,
        whole_again_ms=stage.wait_whole(recovery.restored_step or 0, killed.monotonic),
    )


@dataclass(frozen=True)
class _Moment:
    monotonic: float
    wall: float

    @classmethod
    def now(cls) -> "_Moment":
        return cls(time.monotonic(), time.time())


def kill_agent(slot: int) -> Callable[[Stage, Drill], DrillRecord]:
    """SIGKILL the agent of a slot, see training go on without it, and start it again."""

    def perform(stage: Stage, drill: Drill) -> DrillRecord:
        stage.wait_calm()
        losses, generation = stage.observer.losses, stage.observer.job.generation
        name = stage.member(slot).name
        at_step, committed, killed_at = losses.last_step, losses.committed_step, time.monotonic()
        stage.stack.kill_agent(name)
        stage.wait(lambda: losses.last_step >= at_step + 2, "steps without the agent")
        num_steps, num_commits = losses.last_step - at_step, losses.committed_step - committed
        stage.stack.start_agent(name)
        restarted_at = losses.last_step
        stage.wait(lambda: losses.committed_step > restarted_at, "new commits with the new agent")
        whole_again_ms = stage.wait_whole(restarted_at + 1, killed_at)
        if stage.observer.job.generation != generation:
            raise DrillFailedError(
                f"the loss of agent {name} stopped the training: generation {stage.observer.job.generation}, not "
                f"{generation}: {stage.observer.job.cause}"
            )
        return DrillRecord(
            key=drill.key,
            title=drill.title,
            what=f"SIGKILL of the agent of {name}, which was started again",
            at_step=at_step,
            whole_again_ms=whole_again_ms,
            num_steps_meanwhile=num_steps,
            num_commits_meanwhile=num_commits,
        )

    return perform


def lose_node(slot: int) -> Callable[[Stage, Drill], DrillRecord]:
    """SIGKILL every process of the node in a slot and delete its memory; a standby has to take over."""

    def perform(stage: Stage, drill: Drill) -> DrillRecord:
        stage.wait_calm()
        losses, generation = stage.observer.losses, stage.observer.job.generation
        lost = stage.member(slot)
        at_step, killed = losses.last_step, _Moment.now()
        stage.stack.kill_node(lost.name)
        what = f"SIGKILL of every process of {lost.name}, and its memory deleted"
        record = _recovered(stage, drill, what, at_step, generation, killed)
        heir = stage.member(slot)
        if heir.node_id == lost.node_id:
            raise DrillFailedError(f"{lost.name} was lost, but is still in slot {slot}")
        return record.model_copy(update={"what": f"{what}; {heir.name} took its slot"})

    return perform


def kill_control_plane(outage_s: float) -> Callable[[Stage, Drill], DrillRecord]:
    """SIGKILL all of the control plane, see steps and commits go on for `outage_s`, and start it again."""

    def perform(stage: Stage, drill: Drill) -> DrillRecord:
        stage.wait_calm()
        observer, losses = stage.observer, stage.observer.losses
        generation = observer.job.generation
        at_step, committed, killed_at = losses.last_step, losses.committed_step, time.monotonic()
        stage.stack.kill_control_plane()
        stage.wait(
            lambda: (
                time.monotonic() >= killed_at + outage_s
                and losses.last_step >= at_step + _NUM_STEPS_BETWEEN
                and losses.committed_step >= committed + _NUM_STEPS_BETWEEN
            ),
            "steps and commits without a control plane",
        )
        num_steps, num_commits = losses.last_step - at_step, losses.committed_step - committed
        stage.stack.start_control_plane()
        whole_again_ms = stage.wait_whole(losses.last_step, killed_at)
        if observer.job.generation != generation:
            raise DrillFailedError(f"the loss of the control plane stopped the training: {observer.job.cause}")
        return DrillRecord(
            key=drill.key,
            title=drill.title,
            what=f"SIGKILL of coordinator, failure detector, NATS and Postgres together, dead for {outage_s:.0f} s",
            at_step=at_step,
            whole_again_ms=whole_again_ms,
            num_steps_meanwhile=num_steps,
            num_commits_meanwhile=num_commits,
        )

    return perform


def _ms_since(moment: float) -> float:
    return (time.monotonic() - moment) * 1000


DRILLS = (
    Drill("a", "one rank is killed", kill_rank(1)),
    Drill("b", "one agent is killed", kill_agent(3)),
    Drill("c", "one machine is lost with its memory", lose_node(2)),
    Drill("d", "the whole control plane is killed", kill_control_plane(outage_s=10.0)),
    Drill("a'", "one rank is killed again", kill_rank(0)),
)
"""In this order. What (d) proves is complete only when (a') has shown that recovery works after it."""
