"""What this process has heard: newest heartbeats, answers to orders, verdicts that ask for a recovery.

Nothing here is kept through a restart. Everything is heard again, because heartbeats repeat and orders are repeated
until they are answered. Times are this process's monotonic clock.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from gemini_ft.contracts.ids import Incarnation, JobId, NodeId
from gemini_ft.contracts.messages import (
    CloseJob,
    Fence,
    Heartbeat,
    Inventory,
    Order,
    OrderRefused,
    OrderReply,
    RankState,
    RankStatus,
    Verdict,
    VerdictKind,
)
from gemini_ft.coordinator.state import JobPhase, NodeView

__all__ = ["Observations", "Sighting", "Trigger", "fingerprint"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """The newest heartbeat of one life of a node."""

    heartbeat: Heartbeat
    received_at: float
    launcher_missing_since: float | None


class Milestone(enum.Enum):
    """What a rank reaches within a generation."""

    HELLO = enum.auto()
    RESTORED = enum.auto()
    STEPPED = enum.auto()
    EXITED = enum.auto()


@dataclass(frozen=True, slots=True)
class Trigger:
    """A verdict that asks for a new generation after `generation`. `detect_s`: from the failure, as far as it is
    known.
    """

    job_id: JobId
    generation: int
    cause: str
    detect_s: float | None


def fingerprint(order: Order) -> str:
    """Return a short name of an order's contents."""
    return f"{order.kind}.{hashlib.blake2b(order.model_dump_json().encode(), digest_size=12).hexdigest()}"


class Observations:
    """Written by the message handlers, read by `reconcile.decide`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sightings: dict[tuple[NodeId, Incarnation], Sighting] = {}
        self._reached_at: dict[tuple[JobId, int], dict[Milestone, dict[int, float]]] = {}
        self._assigned_at: dict[JobId, tuple[int, float]] = {}
        self._inventories: dict[tuple[JobId, NodeId], Inventory] = {}
        self._done: set[tuple[NodeId, Incarnation, str]] = set()
        self._refusals: dict[tuple[JobId, NodeId], str] = {}
        self._triggers: dict[JobId, Trigger] = {}
        self._silent_s: dict[tuple[NodeId, Incarnation], float] = {}
        self._phases: dict[JobId, tuple[int, JobPhase, float]] = {}
        self.listening_since = clock()

    # ---- what is heard

    def hear(self, heartbeat: Heartbeat) -> bool:
        """Take a heartbeat; a late or repeated one is dropped. Returns True if it tells more than that time has
        passed.
        """
        key = (heartbeat.node_id, heartbeat.incarnation)
        before = self._sightings.get(key)
        if before is not None and before.heartbeat.sequence >= heartbeat.sequence:
            return False
        now = self._clock()
        missing_since = None
        if heartbeat.job_id is not None and not heartbeat.launcher_connected and heartbeat.launcher_pid is None:
            missing_since = now if before is None else (before.launcher_missing_since or now)
        self._sightings[key] = Sighting(heartbeat, now, missing_since)
        if heartbeat.job_id is not None:
            for status in heartbeat.ranks:
                reached = self._reached_at.setdefault((heartbeat.job_id, status.generation), {})
                for milestone in _milestones(status):
                    reached.setdefault(milestone, {}).setdefault(status.rank, now)
        return before is None or _gist(before.heartbeat) != _gist(heartbeat)

    def hear_reply(self, node: NodeId, order: Order, reply: OrderReply) -> None:
        """Take the answer to an order."""
        if isinstance(reply, OrderRefused):
            self._refusals[order.job_id, node] = str(reply.error.get("message", "no reason was given"))
            return
        self._refusals.pop((order.job_id, node), None)
        if isinstance(order, CloseJob):
            self._done = {key for key in self._done if key[0] != node}
        elif isinstance(reply, Inventory):
            newest = self._inventories.get((order.job_id, node))
            if isinstance(order, Fence) and (newest is None or newest.generation <= reply.generation):
                self._inventories[order.job_id, node] = reply
        else:
            self._done.add((node, reply.incarnation, fingerprint(order)))

    def hear_rank_verdict(self, verdict: Verdict) -> None:
        """Take a verdict about a rank. The first of a generation wins: all others follow from it."""
        if verdict.job_id is None:
            return
        known = self._triggers.get(verdict.job_id)
        if known is not None and known.generation >= verdict.generation:
            return
        detect_s = verdict.silent_s
        if verdict.rank is not None:
            exits = self._reached_at.get((verdict.job_id, verdict.generation), {}).get(Milestone.EXITED, {})
            if verdict.rank in exits:
                detect_s = self._clock() - exits[verdict.rank]
        cause = f"{verdict.node_id}: {verdict.detail or verdict.kind.value}"
        self._triggers[verdict.job_id] = Trigger(verdict.job_id, verdict.generation, cause, detect_s)

    def hear_node_verdict(self, verdict: Verdict) -> bool:
        """Take a verdict about a node; False if a heartbeat newer than those it rests on contradicts it."""
        sighting = self._sightings.get((verdict.node_id, verdict.incarnation))
        newest = -1 if sighting is None else sighting.heartbeat.sequence
        if verdict.kind is not VerdictKind.RECOVERED and newest > verdict.sequence:
            return False
        if verdict.silent_s is not None:
            self._silent_s[verdict.node_id, verdict.incarnation] = verdict.silent_s
        return True

    # ---- what is known

    def sighting(self, node: NodeView) -> Sighting | None:
        """The newest heartbeat of the node's registered life."""
        return self._sightings.get((node.node_id, node.incarnation))

    def age_s(self, sighting: Sighting) -> float:
        """How long ago the heartbeat was received."""
        return self._clock() - sighting.received_at

    def is_fresh(self, node: NodeView, silence_s: float) -> bool:
        """True if the node's registered life was heard lately."""
        sighting = self.sighting(node)
        if sighting is None:
            return False
        return self.age_s(sighting) < max(silence_s, 4 * sighting.heartbeat.interval_s)

    def is_silent(self, node: NodeView, silence_s: float) -> bool:
        """True if the node's registered life has certainly been quiet; False also when we have not listened for long
        enough.
        """
        return not self.is_fresh(node, silence_s) and self._clock() - self.listening_since >= silence_s

    def inventory(self, job_id: JobId, generation: int, node: NodeView) -> Inventory | None:
        """The answer of the node's registered life to the fence of `generation`."""
        found = self._inventories.get((job_id, node.node_id))
        if found is None or found.generation != generation or found.incarnation != node.incarnation:
            return None
        return found

    def is_done(self, node: NodeView, order: Order | str) -> bool:
        """True if the node's registered life has confirmed exactly this order, which is given as its fingerprint where
        many nodes get the same one.
        """
        key = order if isinstance(order, str) else fingerprint(order)
        return (node.node_id, node.incarnation, key) in self._done

    def refusal(self, job_id: JobId, node: NodeId) -> str | None:
        """Why the node refused its newest order of the job, if it did."""
        return self._refusals.get((job_id, node))

    def silent_s(self, node: NodeView) -> float | None:
        """How long the node had been silent when it was judged, if that verdict was heard by this process."""
        return self._silent_s.get((node.node_id, node.incarnation))

    def trigger(self, job_id: JobId, generation: int) -> Trigger | None:
        """A verdict that ends `generation`, if there is one."""
        found = self._triggers.get(job_id)
        return found if found is not None and found.generation == generation else None

    def in_phase_for_s(self, job_id: JobId, generation: int, phase: JobPhase) -> float:
        """For how long this process has seen the job in this phase."""
        known = self._phases.get(job_id)
        if known is None or known[:2] != (generation, phase):
            return 0.0
        return self._clock() - known[2]

    def note_phase(self, job_id: JobId, generation: int, phase: JobPhase) -> None:
        """Remember since when the job is in a phase."""
        known = self._phases.get(job_id)
        if known is None or known[:2] != (generation, phase):
            self._phases[job_id] = (generation, phase, self._clock())

    def job_ids(self) -> set[JobId]:
        """Jobs that nodes speak of."""
        return {
            sighting.heartbeat.job_id for sighting in self._sightings.values() if sighting.heartbeat.job_id is not None
        }

    def note_assigned(self, job_id: JobId, generation: int) -> None:
        """This process has just assigned the generation."""
        self._assigned_at[job_id] = (generation, self._clock())

    def restart_phases_s(self, job_id: JobId, generation: int, num_ranks: int) -> dict[str, float]:
        """How long the slowest rank took to say hello and to take its first step; empty if we have not seen all of
        it.
        """
        assigned, since = self._assigned_at.get(job_id, (None, 0.0))
        reached = self._reached_at.get((job_id, generation), {})
        all_at = {milestone: max(at.values()) for milestone, at in reached.items() if len(at) == num_ranks}
        if assigned != generation or not {Milestone.HELLO, Milestone.RESTORED, Milestone.STEPPED} <= set(all_at):
            return {}
        return {
            "re_rendezvous": all_at[Milestone.HELLO] - since,
            "first_step": all_at[Milestone.STEPPED] - all_at[Milestone.RESTORED],
        }

    def forget(self, jobs: Mapping[JobId, int], lives: Iterable[tuple[NodeId, Incarnation]], silence_s: float) -> None:
        """Drop what belongs to ended jobs (`jobs` are the others, with their generations), former generations and
        former lives.

        A former life is kept until it has been quiet for `silence_s`.
        """
        alive = set(lives)
        now = self._clock()
        self._sightings = {
            key: seen for key, seen in self._sightings.items() if key in alive or now - seen.received_at < silence_s
        }
        self._done = {key for key in self._done if key[:2] in alive}
        self._silent_s = {key: silent_s for key, silent_s in self._silent_s.items() if key in alive}
        self._reached_at = {key: at for key, at in self._reached_at.items() if key[1] >= jobs.get(key[0], inf)}
        self._assigned_at = {key: at for key, at in self._assigned_at.items() if key in jobs}
        self._inventories = {key: reply for key, reply in self._inventories.items() if key[0] in jobs}
        self._refusals = {key: why for key, why in self._refusals.items() if key[0] in jobs}
        self._triggers = {key: trigger for key, trigger in self._triggers.items() if key in jobs}
        self._phases = {key: phase for key, phase in self._phases.items() if key in jobs}


def _milestones(status: RankStatus) -> Iterator[Milestone]:
    yield Milestone.HELLO
    if status.restored:
        yield Milestone.RESTORED
    if status.finished_step is not None and status.finished_step != status.restored_step:
        yield Milestone.STEPPED
    if status.state is RankState.EXITED:
        yield Milestone.EXITED


def _gist(heartbeat: Heartbeat) -> tuple[object, ...]:
    """All of a heartbeat that a decision may hang on, without the counters that rise by themselves."""
    return (
        heartbeat.job_id,
        heartbeat.ordered_generation,
        heartbeat.assigned_generation,
        heartbeat.launcher_pid,
        heartbeat.launcher_connected,
        heartbeat.finished,
        tuple(
            (
                status.rank,
                status.generation,
                status.state,
                status.restored,
                status.restore_error is None,
                status.held_step,
                status.finished_step == status.restored_step or status.finished_step is None,
            )
            for status in heartbeat.ranks
        ),
    )
