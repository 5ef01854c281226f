"""The REST API as data: what it takes and shows. The coordinator and every client use these very definitions.

Requests refuse fields that they do not know. Answers are read tolerantly: an older client ignores what a newer
coordinator says beyond it.
"""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.contracts.messages import Address, JobOutcome, JobSpec, Placement, RankState

__all__ = [
    "MAX_TOKEN_LIFETIME_S",
    "NODE_LABEL",
    "RECOVERY_PHASES",
    "CallerModel",
    "ClusterModel",
    "Decision",
    "DecisionRequest",
    "EventModel",
    "FieldError",
    "Health",
    "HoldReason",
    "HolderModel",
    "JobModel",
    "JobPhase",
    "JobRankModel",
    "LabelsRequest",
    "LogModel",
    "NewTokenModel",
    "NewTokenRequest",
    "NodeModel",
    "NodeStatus",
    "Page",
    "PlacementModel",
    "Problem",
    "RankModel",
    "RankVersionModel",
    "Readiness",
    "RecoveryDetailModel",
    "RecoveryModel",
    "RequestModel",
    "Role",
    "StopRequest",
    "TokenModel",
    "VersionDetailModel",
    "VersionModel",
]

RECOVERY_PHASES = ("detect", "fence", "plan", "re_rendezvous", "reserve", "fetch", "load", "first_step")
"""The phases of a recovery, in the order in which they follow each other."""

NODE_LABEL = "local-node"
"""Label by which the nodes of a local stack are told apart."""

MAX_TOKEN_LIFETIME_S = 10 * 365 * 86_400

# ---- words


class JobPhase(enum.StrEnum):
    """Where a job stands; transitions compare it and the generation."""

    PENDING = "pending"
    FENCING = "fencing"
    ASSIGNED = "assigned"
    RUNNING = "running"
    BLOCKED = "blocked"
    STOPPING = "stopping"
    SUSPENDED = "suspended"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def outcome(self) -> JobOutcome | None:
        """How the job ended; None while it has not."""
        return JobOutcome(self.value) if self in _ENDED else None


_ENDED = (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.STOPPED)


class HoldReason(enum.StrEnum):
    """Why ranks are to be held after a step that is committed."""

    NONE = ""
    STOP = "stop"
    DRAIN = "drain"


class NodeStatus(enum.StrEnum):
    """The detector's newest verdict about a node."""

    ALIVE = "alive"
    SUSPECTED = "suspected"
    FAILED = "failed"


class Decision(enum.StrEnum):
    """What a person may decide about a blocked job."""

    RESTART_FROM_ZERO = "restart_from_zero"
    STOP = "stop"


class Role(enum.StrEnum):
    """What a token is for: to look, to do everything, or to register nodes."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    AGENT = "agent"


# ---- requests

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?$")]
TokenName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9 ._@-]{0,62}[A-Za-z0-9])?$")]


class RequestModel(BaseModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class StopRequest(RequestModel):
    """How a job is to be stopped."""

    now: bool = Field(
        default=False,
        description="false: come to rest at a committed step, which stays in memory; true: end at once and free it",
    )


class DecisionRequest(RequestModel):
    """A person's decision about a blocked job."""

    decision: Decision


class LabelsRequest(RequestModel):
    """Labels to set over the agent's; null takes back what an operator has set."""

    labels: dict[Label, Label | None] = Field(max_length=64)


class NewTokenRequest(RequestModel):
    """A token to be made."""

    name: TokenName
    role: Role
    job_ids: list[JobId] | None = Field(default=None, min_length=1, max_length=1000, description="none: all jobs")
    lifetime_s: int | None = Field(default=None, ge=1, le=MAX_TOKEN_LIFETIME_S, description="none: until it is revoked")


# ---- answers

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """A part of a list."""

    items: list[Item]
    next_cursor: str | None = Field(description="asks for the next page; null: this is the last one")


def _known_fields(model: type[BaseModel]) -> BeforeValidator:
    """Lets a strict message be read tolerantly where it is part of an answer."""

    def drop(value: Any) -> Any:
        return {name: value[name] for name in value if name in model.model_fields} if isinstance(value, dict) else value

    return BeforeValidator(drop)


class RankModel(BaseModel):
    """A rank as its agent saw it last."""

    rank: int
    generation: int
    pid: int
    state: RankState
    exit_code: int | None
    finished_step: int | None
    committed_step: int | None
    sealed_everywhere_step: int | None
    held_step: int | None
    restored_step: int | None
    restore_source: str
    num_skipped: int
    stall_us: int


class JobRankModel(RankModel):
    """A rank of a job, and where it runs."""

    node_id: NodeId
    slot: int


class NodeModel(BaseModel):
    """A node. `heard_s_ago` and what follows come from its newest heartbeat; none if this coordinator has heard none
    yet.
    """

    node_id: NodeId
    hostname: str
    labels: dict[str, str]
    address: Annotated[Address, _known_fields(Address)]
    status: NodeStatus
    cordoned: bool = Field(description="gets no new slot and no standby's part")
    draining: bool = Field(description="its job is to replace it")
    job_id: JobId | None
    slot: int | None
    registered_at: datetime
    heard_s_ago: float | None = None
    ordered_generation: int = 0
    assigned_generation: int = 0
    launcher_pid: int | None = None
    finished: bool = False
    redundancy_whole: bool = False
    store_used_bytes: int = 0
    store_capacity_bytes: int = 0
    ranks: list[RankModel] = []

    @property
    def name(self) -> str:
        """What people call it: its name in a local stack, else its id."""
        return self.labels.get(NODE_LABEL, self.node_id)

    @property
    def is_alive(self) -> bool:
        """Whether it sends heartbeats."""
        return self.status is NodeStatus.ALIVE and self.heard_s_ago is not None


class JobModel(BaseModel):
    """A job. `waiting_for` completes "waiting for ..."; `cause` says why the generation began, the job is blocked, or
    it ended.
    """

    job_id: JobId
    spec: Annotated[JobSpec, _known_fields(JobSpec)]
    phase: JobPhase
    generation: int
    hold_reason: HoldReason = Field(description="why the ranks are to be held after a step; empty: they are not")
    waiting_for: str
    cause: str
    committed_step: int | None
    finished_step: int | None = Field(description="newest step that any rank has finished in this generation")
    restored_step: int | None = Field(description="what this generation started from; none: from zero")
    final_step: int | None = Field(description="the version that a suspended job holds")
    checkpoint_requests: int = Field(description="how many checkpoints were asked for")
    num_recoveries_without_progress: int
    slots: dict[int, NodeId]
    standbys: list[NodeId]
    created_at: datetime

    @property
    def outcome(self) -> JobOutcome | None:
        """How it ended; None while it has not."""
        return self.phase.outcome


class PlacementModel(BaseModel):
    """slot -> the slots that hold its shards, itself first; and who sits in each slot."""

    placement: Placement
    slots: dict[int, NodeId]


class VersionModel(BaseModel):
    """A committed version."""

    generation: int
    step: int
    committed_at: datetime


class HolderModel(BaseModel):
    """A node that was to keep a replica."""

    slot: int
    node_id: NodeId
    digest: str | None = Field(description="of the copy that was found whole at the newest fence; none: not looked at")


class RankVersionModel(BaseModel):
    """A rank's shard of a version."""

    rank: int
    is_sealed_everywhere: bool
    holders: list[HolderModel]


class VersionDetailModel(BaseModel):
    """One version: who holds what of it."""

    step: int
    generation: int | None = Field(description="whose ranks committed it; none: not recorded (yet)")
    committed_at: datetime | None = Field(description="when the commit was recorded; none: not recorded (yet)")
    is_committed: bool
    is_in_memory: bool = Field(description="false: newer versions have taken its place since")
    ranks: list[RankVersionModel]


class RecoveryModel(BaseModel):
    """A recovery; phases in ms, consecutive, as far as they are known."""

    generation: int
    cause: str
    outcome: str = Field(description="`open`, `completed` or `superseded`")
    finished_step: int | None
    restored_step: int | None
    num_steps_lost: int | None
    phases_ms: dict[str, float]
    started_at: datetime


class RecoveryDetailModel(RecoveryModel):
    """A recovery with its plan; empty until there is one."""

    slots: dict[int, NodeId]
    sources: dict[int, list[NodeId]] = Field(description="rank -> nodes with a verified copy of its shard, best first")
    notes: list[str]


class EventModel(BaseModel):
    """Something that happened."""

    id: int
    at: datetime
    kind: str
    job_id: JobId | None
    node_id: NodeId | None
    generation: int | None
    message: str

    @property
    def summary(self) -> str:
        """The first line; what follows is the end of a log."""
        return self.message.partition("\n")[0]


class LogModel(BaseModel):
    """A part of a rank's log: what is in the bytes [offset, next_offset) of one generation's. Bytes that are no UTF-8
    are shown as U+FFFD.
    """

    node_id: NodeId
    generation: int
    offset: int
    next_offset: int
    text: str
    is_end: bool = Field(description="there is no more at present")


class TokenModel(BaseModel):
    """A token; its secret is not kept."""

    token_id: str
    name: str
    role: Role
    job_ids: list[JobId] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class NewTokenModel(TokenModel):
    """A token that was made just now."""

    token: str | None = Field(
        default=None, description="the secret, shown only here; null in the answer to a repeated request"
    )


class CallerModel(BaseModel):
    """What is known of the token with which a request was made."""

    name: str
    role: Role
    job_ids: list[JobId] | None = Field(description="none: all jobs")


class ClusterModel(BaseModel):
    """The cluster, as far as the token may see it."""

    is_leader: bool = Field(description="whether the coordinator that answers is the one that acts")
    num_nodes: int
    num_nodes_by_status: dict[NodeStatus, int]
    num_free_nodes: int = Field(description="can be given to a job at once")
    num_cordoned_nodes: int
    num_draining_nodes: int
    num_jobs_by_phase: dict[JobPhase, int]
    store_used_bytes: int = Field(description="checkpoint memory in use, of the nodes that were heard")
    store_capacity_bytes: int
    newest_event_id: int = Field(description="where to begin to follow events")
    caller: CallerModel | None = Field(default=None, description="the token that asks; none: not told by old versions")


class Health(BaseModel):
    """The process lives."""

    status: str = "ok"


class Readiness(Health):
    """The process can serve."""

    leader: bool


# ---- refusals


class FieldError(BaseModel):
    """What is wrong with one field of a request."""

    field: str
    message: str


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(description="stable; what to branch on", pattern="^urn:gemini-ft:problem:[a-z-]+$")
    title: str
    status: int
    detail: str = Field(description="one sentence for people: what, whose, and what to change")
    errors: list[FieldError] = Field(default=[], description="of an invalid request: its fields")
