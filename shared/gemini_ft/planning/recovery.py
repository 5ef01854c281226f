"""What a job does after a failure: which version is restored, from where, and who sits in which slot (paper section
6).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gemini_ft.contracts.ids import NodeId
from gemini_ft.contracts.messages import HeldVersion, Placement
from gemini_ft.planning.failure_domains import refill
from gemini_ft.planning.placement import mixed_placement
from gemini_ft.planning.topology import Topology

__all__ = ["Blocked", "Geometry", "Membership", "NodeState", "RecoveryPlan", "Waiting", "plan_recovery"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Size of a job: rank r sits in slot r // num_ranks_per_slot."""

    num_slots: int
    num_ranks_per_slot: int
    num_replicas: int

    @property
    def num_ranks(self) -> int:
        """World size."""
        return self.num_slots * self.num_ranks_per_slot

    def ranks_of(self, slot: int) -> range:
        """Ranks that sit in `slot`."""
        return range(slot * self.num_ranks_per_slot, (slot + 1) * self.num_ranks_per_slot)


class NodeState(enum.StrEnum):
    """What is known of a node of the job; whether it has answered the fence is told by its inventory."""

    ALIVE = "alive"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Membership:
    """Who takes part: `slots` of the generation before, `standbys` in order of preference, and the state of everybody.

    Nodes that are `leaving`, with or without a slot, get none, as far as there are standbys; their copies count.
    `labels` name the failure domains of nodes at the `levels` over which replica sets are spread.
    """

    slots: Mapping[int, NodeId]
    standbys: Sequence[NodeId]
    states: Mapping[NodeId, NodeState]
    leaving: Collection[NodeId] = ()
    labels: Mapping[NodeId, Mapping[str, str]] = field(default_factory=dict)
    levels: tuple[str, ...] = ()

    def alive(self, node: NodeId) -> bool:
        """True unless the node is lost."""
        return self.states[node] is NodeState.ALIVE


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """`restore_step` None means from zero. `sources`: rank -> nodes with a verified copy, own node first, then
    holders.
    """

    slots: dict[int, NodeId]
    placement: Placement
    restore_step: int | None
    sources: dict[int, tuple[NodeId, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """No plan yet; `what` completes the sentence "waiting for ...". `num_missing_nodes` slots need a node that the
    job has not got.
    """

    what: str
    num_missing_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Blocked:
    """No version can be restored from memory although one was committed; a person must decide."""

    sentence: str
    notes: tuple[str, ...] = ()


def plan_recovery(
    geometry: Geometry,
    membership: Membership,
    inventories: Mapping[NodeId, Sequence[HeldVersion]],
    *,
    committed_step: int | None,
    restored_steps: Mapping[int, int | None],
    from_zero: bool = False,
) -> RecoveryPlan | Waiting | Blocked:
    """Plan the newest version of which every rank has a verified copy, or say why there is no plan yet.

    `inventories` holds the answers to this generation's fence; copies of a lost node do not count. `restored_steps`
    maps every earlier generation that was assigned to what it restored: a copy that one of them rolled back is never
    used. `committed_step` is the newest version known to have been committed since the last start from zero.
    `from_zero` is a person's decision to give all copies up.
    """
    silent = [
        f"{node} (slot {slot})"
        for slot, node in sorted(membership.slots.items())
        if membership.alive(node) and node not in inventories
    ]
    silent += [
        f"{node} (leaving)"
        for node in membership.leaving
        if membership.alive(node) and node not in inventories and node not in membership.slots.values()
    ]
    if silent:
        return Waiting(f"the inventory of {', '.join(silent)}")
    counted = {
        node: held
        for node, held in inventories.items()
        if node in membership.states and membership.alive(node) and not from_zero
    }
    copies, notes = _usable_copies(geometry, counted, restored_steps)
    steps = [set(copies[rank]) for rank in range(geometry.num_ranks)]
    complete = set.intersection(*steps)
    if not complete and committed_step is not None and not from_zero:
        return Blocked(_what_is_lost(geometry, membership, copies, committed_step), notes)
    placement = mixed_placement(geometry.num_slots, geometry.num_replicas)
    slots = _fill_slots(membership, inventories, placement)
    if isinstance(slots, Waiting):
        return slots
    if not complete:
        return RecoveryPlan(slots, placement, None, {}, notes)
    step = max(complete)
    if committed_step is not None and step < committed_step:
        notes = (
            *notes,
            f"step {committed_step} was committed, but its copies are lost; step {step} is restored instead",
        )
    sources = {}
    for rank in range(geometry.num_ranks):
        preferred = [slots[slot] for slot in placement[rank // geometry.num_ranks_per_slot]]
        sources[rank] = _best_first(preferred, copies[rank][step])
    return RecoveryPlan(slots, placement, step, sources, notes)


def _usable_copies(
    geometry: Geometry, inventories: Mapping[NodeId, Sequence[HeldVersion]], restored_steps: Mapping[int, int | None]
) -> tuple[dict[int, dict[int, set[NodeId]]], tuple[str, ...]]:
    """Return rank -> step -> nodes, and a note for each (rank, step) whose copies contradict each other."""
    digests: dict[tuple[int, int], dict[str, set[NodeId]]] = {}
    for node, held in inventories.items():
        for copy in held:
            if 0 <= copy.rank < geometry.num_ranks and not _rolled_back(copy, restored_steps):
                digests.setdefault((copy.rank, copy.step), {}).setdefault(copy.shard_digest, set()).add(node)
    usable: dict[int, dict[int, set[NodeId]]] = {rank: {} for rank in range(geometry.num_ranks)}
    notes = []
    for (rank, step), by_digest in sorted(digests.items()):
        if len(by_digest) == 1:
            (usable[rank][step],) = by_digest.values()
            continue
        # Each copy matches its own digest, so nothing tells which of them is right: none is used.
        held_by = "; ".join(f"{digest} on {', '.join(sorted(nodes))}" for digest, nodes in sorted(by_digest.items()))
        notes.append(f"step {step} of rank {rank} is not used, because its copies have different digests: {held_by}")
    return usable, tuple(notes)


def _rolled_back(copy: HeldVersion, restored_steps: Mapping[int, int | None]) -> bool:
    """A generation after the copy's own has restored something older: the copy belongs to a history that was given
    up.
    """
    return any(
        generation > copy.generation and (step is None or copy.step > step)
        for generation, step in restored_steps.items()
    )


def _what_is_lost(
    geometry: Geometry,
    membership: Membership,
    copies: Mapping[int, Mapping[int, Collection[NodeId]]],
    committed_step: int,
) -> str:
    without = [rank for rank in range(geometry.num_ranks) if not copies[rank]]
    if without:
        what = f"no verified copy is left of the shards of rank {_listed(without)}"
    else:
        what = "no step has a verified copy of every rank's shard: " + "; ".join(
            f"rank {rank} has step {_listed(sorted(copies[rank]))}" for rank in range(geometry.num_ranks)
        )
    lost = [f"{node} (slot {slot})" for slot, node in sorted(membership.slots.items()) if not membership.alive(node)]
    who = f"; lost nodes: {', '.join(lost)}" if lost else ""
    return (
        f"step {committed_step} was committed, but {what}{who}; "
        "decide `restart_from_zero` or `stop`, or bring a lost node back with its memory"
    )


def _fill_slots(
    membership: Membership, inventories: Collection[NodeId], placement: Placement
) -> dict[int, NodeId] | Waiting:
    """Slots of lost nodes, then of leaving ones, go to the best placed standbys that have answered the fence."""
    slots = dict(membership.slots)
    lost = [slot for slot, node in sorted(slots.items()) if not membership.alive(node)]
    leaving = [slot for slot, node in sorted(slots.items()) if membership.alive(node) and node in membership.leaving]
    alive = [node for node in membership.standbys if membership.alive(node)]
    vacated = lost + leaving[: max(0, len(alive) - len(lost))]
    answered = [node for node in alive if node in inventories]
    if len(answered) >= len(vacated):
        kept = {slot: node for slot, node in slots.items() if slot not in vacated}
        labels = {node: membership.labels.get(node, {}) for node in (*kept.values(), *answered)}
        return refill(Topology(labels, membership.levels), placement, kept).slots
    named = ", ".join(f"{slot} ({slots[slot]} is {'lost' if slot in lost else 'leaving'})" for slot in vacated)
    num_missing = max(0, len(lost) - len(alive))
    silent = [node for node in alive if node not in inventories]
    if silent:
        return Waiting(f"the inventory of standby {', '.join(silent)} to fill slot {named}", num_missing)
    return Waiting(f"a standby or a free node to fill slot {named}", num_missing)


def _best_first(preferred: Sequence[NodeId], having: Collection[NodeId]) -> tuple[NodeId, ...]:
    return (*(node for node in preferred if node in having), *sorted(set(having) - set(preferred)))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
