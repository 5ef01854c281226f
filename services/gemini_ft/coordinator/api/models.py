"""What the API shows."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from gemini_ft.contracts.messages import Address, JobSpec, Placement, RankState
from gemini_ft.coordinator.state import Decision, JobPhase, NodeStatus

__all__ = [
    "DecisionRequest",
    "EventModel",
    "EventPage",
    "JobModel",
    "NodeModel",
    "PlacementModel",
    "RankModel",
    "RecoveryModel",
    "VersionModel",
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DecisionRequest(_Model):
    """A person's decision about a blocked job."""

    decision: Decision


class RankModel(_Model):
    """A rank as its agent saw it last."""

    rank: int
    generation: int
    pid: int
    state: RankState
    exit_code: int | None
    finished_step: int | None
    committed_step: int | None
    sealed_everywhere_step: int | None
    restored_step: int | None
    restore_source: str
    num_skipped: int
    stall_us: int


class NodeModel(_Model):
    """A node. `heard_s_ago` and what follows come from its newest heartbeat; none if this coordinator has heard none
    yet.
    """

    node_id: str
    hostname: str
    labels: dict[str, str]
    address: Address
    status: NodeStatus
    job_id: str | None
    slot: int | None
    heard_s_ago: float | None = None
    ordered_generation: int = 0
    assigned_generation: int = 0
    launcher_pid: int | None = None
    finished: bool = False
    redundancy_whole: bool = False
    store_used_bytes: int = 0
    store_capacity_bytes: int = 0
    ranks: list[RankModel] = []


class JobModel(_Model):
    """A job. `waiting_for` completes "waiting for ..."; `cause` says why the generation began, the job is blocked, or
    it ended.
    """

    job_id: str
    spec: JobSpec
    phase: JobPhase
    generation: int
    waiting_for: str
    cause: str
    committed_step: int | None
    finished_step: int | None = Field(description="newest step that any rank has finished in this generation")
    restored_step: int | None = Field(description="what this generation started from; none: from zero")
    num_recoveries_without_progress: int
    slots: dict[int, str]
    standbys: list[str]
    created_at: datetime


class PlacementModel(_Model):
    """slot -> the slots that hold its shards, itself first; and who sits in each slot."""

    placement: Placement
    slots: dict[int, str]


class VersionModel(_Model):
    """A committed version."""

    generation: int
    step: int
    committed_at: datetime


class RecoveryModel(_Model):
    """A recovery; phases in ms, consecutive, as far as they are known."""

    generation: int
    cause: str
    outcome: str = Field(description="`open`, `completed` or `superseded`")
    finished_step: int | None
    restored_step: int | None
    num_steps_lost: int | None
    phases_ms: dict[str, float]
    started_at: datetime


class EventModel(_Model):
    """Something that happened."""

    id: int
    at: datetime
    kind: str
    job_id: str | None
    node_id: str | None
    generation: int | None
    message: str


class EventPage(_Model):
    """Events after a cursor; ask again after `next_after`."""

    events: list[EventModel]
    next_after: int
