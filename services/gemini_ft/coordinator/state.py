"""The coordinator's words for jobs and nodes, and the views that decisions are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from gemini_ft.contracts.api import Decision, HoldReason, JobPhase, NodeStatus
from gemini_ft.contracts.frames import Message
from gemini_ft.contracts.ids import Incarnation, JobId, NodeId
from gemini_ft.contracts.messages import Address, JobSpec, Placement
from gemini_ft.planning.recovery import Geometry

__all__ = ["Cluster", "Decision", "HoldReason", "JobPhase", "JobView", "NodeStatus", "NodeView", "StoredPlan"]


class StoredPlan(Message):
    """The plan of a generation, as it is kept; orders are made from it again after any restart."""

    slots: dict[int, NodeId]
    placement: Placement
    restore_step: int | None
    sources: dict[int, tuple[NodeId, ...]] = {}
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeView:
    """A registered node. `judged_sequence` is that of the newest heartbeat that the verdict `status` rests on.

    `labels` are the agent's with the operators' over them. A node that is `draining` is `cordoned` too.
    """

    node_id: NodeId
    incarnation: Incarnation
    hostname: str
    labels: Mapping[str, str]
    address: Address
    status: NodeStatus
    judged_sequence: int
    job_id: JobId | None
    slot: int | None
    registered_at: datetime
    cordoned: bool = False
    draining: bool = False
    removed: bool = False


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the database has it. `restored_steps`: assigned generation -> what it restored; `plan` is the newest
    generation's.
    """

    job_id: JobId
    spec: JobSpec
    job_key: str = field(repr=False)
    phase: JobPhase
    generation: int
    zero_generation: int
    from_zero: bool
    waiting_for: str
    cause: str
    blocked_by: tuple[NodeId, ...]
    num_fruitless_recoveries: int
    progress_step: int | None
    committed_step: int | None
    created_at: datetime
    hold_reason: HoldReason = HoldReason.NONE
    checkpoint_requests: int = 0
    checkpoint_after_step: int | None = None
    final_step: int | None = None
    deleted: bool = False
    slots: Mapping[int, NodeId] = field(default_factory=dict)
    standbys: tuple[NodeId, ...] = ()
    plan: StoredPlan | None = None
    restored_steps: Mapping[int, int | None] = field(default_factory=dict)

    @property
    def geometry(self) -> Geometry:
        """The sizes that plans depend on."""
        return Geometry(self.spec.num_nodes, self.spec.num_ranks_per_node, self.spec.num_replicas)

    @property
    def members(self) -> tuple[NodeId, ...]:
        """Nodes in slots, then standbys."""
        return (*(node for _, node in sorted(self.slots.items())), *self.standbys)


@dataclass(frozen=True, slots=True)
class Cluster:
    """One consistent reading of the database: open jobs, jobs that were asked for by id, and all nodes."""

    jobs: Mapping[JobId, JobView]
    nodes: Mapping[NodeId, NodeView]
