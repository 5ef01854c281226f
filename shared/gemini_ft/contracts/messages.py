"""Messages of the control plane: registration, heartbeats, verdicts and orders, over NATS.

Messages are hints and state is truth: a heartbeat carries all that its node knows, an order is repeated until
a heartbeat shows its effect, and every one of them may be lost, repeated or late. Nobody compares the clocks
of two machines; what is timed is timed by its receiver, or is a duration.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter

from gemini_ft.contracts.frames import Message
from gemini_ft.contracts.ids import Incarnation, JobId, NodeId

__all__ = [
    "MAX_LOG_BYTES",
    "Address",
    "Assign",
    "CheckpointNow",
    "CloseJob",
    "Fence",
    "Heartbeat",
    "HeldVersion",
    "Hold",
    "Inventory",
    "JobOutcome",
    "JobSpec",
    "LauncherKind",
    "LogPiece",
    "LogRefused",
    "LogReply",
    "Order",
    "OrderDone",
    "OrderRefused",
    "OrderReply",
    "Placement",
    "RankState",
    "RankStatus",
    "ReadLog",
    "Register",
    "Registered",
    "RegistrationRefused",
    "StartJob",
    "Verdict",
    "VerdictKind",
    "log_replies",
    "order_replies",
    "orders",
    "registration_replies",
]

Placement = dict[int, tuple[int, ...]]
"""slot -> the slots that hold its shards, itself first."""

Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
"""What a process can be given as an argument and a database can keep."""


class LauncherKind(enum.StrEnum):
    """Who starts the launchers of a job."""

    MANAGED = "managed"
    EXTERNAL = "external"


class JobOutcome(enum.StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class JobSpec(Message):
    """What the user wants to run."""

    name: Text = Field(min_length=1, max_length=200)
    command: tuple[Text, ...] = Field(default=(), description="script (or `-m`, module) and its arguments")
    working_directory: Text = ""
    environment: dict[Text, Text] = {}
    num_nodes: int = Field(ge=1, le=100_000)
    num_ranks_per_node: int = Field(ge=1, le=1024)
    num_replicas: int = Field(default=2, ge=1, description="m: copies of each shard, the local one counts")
    num_standbys: int = Field(default=0, ge=0)
    launcher: LauncherKind = LauncherKind.MANAGED
    hang_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    max_recoveries_without_progress: int = Field(default=5, ge=1)
    checkpoint_interval_steps: int = Field(default=1, ge=1, description="every how many steps a version is staged")
    spread: tuple[Text, ...] = Field(
        default=("zone", "rack"), description="node labels that name failure domains, the widest first"
    )
    node_selector: dict[Text, Text] = Field(default={}, description="labels that every node of the job must carry")


class Address(Message):
    """Where an agent's data plane listens."""

    host: str
    port: int = Field(ge=1, le=65535)


# ---- registration: request to REGISTER


class Register(Message):
    """An agent asks for an identity (node_id empty) or presents the one that it was given."""

    kind: Literal["register"] = "register"
    node_id: NodeId | None
    incarnation: Incarnation
    hostname: str = Field(description="for people to read; it decides nothing")
    labels: dict[str, str] = {}
    address: Address
    token: str = Field(default="", description="API token of role `agent`; empty where the cluster asks for none")


class Registered(Message):
    """The identity that the coordinator issued or confirmed."""

    kind: Literal["registered"] = "registered"
    node_id: NodeId


class RegistrationRefused(Message):
    """`error` is `GeminiError.to_wire()`."""

    kind: Literal["registration_refused"] = "registration_refused"
    error: dict[str, Any]


registration_replies: TypeAdapter[Registered | RegistrationRefused] = TypeAdapter(
    Annotated[Registered | RegistrationRefused, Field(discriminator="kind")]
)

# ---- heartbeats


class RankState(enum.StrEnum):
    """What the agent knows of a rank's process."""

    RUNNING = "running"
    EXITED = "exited"


class RankStatus(Message):
    """One rank, as its agent sees it."""

    rank: int
    generation: int
    pid: int
    state: RankState
    exit_code: int | None = Field(default=None, description="negative: the signal; none while running or when unknown")
    detail: str = Field(default="", description="last lines of a failed rank's log")
    finished_step: int | None = None
    committed_step: int | None = None
    sealed_everywhere_step: int | None = None
    held_step: int | None = Field(default=None, description="committed step at which the rank waits, as Hold asked")
    num_skipped: int = 0
    stall_us: int = 0
    restored_step: int | None = None
    restored: bool = False
    restore_source: str = ""
    phases_s: dict[str, float] = {}
    restore_error: dict[str, Any] | None = Field(
        default=None, description="why no copy could be restored: asks for a new recovery"
    )


class Heartbeat(Message):
    """All that a node knows of itself. `sequence` rises by one within an incarnation."""

    kind: Literal["heartbeat"] = "heartbeat"
    node_id: NodeId
    incarnation: Incarnation
    sequence: int
    address: Address
    interval_s: float = Field(gt=0, description="period at which the agent means to send")
    job_id: JobId | None = None
    ordered_generation: int = Field(default=0, description="newest generation that this node was fenced to")
    assigned_generation: int = Field(default=0, description="newest generation whose assignment this node has taken")
    slot: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    launcher_pid: int | None = None
    launcher_connected: bool = False
    finished: bool = False
    hang_timeout_s: float | None = Field(default=None, gt=0, description="the job's; none: never judged to hang")
    redundancy_whole: bool = Field(default=False, description="all holders have this node's newest sealed version")
    store_used_bytes: int = 0
    store_capacity_bytes: int = 0


# ---- verdicts, on verdict_subject, through JetStream


class VerdictKind(enum.StrEnum):
    """What the failure detector has concluded."""

    SUSPECTED = "suspected"
    FAILED = "failed"
    RECOVERED = "recovered"
    RANK_EXITED = "rank_exited"
    RANK_HUNG = "rank_hung"


class Verdict(Message):
    """A conclusion about one incarnation of a node. `verdict_id` makes publishing it again harmless.

    `sequence` is that of the newest heartbeat it rests on: a node that falls silent twice is judged twice.
    """

    kind: VerdictKind
    node_id: NodeId
    incarnation: Incarnation
    job_id: JobId | None = None
    generation: int = 0
    rank: int | None = None
    sequence: int = 0
    detail: str = ""
    phi: float | None = None
    silent_s: float | None = None

    @property
    def verdict_id(self) -> str:
        """Idempotence key: one a rank and generation, or one a node and silence."""
        subject = self.sequence if self.rank is None else f"{self.generation}.{self.rank}"
        return f"{self.node_id}.{self.incarnation}.{self.kind}.{self.job_id or '-'}.{subject}"


# ---- orders: requests to order_subject


class StartJob(Message):
    """Take part in a job: keep its key and, for a managed job, see that a launcher runs. Idempotent."""

    kind: Literal["start_job"] = "start_job"
    job_id: JobId
    job_key: str
    spec: JobSpec


class Fence(Message):
    """Refuse writes of generations below `generation`, end their ranks, verify and report the sealed copies here."""

    kind: Literal["fence"] = "fence"
    job_id: JobId
    generation: int


class Assign(Message):
    """The recovery plan of `generation`. Repeated with new addresses when an agent restarts within the generation."""

    kind: Literal["assign"] = "assign"
    job_id: JobId
    generation: int
    slots: dict[int, NodeId]
    addresses: dict[NodeId, Address]
    placement: Placement
    restore_step: int | None = Field(description="version to restore; none: start from zero")
    sources: dict[int, tuple[NodeId, ...]] = Field(
        default={}, description="rank -> nodes with a verified copy, best first"
    )


class Hold(Message):
    """Let all ranks stop together after a step that is committed, with none behind it to redo. Idempotent."""

    kind: Literal["hold"] = "hold"
    job_id: JobId
    generation: int


class CheckpointNow(Message):
    """Stage a version at the next step, whatever the interval. A request is served once, and an old one is void."""

    kind: Literal["checkpoint_now"] = "checkpoint_now"
    job_id: JobId
    generation: int
    request: int = Field(ge=1, description="rises with each request of the job")


class CloseJob(Message):
    """The job has ended, or this node no longer belongs to it: end its processes and free its memory."""

    kind: Literal["close_job"] = "close_job"
    job_id: JobId
    outcome: JobOutcome
    reason: str = ""


Order = StartJob | Fence | Assign | Hold | CheckpointNow | CloseJob
orders: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="kind")])


class HeldVersion(Message):
    """One sealed copy whose every byte was checked against its digests just now."""

    rank: int
    step: int
    generation: int
    shard_digest: str


class Inventory(Message):
    """Answer to Fence. `damaged` lists copies that failed the check, for the record."""

    kind: Literal["inventory"] = "inventory"
    node_id: NodeId
    incarnation: Incarnation
    generation: int
    held: tuple[HeldVersion, ...]
    damaged: tuple[str, ...] = ()
    committed_step: int | None = None


class OrderDone(Message):
    """Answer to every other order."""

    kind: Literal["order_done"] = "order_done"
    node_id: NodeId
    incarnation: Incarnation


class OrderRefused(Message):
    """`error` is `GeminiError.to_wire()`."""

    kind: Literal["order_refused"] = "order_refused"
    node_id: NodeId
    error: dict[str, Any]


OrderReply = Inventory | OrderDone | OrderRefused
order_replies: TypeAdapter[OrderReply] = TypeAdapter(Annotated[OrderReply, Field(discriminator="kind")])

# ---- logs of ranks: request to log_subject

MAX_LOG_BYTES = 256 << 10


class ReadLog(Message):
    """Read a part of a rank's output. `offset` none: the last `tail_lines` lines, as far as `max_bytes` go."""

    kind: Literal["read_log"] = "read_log"
    job_id: JobId
    generation: int | None = Field(default=None, ge=1, description="none: the newest that the rank has a log of here")
    rank: int = Field(ge=0)
    offset: int | None = Field(default=None, ge=0, description="in bytes, from the beginning of the log")
    tail_lines: int = Field(default=100, ge=0)
    max_bytes: int = Field(default=64 << 10, ge=1, le=MAX_LOG_BYTES)


class LogPiece(Message):
    """Answer to ReadLog: the bytes in [offset, next_offset) of one generation's log.

    `is_end`: there is no more at present. An offset beyond the end gives an empty piece at the end.
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    kind: Literal["log_piece"] = "log_piece"
    generation: int
    offset: int
    next_offset: int
    data: bytes
    is_end: bool


class LogRefused(Message):
    """`error` is `GeminiError.to_wire()`: NotFoundError if the rank has no such log here."""

    kind: Literal["log_refused"] = "log_refused"
    error: dict[str, Any]


LogReply = LogPiece | LogRefused
log_replies: TypeAdapter[LogReply] = TypeAdapter(Annotated[LogReply, Field(discriminator="kind")])
