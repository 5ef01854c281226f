"""What the detector concludes from heartbeats and from silence: a pure state machine.

Time is what the caller's monotonic clock says at each call; nothing a sender claims about time is looked at.
Order within a life of an agent comes from `sequence`, order between lives from `incarnation`.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from gemini_ft.contracts.messages import Heartbeat, RankState, RankStatus, Verdict, VerdictKind
from gemini_ft.failure_detector.accrual import ArrivalWindow
from gemini_ft.failure_detector.settings import DetectorSettings

__all__ = ["Judge", "NodeState"]


class NodeState(enum.StrEnum):
    """What the detector holds of a node."""

    ALIVE = enum.auto()
    SUSPECTED = enum.auto()
    FAILED = enum.auto()


@dataclass
class _Node:
    heartbeat: Heartbeat
    window: ArrivalWindow
    heard_at: float
    judged_from: float
    state: NodeState = NodeState.ALIVE
    timing: bool = True
    """Whether the next arrival ends an interval that tells something about the node's rhythm."""
    past_lives: set[str] = field(default_factory=set)


@dataclass
class _Job:
    generation: int
    progress_at: float
    broken: bool = False
    progress: dict[int, tuple[int, int | None, int | None, bool, RankState]] = field(default_factory=dict)
    exits_told: set[int] = field(default_factory=set)
    hang_told: bool = False


class Judge:
    """Turns heartbeats and the passing of time into verdicts.

    Every method takes `now`, which never falls. A verdict is returned once, for its caller to deliver.
    The detector suspects itself first: nobody is judged while its own ticks are late, while the broker does
    not echo, or (for `mass_silence_hold_s` at most) when most nodes fell silent together. After a start, a
    stall or a reconnection everybody has `grace_s`.
    """

    def __init__(self, settings: DetectorSettings, now: float) -> None:
        self._settings = settings
        self._nodes: dict[str, _Node] = {}
        self._jobs: dict[str, _Job] = {}
        self._ticked_at = now
        self._echoed_at = now
        self._broker_silent = False
        self._held_since: float | None = None
        self.held_for = ""
        """Why nobody is judged at present; empty when everybody is."""

    def remember(self, heartbeat: Heartbeat, now: float) -> None:
        """Take a heartbeat kept from an earlier life of the detector: the node is known, but not proven alive."""
        if heartbeat.node_id not in self._nodes:
            self._nodes[heartbeat.node_id] = self._new_node(heartbeat, now, timing=False)
            self._follow_job(heartbeat, now)

    def hear(self, heartbeat: Heartbeat, now: float) -> list[Verdict]:
        """Take a heartbeat that has just arrived. One that is repeated, late or of a past life changes nothing."""
        node = self._nodes.get(heartbeat.node_id)
        was_blamed = node is not None and node.state is not NodeState.ALIVE
        if node is None:
            node = self._nodes[heartbeat.node_id] = self._new_node(heartbeat, now)
        elif heartbeat.incarnation in node.past_lives:
            return []
        elif heartbeat.incarnation != node.heartbeat.incarnation:
            lives = node.past_lives | {node.heartbeat.incarnation}
            node = self._nodes[heartbeat.node_id] = self._new_node(heartbeat, now)
            node.past_lives = lives
        elif heartbeat.sequence <= node.heartbeat.sequence:
            return []
        else:
            self._hear_again(node, heartbeat, now)
        verdicts = []
        if was_blamed:
            verdicts.append(_verdict(VerdictKind.RECOVERED, node, detail="a new heartbeat has arrived"))
        job = self._follow_job(heartbeat, now)
        return verdicts if job is None else [*verdicts, *self._exits(node, job)]

    def echo(self, now: float) -> None:
        """The broker has returned a message of the detector's own."""
        self._echoed_at = now
        if self._broker_silent:
            self._broker_silent = False
            self._grant_grace(now)

    def reconnected(self, now: float) -> None:
        """The detector was cut off from the broker, and so, it may be, were the nodes: they need time to return."""
        self._echoed_at = now
        self._broker_silent = False
        self._grant_grace(now)

    def tick(self, now: float) -> list[Verdict]:
        """Judge everybody; to be called every `tick_s`."""
        settings = self._settings
        if now - self._ticked_at > settings.tick_s + settings.stall_s:
            self._grant_grace(now)
        self._ticked_at = now
        self._broker_silent = self._broker_silent or now - self._echoed_at > settings.stall_s
        self.held_for = self._reason_to_hold(now)
        if self.held_for:
            return []
        self._forget(now)
        verdicts = [verdict for node in self._nodes.values() for verdict in self._judge(node, now)]
        return verdicts + [verdict for job_id, job in self._jobs.items() for verdict in self._hangs(job_id, job, now)]

    def suspicions(self, now: float) -> dict[str, tuple[NodeState, float]]:
        """Return of every known node how it was judged last, and the suspicion that its silence until now deserves."""
        return {
            node_id: (node.state, self._phi(node, self._settings.acceptable_pause_s, now))
            for node_id, node in self._nodes.items()
        }

    # ---- heartbeats

    def _new_node(self, heartbeat: Heartbeat, now: float, *, timing: bool = True) -> _Node:
        judged_from = now if timing else now + self._settings.grace_s
        return _Node(heartbeat, self._new_window(heartbeat), heard_at=now, judged_from=judged_from, timing=timing)

    def _new_window(self, heartbeat: Heartbeat) -> ArrivalWindow:
        return ArrivalWindow(
            expected_interval_s=heartbeat.interval_s,
            num_intervals=self._settings.num_intervals,
            deviation_floor_s=self._settings.deviation_floor_s,
        )

    def _hear_again(self, node: _Node, heartbeat: Heartbeat, now: float) -> None:
        if heartbeat.interval_s != node.heartbeat.interval_s:
            node.window = self._new_window(heartbeat)
        elif node.timing and node.state is NodeState.ALIVE:
            # A silence that looked like a death is an outage, not the node's rhythm.
            node.window.add(now - node.heard_at)
        node.heartbeat = heartbeat
        node.heard_at = node.judged_from = now
        node.timing = True
        node.state = NodeState.ALIVE

    def _follow_job(self, heartbeat: Heartbeat, now: float) -> _Job | None:
        if heartbeat.job_id is None:
            return None
        job = self._jobs.get(heartbeat.job_id)
        if job is None or heartbeat.ordered_generation > job.generation:
            job = self._jobs[heartbeat.job_id] = _Job(heartbeat.ordered_generation, progress_at=now)
        for status in heartbeat.ranks:
            if status.generation == job.generation:
                progress = (status.pid, status.finished_step, status.held_step, status.restored, status.state)
                if job.progress.get(status.rank) != progress:
                    job.progress[status.rank] = progress
                    job.progress_at = now
        return job

    def _exits(self, node: _Node, job: _Job) -> Iterator[Verdict]:
        for status in node.heartbeat.ranks:
            is_current = status.generation == job.generation and status.rank not in job.exits_told
            if is_current and _has_failed(status, node.heartbeat.finished):
                job.exits_told.add(status.rank)
                job.broken = True
                yield _verdict(
                    VerdictKind.RANK_EXITED,
                    node,
                    generation=status.generation,
                    rank=status.rank,
                    detail=_describe_exit(status),
                )

    # ---- the detector itself

    def _grant_grace(self, now: float) -> None:
        for node in self._nodes.values():
            if node.state is not NodeState.FAILED:
                node.judged_from = now + self._settings.grace_s
                node.heard_at = now
                node.timing = False
        for job in self._jobs.values():
            job.progress_at = now

    def _reason_to_hold(self, now: float) -> str:
        if self._broker_silent:
            return f"the broker has not returned a message of the detector for {now - self._echoed_at:.1f} s"
        living = [node for node in self._nodes.values() if node.state is not NodeState.FAILED]
        silent = [node for node in living if self._looks_silent(node, now)]
        newest = max((node.heard_at for node in silent), default=now)
        together = [node for node in silent if newest - node.heard_at <= self._settings.mass_silence_window_s]
        if len(together) < 2 or 2 * len(together) <= len(living):
            self._held_since = None
            return ""
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since >= self._settings.mass_silence_hold_s:
            return ""
        return f"{len(together)} of {len(living)} nodes fell silent together"

    # ---- silence

    def _looks_silent(self, node: _Node, now: float) -> bool:
        return (
            now >= node.judged_from
            and self._phi(node, self._settings.acceptable_pause_s, now) >= self._settings.suspect_phi
        )

    def _phi(self, node: _Node, pause_s: float, now: float) -> float:
        silent_s = now - node.heard_at
        if silent_s <= node.heartbeat.interval_s + pause_s:
            return 0.0  # below one half of a chance; nearly every call ends here
        return node.window.phi(silent_s, pause_s)

    def _pause_s(self, node: _Node) -> float:
        job = self._jobs.get(node.heartbeat.job_id or "")
        # A node that was never fenced has joined since; no recovery waits for it.
        is_late = job is not None and 0 < node.heartbeat.ordered_generation < job.generation
        is_broken = job is not None and (job.broken or is_late)
        return self._settings.acceptable_pause_s if is_broken else self._settings.patience_s

    def _judge(self, node: _Node, now: float) -> Iterator[Verdict]:
        if node.state is NodeState.FAILED or not self._looks_silent(node, now):
            return
        if node.state is NodeState.ALIVE:
            node.state = NodeState.SUSPECTED
            yield self._silence(VerdictKind.SUSPECTED, node, self._settings.acceptable_pause_s, now)
        pause_s = self._pause_s(node)
        if self._phi(node, pause_s, now) >= self._settings.fail_phi:
            node.state = NodeState.FAILED
            yield self._silence(VerdictKind.FAILED, node, pause_s, now)

    def _silence(self, kind: VerdictKind, node: _Node, pause_s: float, now: float) -> Verdict:
        silent_s = now - node.heard_at
        detail = f"no heartbeat for {silent_s:.2f} s; one is expected every {node.window.mean_s:.2f} s"
        return _verdict(kind, node, detail=detail, phi=self._phi(node, pause_s, now), silent_s=silent_s)

    def _forget(self, now: float) -> None:
        for node_id, node in list(self._nodes.items()):
            if node.state is NodeState.FAILED and now - node.heard_at > self._settings.forget_s:
                del self._nodes[node_id]
        present = {node.heartbeat.job_id for node in self._nodes.values()}
        for job_id in self._jobs.keys() - present:
            del self._jobs[job_id]

    # ---- hangs

    def _hangs(self, job_id: str, job: _Job, now: float) -> Iterator[Verdict]:
        running = [
            (-1 if status.finished_step is None else status.finished_step, status.rank, node)
            for node in self._nodes.values()
            if node.heartbeat.job_id == job_id and node.state is NodeState.ALIVE
            for status in node.heartbeat.ranks
            # A rank that is held waits on purpose, and bounds that wait itself.
            if (status.generation, status.state, status.held_step) == (job.generation, RankState.RUNNING, None)
        ]
        if job.hang_told or not running:
            return
        step, rank, node = min(running, key=lambda entry: entry[:2])
        timeout_s = node.heartbeat.hang_timeout_s
        if timeout_s is None or now - job.progress_at <= timeout_s:
            return
        job.hang_told = True
        finished = "has finished no step" if step < 0 else f"finished step {step} last"
        yield _verdict(
            VerdictKind.RANK_HUNG,
            node,
            generation=job.generation,
            rank=rank,
            detail=f"no rank of {job_id} has finished a step for {now - job.progress_at:.0f} s; "
            f"rank {rank}, the furthest behind, {finished}",
        )


def _has_failed(status: RankStatus, node_finished: bool) -> bool:
    if status.state is not RankState.EXITED or status.exit_code == 0:
        return False
    # An agent that came back after its ranks had ended knows from the launcher that they ended well.
    return status.exit_code is not None or not node_finished


def _describe_exit(status: RankStatus) -> str:
    code = status.exit_code
    how = "with unknown status" if code is None else f"by signal {-code}" if code < 0 else f"with status {code}"
    # The first line is for people in a hurry, the end of the log for the others.
    return f"rank {status.rank} (process {status.pid}) ended {how}" + (f"\n{status.detail}" if status.detail else "")


def _verdict(
    kind: VerdictKind,
    node: _Node,
    *,
    detail: str,
    generation: int | None = None,
    rank: int | None = None,
    phi: float | None = None,
    silent_s: float | None = None,
) -> Verdict:
    heartbeat = node.heartbeat
    return Verdict(
        kind=kind,
        node_id=heartbeat.node_id,
        incarnation=heartbeat.incarnation,
        job_id=heartbeat.job_id,
        generation=heartbeat.ordered_generation if generation is None else generation,
        rank=rank,
        sequence=heartbeat.sequence,
        detail=detail,
        phi=phi,
        silent_s=silent_s,
    )
