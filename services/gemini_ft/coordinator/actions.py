"""What a decision may ask for. Each names the generation and phase that it expects; the store refuses it when they
have moved on.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemini_ft.contracts.ids import Incarnation, JobId, NodeId
from gemini_ft.contracts.messages import Order
from gemini_ft.coordinator.state import HoldReason, JobPhase, StoredPlan

__all__ = [
    "Action",
    "Admit",
    "AssignPlan",
    "BeginGeneration",
    "Block",
    "CompleteRecovery",
    "Dismiss",
    "End",
    "Explain",
    "OrderHold",
    "RecordVersion",
    "Recruit",
    "Revive",
    "Send",
    "Suspend",
    "Transition",
]


@dataclass(frozen=True, slots=True)
class Send:
    """Send an order to a node; sent again and again until its effect is seen."""

    node_id: NodeId
    incarnation: Incarnation
    order: Order


@dataclass(frozen=True, slots=True)
class Revive:
    """A node that was judged dead or suspect has sent a heartbeat newer than the one the verdict rested on."""

    node_id: NodeId
    incarnation: Incarnation
    sequence: int


@dataclass(frozen=True, slots=True)
class _OfJob:
    job_id: JobId
    generation: int
    phase: JobPhase


@dataclass(frozen=True, slots=True)
class Admit(_OfJob):
    """A pending job gets its nodes and begins generation 1. `note` tells where replica sets share a failure domain."""

    slots: dict[int, NodeId]
    standbys: tuple[NodeId, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Recruit(_OfJob):
    """A free node becomes a standby."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Dismiss(_OfJob):
    """A node without a slot no longer serves the job. `why` completes the sentence that begins with it."""

    node_id: NodeId
    why: str


@dataclass(frozen=True, slots=True)
class BeginGeneration(_OfJob):
    """Raise the generation and fence."""

    cause: str
    num_fruitless_recoveries: int
    progress_step: int | None
    finished_step: int | None
    detect_s: float | None


@dataclass(frozen=True, slots=True)
class AssignPlan(_OfJob):
    """Store the plan, seat the nodes, let go of those that were replaced unless the plan restores from them.

    Durations as far as they are known.
    """

    plan: StoredPlan
    cause: str
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class CompleteRecovery(_OfJob):
    """Every rank has finished a step after the restored one."""

    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Block(_OfJob):
    """Nothing can be restored; a person decides."""

    sentence: str
    lost: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class OrderHold(_OfJob):
    """From now on the ranks are to be held after a step. `why` completes "the ranks are to be held: ..."."""

    reason: HoldReason
    why: str


@dataclass(frozen=True, slots=True)
class Suspend(_OfJob):
    """All ranks are held at `final_step`: fence them, keep the memory, and let nothing follow."""

    final_step: int


@dataclass(frozen=True, slots=True)
class End(_OfJob):
    """The job is over."""

    ended: JobPhase
    cause: str


@dataclass(frozen=True, slots=True)
class Explain(_OfJob):
    """Say what the job waits for."""

    waiting_for: str


@dataclass(frozen=True, slots=True)
class RecordVersion(_OfJob):
    """A version was committed by ranks of `committed_in`."""

    committed_in: int
    step: int


Transition = (
    Admit
    | Recruit
    | Dismiss
    | BeginGeneration
    | AssignPlan
    | CompleteRecovery
    | Block
    | OrderHold
    | Suspend
    | End
    | Explain
    | RecordVersion
)
Action = Send | Revive | Transition
