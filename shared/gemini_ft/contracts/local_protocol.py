"""Messages on the node's Unix socket, between the agent and the ranks and launchers of its node.

The file system guards the socket (a 0700 folder); the agent also checks the peer's user id. Each request
carries `request_id` and is answered by a message with the same id, `Failed` among them. Requests marked
*parks* are answered when they come true, at the latest after `timeout_s`, then by `NotYet`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from gemini_ft.contracts.frames import Message
from gemini_ft.contracts.ids import JobId

__all__ = [
    "AgentMessage",
    "AssignmentReply",
    "BadCopy",
    "ClientMessage",
    "Failed",
    "FillBegun",
    "Finished",
    "LauncherHello",
    "LauncherWelcome",
    "NextAssignment",
    "NotYet",
    "Ok",
    "PublishStore",
    "RankHello",
    "RankWelcome",
    "Reserve",
    "Reserved",
    "Restore",
    "RestoreReply",
    "Restored",
    "Sealed",
    "Staged",
    "StoreAddress",
    "StoreAddressReply",
    "WorkersExited",
    "WorkersStarted",
    "agent_messages",
    "client_messages",
]


class _Request(Message):
    request_id: int


class _ForRank(Message):
    generation: int
    rank: int


# ---- launcher -> agent


class LauncherHello(_Request):
    """First message of a launcher. `worker_pids` names its running ranks, so that a restarted agent finds them."""

    kind: Literal["launcher_hello"] = "launcher_hello"
    job_id: JobId
    pid: int
    num_local_ranks: int
    generation: int = Field(description="generation of the running ranks, 0 when there are none")
    worker_pids: dict[int, int] = {}


class NextAssignment(_Request):
    """Ask for the first assignment above `after_generation`. Parks."""

    kind: Literal["next_assignment"] = "next_assignment"
    after_generation: int
    timeout_s: float


class PublishStore(_Request):
    """Slot 0 tells where the store of `generation` listens."""

    kind: Literal["publish_store"] = "publish_store"
    generation: int
    host: str
    port: int


class StoreAddress(_Request):
    """Ask where the store of `generation` listens. Parks."""

    kind: Literal["store_address"] = "store_address"
    generation: int
    timeout_s: float


class WorkersStarted(_Request):
    """Ranks of `generation` run; pids by global rank."""

    kind: Literal["workers_started"] = "workers_started"
    generation: int
    pids: dict[int, int]


class WorkersExited(_Request):
    """Ranks of `generation` have ended; exit codes by global rank (negative: the signal).

    `detail` holds the last lines of a failed rank's log.
    """

    kind: Literal["workers_exited"] = "workers_exited"
    generation: int
    exit_codes: dict[int, int]
    detail: str = ""


class Finished(_Request):
    """All ranks of this node have ended well: the node's part of the job is done."""

    kind: Literal["finished"] = "finished"
    generation: int


# ---- rank -> agent


class RankHello(_Request, _ForRank):
    """First message of a rank, also after it lost the agent and came back."""

    kind: Literal["rank_hello"] = "rank_hello"
    job_id: JobId
    pid: int
    world_size: int


class Reserve(_Request, _ForRank):
    """Ask for the two buffers of this rank, here and on all holders, before training starts."""

    kind: Literal["reserve"] = "reserve"
    data_bytes: int = Field(ge=0)
    manifest_bytes: int = Field(ge=0)
    timeout_s: float


class Restore(_Request, _ForRank):
    """Ask for a verified local copy of this rank's shard at the step that the recovery plan names. Parks."""

    kind: Literal["restore"] = "restore"
    timeout_s: float


class BadCopy(_Request, _ForRank):
    """The rank found the local copy of `step` to be bad. The agent drops it; ask `Restore` again for the next copy."""

    kind: Literal["bad_copy"] = "bad_copy"
    step: int
    detail: str


class Restored(_Request, _ForRank):
    """The rank has loaded `step` (none: started from zero); phases in seconds for the recovery's record."""

    kind: Literal["restored"] = "restored"
    step: int | None
    phases_s: dict[str, float]


class FillBegun(_ForRank):
    """The rank fills `buffer` with `step`; `base_step` is committed, and everybody keeps it. No reply."""

    kind: Literal["fill_begun"] = "fill_begun"
    step: int
    buffer: int
    data_bytes: int
    base_step: int | None


class Staged(_ForRank):
    """The first `num_chunks` chunks of the buffer being filled, and their digests, are in place. No reply."""

    kind: Literal["staged"] = "staged"
    step: int
    num_chunks: int


class Sealed(_ForRank):
    """The buffer of `step` is sealed. No reply: the answer is `sealed_everywhere_step` in the rank's control page."""

    kind: Literal["sealed"] = "sealed"
    step: int
    shard_digest: str


# ---- agent -> launcher or rank


class Ok(Message):
    """The request was carried out."""

    kind: Literal["ok"] = "ok"
    request_id: int


class NotYet(Message):
    """A parked request did not come true in time; ask again."""

    kind: Literal["not_yet"] = "not_yet"
    request_id: int


class Failed(Message):
    """The request was refused; `error` is `GeminiError.to_wire()`."""

    kind: Literal["failed"] = "failed"
    request_id: int
    error: dict[str, Any]


class LauncherWelcome(Message):
    """Answer to LauncherHello; the job page is a `control_page.JobPage`."""

    kind: Literal["launcher_welcome"] = "launcher_welcome"
    request_id: int
    job_page: str
    node_id: str


class AssignmentReply(Message):
    """This node is slot `slot` of `num_slots` in `generation`. `host` is this node's address for the ranks' traffic."""

    kind: Literal["assignment"] = "assignment"
    request_id: int
    generation: int
    slot: int
    num_slots: int
    host: str


class StoreAddressReply(Message):
    """Answer to StoreAddress."""

    kind: Literal["store_address_reply"] = "store_address_reply"
    request_id: int
    host: str
    port: int


class RankWelcome(Message):
    """Answer to RankHello; paths of a `control_page.JobPage` and a `control_page.RankPage`."""

    kind: Literal["rank_welcome"] = "rank_welcome"
    request_id: int
    job_page: str
    rank_page: str
    checkpoint_interval_steps: int = Field(default=1, ge=1, description="the job's: the same on every rank")


class Reserved(Message):
    """Answer to Reserve: the files of the rank's two buffers. The rank keeps a shared lock on each while it lives."""

    kind: Literal["reserved"] = "reserved"
    request_id: int
    buffers: tuple[str, str]


class RestoreReply(Message):
    """Answer to Restore: buffer `buffer` holds `step`; no step means that the job starts from zero."""

    kind: Literal["restore_reply"] = "restore_reply"
    request_id: int
    step: int | None
    buffer: int | None
    source: str = Field(default="", description="`local`, `peer` or `zero`")


ClientMessage = (
    LauncherHello
    | NextAssignment
    | PublishStore
    | StoreAddress
    | WorkersStarted
    | WorkersExited
    | Finished
    | RankHello
    | Reserve
    | Restore
    | BadCopy
    | Restored
    | FillBegun
    | Staged
    | Sealed
)
AgentMessage = (
    Ok | NotYet | Failed | LauncherWelcome | AssignmentReply | StoreAddressReply | RankWelcome | Reserved | RestoreReply
)
client_messages: TypeAdapter[ClientMessage] = TypeAdapter(Annotated[ClientMessage, Field(discriminator="kind")])
agent_messages: TypeAdapter[AgentMessage] = TypeAdapter(Annotated[AgentMessage, Field(discriminator="kind")])
