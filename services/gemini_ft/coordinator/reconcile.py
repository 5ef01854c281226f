"""Decides what must be done so that what is observed becomes what is wanted. Pure: no I/O, no clock of its own.

State is truth: every pass looks at the whole of it, so that a lost message, a repeated one or a restart of this
process changes nothing but the time it takes (docs/protocol.md, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from gemini_ft.contracts.errors import from_wire
from gemini_ft.contracts.ids import NodeId
from gemini_ft.contracts.messages import (
    Assign,
    CheckpointNow,
    CloseJob,
    Fence,
    Heartbeat,
    HeldVersion,
    Hold,
    JobOutcome,
    LauncherKind,
    Order,
    RankStatus,
    StartJob,
)
from gemini_ft.coordinator import seating
from gemini_ft.coordinator.actions import (
    Action,
    Admit,
    AssignPlan,
    BeginGeneration,
    Block,
    CompleteRecovery,
    Dismiss,
    End,
    Explain,
    OrderHold,
    RecordVersion,
    Recruit,
    Revive,
    Send,
    Suspend,
)
from gemini_ft.coordinator.observations import Observations, Sighting, fingerprint
from gemini_ft.coordinator.progress import committed_step, finished_step, heartbeats, held_step, newest_commit
from gemini_ft.coordinator.settings import CoordinatorSettings
from gemini_ft.coordinator.state import Cluster, HoldReason, JobPhase, JobView, NodeStatus, NodeView, StoredPlan
from gemini_ft.planning.recovery import Blocked, Membership, NodeState, RecoveryPlan, Waiting, plan_recovery

__all__ = ["decide", "decisions", "free_nodes"]

_NUM_NAMED = 8
_NUM_NODES_AT_ONCE = 100
_HELD = "all ranks to be held at the same committed step"


def decide(cluster: Cluster, seen: Observations, now: float, settings: CoordinatorSettings) -> list[Action]:
    """Return what must be done now, in order; nothing when all is as it should be. `now` is on the clock of `seen`."""
    return list(chain.from_iterable(decisions(cluster, seen, now, settings)))


def decisions(
    cluster: Cluster, seen: Observations, now: float, settings: CoordinatorSettings
) -> Iterator[list[Action]]:
    """Yield what `decide` returns part by part, for callers that have other work to do in between."""
    nodes = list(cluster.nodes.values())
    for begin in range(0, len(nodes), _NUM_NODES_AT_ONCE):
        part = nodes[begin : begin + _NUM_NODES_AT_ONCE]
        yield [action for node in part for action in _about_node(cluster, seen, node, settings)]
    free = free_nodes(cluster, seen, settings)
    for job in sorted(cluster.jobs.values(), key=lambda job: (job.created_at, job.job_id)):
        if job.phase.outcome is None:
            yield list(_JobDecision(cluster, seen, now, settings, job, free).actions())


def free_nodes(cluster: Cluster, seen: Observations, settings: CoordinatorSettings) -> list[NodeView]:
    """Nodes that can be given to a job, the longest known first."""
    free = []
    for node in sorted(cluster.nodes.values(), key=lambda node: (node.registered_at, node.node_id)):
        sighting = seen.sighting(node)
        if sighting is None or node.status is not NodeStatus.ALIVE or node.job_id is not None or node.cordoned:
            continue
        if sighting.heartbeat.job_id is None and seen.is_fresh(node, settings.silence.total_seconds()):
            free.append(node)
    return free


def _about_node(
    cluster: Cluster, seen: Observations, node: NodeView, settings: CoordinatorSettings
) -> Iterator[Action]:
    sighting = seen.sighting(node)
    if sighting is None:
        return
    heartbeat = sighting.heartbeat
    if node.status is not NodeStatus.ALIVE and heartbeat.sequence > node.judged_sequence and not node.removed:
        yield Revive(node.node_id, node.incarnation, heartbeat.sequence)
    # A job that the database does not know is left alone: ending what one does not know is worse than keeping it.
    job = cluster.jobs.get(heartbeat.job_id) if heartbeat.job_id is not None else None
    if job is None or not seen.is_fresh(node, settings.silence.total_seconds()):
        return
    if job.phase.outcome is not None:
        yield Send(
            node.node_id,
            node.incarnation,
            CloseJob(job_id=job.job_id, outcome=job.phase.outcome, reason=job.cause),
        )
    elif node.job_id != job.job_id:
        reason = f"{node.node_id} no longer belongs to {job.job_id}: it was replaced before generation {job.generation}"
        yield Send(
            node.node_id, node.incarnation, CloseJob(job_id=job.job_id, outcome=JobOutcome.STOPPED, reason=reason)
        )


class _JobDecision:
    """The decision about one open job; takes nodes from `free`."""

    def __init__(
        self,
        cluster: Cluster,
        seen: Observations,
        now: float,
        settings: CoordinatorSettings,
        job: JobView,
        free: list[NodeView],
    ) -> None:
        self.cluster = cluster
        self.seen = seen
        self.now = now
        self.settings = settings
        self.job = job
        self.free = free
        self.at = (job.job_id, job.generation, job.phase)

    def actions(self) -> Iterator[Action]:
        match self.job.phase:
            case JobPhase.PENDING:
                yield from self._pending()
            case JobPhase.FENCING:
                yield from self._fencing()
            case JobPhase.ASSIGNED | JobPhase.RUNNING | JobPhase.STOPPING:
                yield from self._record_version()
                yield from self._under_way()
            case JobPhase.BLOCKED:
                yield from self._blocked()
            case JobPhase.SUSPENDED:
                yield from self._suspended()

    # ---- pending

    def _pending(self) -> Iterator[Action]:
        spec, candidates = self.job.spec, seating.eligible(self.job.spec, self.free)
        if len(candidates) < spec.num_nodes:
            labels = ", ".join(f"{label}={value}" for label, value in sorted(spec.node_selector.items()))
            what = f"{spec.num_nodes} free nodes{f' with {labels}' if labels else ''}"
            yield from self._explain(f"{what}; {len(candidates)} are ready")
            return
        found = seating.seat(spec, candidates)
        self._take({*found.slots.values(), *found.standbys})
        yield Admit(*self.at, slots=found.slots, standbys=found.standbys, note=found.note)

    # ---- fencing: steps 2 and 3 of the protocol

    def _fencing(self) -> Iterator[Action]:
        states = {node.node_id: self._state(node) for node in self._members()}
        inventories: dict[NodeId, Sequence[HeldVersion]] = {}
        told_commits = [committed_step(self.job, self.cluster, self.seen)]
        for node in self._members():
            if states[node.node_id] is NodeState.LOST:
                continue
            inventory = self.seen.inventory(self.job.job_id, self.job.generation, node)
            if inventory is not None:
                inventories[node.node_id] = inventory.held
                told_commits.append(inventory.committed_step)
            elif self._knows_job(node):
                yield self._send(node, Fence(job_id=self.job.job_id, generation=self.job.generation))
            else:
                yield self._send(node, self._start_job())
        plan = plan_recovery(
            self.job.geometry,
            self._membership(states),
            inventories,
            committed_step=max((step for step in told_commits if step is not None), default=None),
            restored_steps=self.job.restored_steps,
            from_zero=self.job.from_zero,
        )
        match plan:
            case Waiting(what, num_missing_nodes):
                yield from self._recruit(num_missing_nodes)
                yield from self._explain("; ".join([what, *self._refusals(self._members())]))
            case Blocked(sentence, notes):
                lost = tuple(node_id for node_id in self.job.slots.values() if states[node_id] is NodeState.LOST)
                yield Block(*self.at, sentence="; ".join((sentence, *notes)), lost=lost)
            case RecoveryPlan():
                yield AssignPlan(
                    *self.at,
                    plan=StoredPlan(
                        slots=plan.slots,
                        placement=plan.placement,
                        restore_step=plan.restore_step,
                        sources=plan.sources,
                        notes=plan.notes,
                    ),
                    cause=self.job.cause,
                    phases_s={"fence": self.seen.in_phase_for_s(*self.at)},
                )

    def _membership(self, states: dict[NodeId, NodeState]) -> Membership:
        standbys = [node_id for node_id in self.job.standbys if not self.cluster.nodes[node_id].cordoned]
        leaving = [node.node_id for node in self._members() if node.draining]
        labels = {node.node_id: node.labels for node in self._members()}
        return Membership(self.job.slots, standbys, states, leaving, labels, seating.levels_of(self.job.spec))

    def _state(self, node: NodeView) -> NodeState:
        if node.status is NodeStatus.FAILED:
            return NodeState.LOST
        answered = self.seen.inventory(self.job.job_id, self.job.generation, node) is not None
        too_long = self.seen.in_phase_for_s(*self.at) > self.settings.fence_limit.total_seconds()
        # A silent node is the detector's to judge. Of a deaf one the peers, which are fenced, refuse all writes.
        if not answered and too_long and self.seen.is_fresh(node, self.settings.silence.total_seconds()):
            return NodeState.LOST
        return NodeState.ALIVE

    # ---- assigned and running: steps 4 to 6

    def _under_way(self) -> Iterator[Action]:
        beats = dict(heartbeats(self.job, self.cluster, self.seen))
        if len(beats) == len(self.job.slots) and all(
            beat.finished and beat.assigned_generation == self.job.generation for beat in beats.values()
        ):
            yield End(*self.at, ended=JobPhase.SUCCEEDED, cause="all ranks have ended well")
            return
        failure = self._failure()
        if failure is not None:
            yield self._begin_generation(*failure)
            return
        held = held_step(self.job, self.cluster, self.seen)
        if held is not None and self.job.hold_reason is not HoldReason.NONE:
            yield self._leave_hold(held)
            return
        yield from self._assign()
        if self.job.phase is JobPhase.ASSIGNED:
            waiting = self._ranks_without_new_step(beats)
            if waiting:
                yield from self._explain("; ".join([f"the first step of {waiting}", *self._refusals(self._members())]))
            else:
                num_ranks = self.job.geometry.num_ranks
                measured = self.seen.restart_phases_s(self.job.job_id, self.job.generation, num_ranks)
                yield CompleteRecovery(*self.at, phases_s=_reported_phases(self._ranks(beats)) | measured)
        else:
            yield from self._hold()
        yield from self._checkpoint_now()
        yield from self._keep_standbys(beats)

    def _failure(self) -> tuple[str, float | None] | None:
        """Why this generation is broken, and how long it took to see it; None if it is not."""
        trigger = self.seen.trigger(self.job.job_id, self.job.generation)
        if trigger is not None:
            return trigger.cause, trigger.detect_s
        for slot, node_id in sorted(self.job.slots.items()):
            node = self.cluster.nodes[node_id]
            where = f"{node_id} (slot {slot})"
            if node.status is NodeStatus.FAILED:
                silent_s = self.seen.silent_s(node)
                return f"{where} has failed" + (f": silent for {silent_s:.2f} s" if silent_s else ""), silent_s
            sighting = self.seen.sighting(node)
            if sighting is None:
                continue
            heartbeat = sighting.heartbeat
            if heartbeat.job_id is None:
                return f"{where} has come back without the job: its memory is lost", 0.0
            if heartbeat.job_id != self.job.job_id or heartbeat.finished:
                continue
            for status in heartbeat.ranks:
                if status.generation == self.job.generation and status.restore_error is not None:
                    return f"rank {status.rank} on {where} could not restore: {from_wire(status.restore_error)}", 0.0
            gone_s = self._launcher_gone_for_s(sighting)
            if gone_s > self.settings.launcher_grace.total_seconds():
                cause = f"the launcher on {where} has been gone for {gone_s:.1f} s"
                return "; ".join([cause, *self._refusals([node])]), gone_s
        return None

    def _launcher_gone_for_s(self, sighting: Sighting) -> float:
        not_begun = self.job.spec.launcher is LauncherKind.EXTERNAL and self.job.phase is JobPhase.ASSIGNED
        if sighting.launcher_missing_since is None or not_begun:
            return 0.0
        return min(self.now - sighting.launcher_missing_since, self.seen.in_phase_for_s(*self.at))

    def _begin_generation(self, cause: str, detect_s: float | None) -> Action:
        job = self.job
        committed = committed_step(job, self.cluster, self.seen)
        progressed = committed is not None and (job.progress_step is None or committed > job.progress_step)
        num_fruitless = 0 if progressed else job.num_fruitless_recoveries
        if num_fruitless >= job.spec.max_recoveries_without_progress:
            return End(
                *self.at,
                ended=JobPhase.FAILED,
                cause=f"{num_fruitless} recoveries in a row brought no newly committed version; last cause: {cause}",
            )
        return BeginGeneration(
            *self.at,
            cause=cause,
            num_fruitless_recoveries=num_fruitless + 1,
            progress_step=committed if progressed else job.progress_step,
            finished_step=finished_step(job, self.cluster, self.seen),
            detect_s=detect_s,
        )

    # ---- running and stopping: holds

    def _hold(self) -> Iterator[Action]:
        """See that the ranks are held if that is wanted; order it where a draining node can be replaced."""
        match self.job.hold_reason:
            case HoldReason.STOP if self.job.phase is JobPhase.RUNNING:
                yield OrderHold(*self.at, reason=HoldReason.STOP, why="a person stops the job")
            case HoldReason.NONE:
                yield from self._drain()
            case _:
                order = Hold(job_id=self.job.job_id, generation=self.job.generation)
                yield from self._send_to_slots(order)
                yield from self._explain("; ".join([_HELD, *self._refusals(self._members())]))

    def _drain(self) -> Iterator[Action]:
        """A slot is vacated only when somebody is ready to take it; until then training goes on."""
        leaving = ", ".join(f"{node.node_id} (slot {node.slot})" for node in self._draining())
        ready = [node for node in self._usable_standbys() if self._is_ready(node)]
        if leaving and ready:
            yield OrderHold(*self.at, reason=HoldReason.DRAIN, why=f"{leaving} is drained")
        else:
            yield from self._explain(f"a standby or a free node to replace {leaving}, to be drained" if leaving else "")

    def _leave_hold(self, held: int) -> Action:
        if self.job.hold_reason is HoldReason.STOP:
            return Suspend(*self.at, final_step=held)
        leaving = [node.node_id for node in self._draining()]
        cause = f"drain of {', '.join(leaving)}" if leaving else "the ranks were held for a drain that was taken back"
        return BeginGeneration(
            *self.at,
            cause=cause,
            num_fruitless_recoveries=self.job.num_fruitless_recoveries,
            progress_step=self.job.progress_step,
            finished_step=held,
            detect_s=None,
        )

    def _checkpoint_now(self) -> Iterator[Action]:
        """Pass a person's request on until it is answered by a newer version."""
        after = self.job.checkpoint_after_step
        committed = committed_step(self.job, self.cluster, self.seen)
        if after is not None and (committed is None or committed <= after):
            yield from self._send_to_slots(
                CheckpointNow(
                    job_id=self.job.job_id, generation=self.job.generation, request=self.job.checkpoint_requests
                )
            )

    def _send_to_slots(self, order: Hold | CheckpointNow) -> Iterator[Action]:
        for node_id in self.job.slots.values():
            node = self.cluster.nodes[node_id]
            if not self.seen.is_done(node, order):
                yield self._send(node, order)

    def _draining(self) -> list[NodeView]:
        """Nodes in slots that are to be replaced."""
        return [node for node in self._members() if node.draining and node.slot is not None]

    def _is_ready(self, node: NodeView) -> bool:
        fresh = self.seen.is_fresh(node, self.settings.silence.total_seconds())
        return fresh and node.status is NodeStatus.ALIVE and self._knows_job(node)

    # ---- assigned, running and stopping: plan and standbys

    def _assign(self) -> Iterator[Action]:
        """Send the plan to every member that does not show it, or that has not confirmed the newest addresses."""
        assert self.job.plan is not None
        plan = self.job.plan
        nodes = [self.cluster.nodes[node_id] for node_id in plan.slots.values()]
        # A node that was a source may have been removed since.
        sources = {
            rank: tuple(node_id for node_id in held_by if node_id in self.cluster.nodes)
            for rank, held_by in plan.sources.items()
        }
        named = {*plan.slots.values(), *chain.from_iterable(sources.values())}
        order = Assign(
            job_id=self.job.job_id,
            generation=self.job.generation,
            slots=plan.slots,
            addresses={node_id: self.cluster.nodes[node_id].address for node_id in sorted(named)},
            placement=plan.placement,
            restore_step=plan.restore_step,
            sources=sources,
        )
        key = fingerprint(order)
        for node in nodes:
            sighting = self.seen.sighting(node)
            shown = sighting is not None and sighting.heartbeat.assigned_generation == self.job.generation
            if not (shown and self.seen.is_done(node, key)):
                yield self._send(node, order)

    def _ranks(self, beats: dict[NodeId, Heartbeat]) -> list[RankStatus]:
        return [status for beat in beats.values() for status in beat.ranks if status.generation == self.job.generation]

    def _ranks_without_new_step(self, beats: dict[NodeId, Heartbeat]) -> str:
        assert self.job.plan is not None
        restored = -1 if self.job.plan.restore_step is None else self.job.plan.restore_step
        done = {
            status.rank
            for status in self._ranks(beats)
            if status.finished_step is not None and status.finished_step > restored
        }
        late = [
            f"rank {rank} on {node_id}"
            for slot, node_id in sorted(self.job.slots.items())
            for rank in self.job.geometry.ranks_of(slot)
            if rank not in done
        ]
        more = [f"{len(late) - _NUM_NAMED} more"] if len(late) > _NUM_NAMED else []
        return ", ".join(late[:_NUM_NAMED] + more)

    def _usable_standbys(self) -> list[NodeView]:
        nodes = [self.cluster.nodes[node_id] for node_id in self.job.standbys]
        return [node for node in nodes if node.status is not NodeStatus.FAILED and not node.cordoned]

    def _keep_standbys(self, beats: dict[NodeId, Heartbeat]) -> Iterator[Action]:
        """As many as wanted, and one more for each node that is to be replaced."""
        usable = self._usable_standbys()
        num_wanted = self.job.spec.num_standbys + len(self._draining())
        yield from self._dismiss_unusable(beats)
        for node in usable[num_wanted:]:
            if not self._is_needed(node.node_id, beats):
                yield Dismiss(*self.at, node_id=node.node_id, why="is one standby more than the job wants")
        for node in usable[:num_wanted]:
            if not self._knows_job(node):
                yield self._send(node, self._start_job())
        yield from self._recruit(num_wanted - len(usable))

    def _dismiss_unusable(self, beats: dict[NodeId, Heartbeat]) -> Iterator[Action]:
        for node_id in self.job.standbys:
            node = self.cluster.nodes[node_id]
            if node.status is NodeStatus.FAILED:
                yield Dismiss(*self.at, node_id=node_id, why="has failed")
            elif node.cordoned and not self._is_needed(node_id, beats):
                yield Dismiss(*self.at, node_id=node_id, why="is cordoned")

    def _is_needed(self, node_id: NodeId, beats: dict[NodeId, Heartbeat]) -> bool:
        """Whether the plan restores from this node, and not all that was restored has been replicated again."""
        plan = self.job.plan
        if plan is None or plan.restore_step is None:
            return False
        sealed = {
            status.rank
            for status in self._ranks(beats)
            if status.sealed_everywhere_step is not None and status.sealed_everywhere_step >= plan.restore_step
        }
        return len(sealed) < self.job.geometry.num_ranks and any(node_id in having for having in plan.sources.values())

    def _record_version(self) -> Iterator[Action]:
        newest = newest_commit(self.job, self.cluster, self.seen)
        if newest is not None and (self.job.committed_step is None or newest[1] > self.job.committed_step):
            yield RecordVersion(*self.at, committed_in=newest[0], step=newest[1])

    # ---- blocked

    def _blocked(self) -> Iterator[Action]:
        """A lost node that is back may have brought the missing memory with it."""
        for node in self._members():
            sighting = self.seen.sighting(node)
            if (
                node.node_id in self.job.blocked_by
                and node.status is not NodeStatus.FAILED
                and sighting is not None
                and sighting.heartbeat.job_id == self.job.job_id
            ):
                yield BeginGeneration(
                    *self.at,
                    cause=f"{node.node_id}, which was lost, is back with its memory",
                    num_fruitless_recoveries=self.job.num_fruitless_recoveries,
                    progress_step=self.job.progress_step,
                    finished_step=None,
                    detect_s=None,
                )
                return

    # ---- suspended

    def _suspended(self) -> Iterator[Action]:
        """The memory stays with the members, and the fence sees to it that nothing else does."""
        yield from self._dismiss_unusable({})
        lost = []
        for node in self._members():
            sighting = self.seen.sighting(node)
            if node.status is NodeStatus.FAILED and node.slot is not None:
                lost.append(f"{node.node_id} (slot {node.slot})")
            elif (
                sighting is not None
                and sighting.heartbeat.job_id == self.job.job_id
                and sighting.heartbeat.ordered_generation < self.job.generation
            ):
                yield self._send(node, Fence(job_id=self.job.job_id, generation=self.job.generation))
        note = [f"lost meanwhile: {', '.join(lost)}"] if lost else []
        yield from self._explain("; ".join(["a person to resume it", *note]))

    # ---- helpers

    def _members(self) -> list[NodeView]:
        return [self.cluster.nodes[node_id] for node_id in self.job.members]

    def _knows_job(self, node: NodeView) -> bool:
        sighting = self.seen.sighting(node)
        told = sighting is not None and sighting.heartbeat.job_id == self.job.job_id
        return told or self.seen.is_done(node, self._start_job())

    def _start_job(self) -> StartJob:
        return StartJob(job_id=self.job.job_id, job_key=self.job.job_key, spec=self.job.spec)

    def _refusals(self, nodes: Sequence[NodeView]) -> list[str]:
        """Why nodes refuse their newest orders."""
        return [
            f"{node.node_id} refuses: {why}"
            for node in nodes
            if (why := self.seen.refusal(self.job.job_id, node.node_id)) is not None
        ]

    def _send(self, node: NodeView, order: Order) -> Send:
        return Send(node.node_id, node.incarnation, order)

    def _recruit(self, num_wanted: int) -> Iterator[Action]:
        """Free nodes become standbys; those that suit the slots of lost and leaving nodes come first."""
        if num_wanted <= 0:
            return
        seated = {slot: self.cluster.nodes[node_id] for slot, node_id in self.job.slots.items()}
        kept = {
            slot: node for slot, node in seated.items() if node.status is not NodeStatus.FAILED and not node.draining
        }
        candidates = seating.eligible(self.job.spec, self.free)
        taken = seating.replacements(self.job.spec, kept, candidates)[:num_wanted]
        self._take({node.node_id for node in taken})
        for node in taken:
            yield Recruit(*self.at, node_id=node.node_id)

    def _take(self, taken: set[NodeId]) -> None:
        self.free[:] = [node for node in self.free if node.node_id not in taken]

    def _explain(self, waiting_for: str) -> Iterator[Action]:
        # A wait that is over at once needs no explanation, and a recovery no transaction for it.
        lasts = self.seen.in_phase_for_s(*self.at) >= self.settings.record_interval.total_seconds()
        if lasts and waiting_for != self.job.waiting_for:
            yield Explain(*self.at, waiting_for=waiting_for)


def _reported_phases(ranks: Sequence[RankStatus]) -> dict[str, float]:
    """What the slowest rank needed for each phase that ranks time themselves."""
    phases: dict[str, float] = {}
    for status in ranks:
        for phase, seconds in status.phases_s.items():
            phases[phase] = max(seconds, phases.get(phase, 0.0))
    return phases
