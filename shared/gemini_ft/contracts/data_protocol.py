"""Messages of the data plane, from agent to agent over TCP.

A connection begins with the mutual challenge of `handshake.py`; until it is passed, only handshake frames are
accepted. Afterwards the side that connected sends requests and the other answers, in order. Every message
carries the generation of its sender; a message of an older generation than the receiver's is answered by
`Refused` with a FencedError and changes nothing.

Replication of one version is `Begin`, `Chunk`... (payload: the bytes), `Seal` (payload: the manifest), then
`Acknowledged` by the holder. `Fetch` is answered by the same three messages in the other direction.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from gemini_ft.contracts.frames import Message
from gemini_ft.contracts.ids import Incarnation, JobId, NodeId

__all__ = [
    "Acknowledged",
    "AskStore",
    "Begin",
    "Challenge",
    "Chunk",
    "DataMessage",
    "Fetch",
    "Held",
    "Hello",
    "Holdings",
    "HoldingsReply",
    "Proof",
    "Refused",
    "ReserveReplica",
    "Seal",
    "StoreIs",
    "Welcome",
    "data_messages",
]

HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
HexNonce = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Hello(Message):
    """The connecting agent names itself and challenges the other side."""

    kind: Literal["hello"] = "hello"
    job_id: JobId
    node_id: NodeId
    incarnation: Incarnation
    nonce: HexNonce


class Challenge(Message):
    """The accepting agent proves that it holds the job key, and challenges in turn."""

    kind: Literal["challenge"] = "challenge"
    node_id: NodeId
    nonce: HexNonce
    proof: HexNonce


class Proof(Message):
    """The connecting agent proves that it holds the job key."""

    kind: Literal["proof"] = "proof"
    proof: HexNonce


class Welcome(Message):
    """The connection is open."""

    kind: Literal["welcome"] = "welcome"


class ReserveReplica(Message):
    """Ask the holder to set memory aside for `rank`; answered by Acknowledged or Refused (CapacityError)."""

    kind: Literal["reserve_replica"] = "reserve_replica"
    generation: int
    rank: int
    world_size: int
    data_bytes: int
    manifest_bytes: int


class Holdings(Message):
    """Ask what the holder has of the shard of `rank`; answered by HoldingsReply."""

    kind: Literal["holdings"] = "holdings"
    generation: int
    rank: int


class Held(Message):
    """One sealed copy."""

    step: int
    generation: int
    shard_digest: HexDigest


class HoldingsReply(Message):
    """Sealed copies that the holder has."""

    kind: Literal["holdings_reply"] = "holdings_reply"
    rank: int
    held: tuple[Held, ...]


class Begin(Message):
    """A version of `rank` follows. The receiver fills the buffer that does not hold `base_step`, which is committed."""

    kind: Literal["begin"] = "begin"
    generation: int
    rank: int
    world_size: int
    step: int
    version_generation: int = Field(description="generation in which the version was staged")
    data_bytes: int
    chunk_bytes: int
    manifest_capacity_bytes: int
    base_step: int | None


class Chunk(Message):
    """One chunk; its bytes are the payload and must match `chunk_digest`."""

    kind: Literal["chunk"] = "chunk"
    generation: int
    rank: int
    step: int
    index: int
    chunk_digest: HexDigest


class Seal(Message):
    """All chunks were sent; the manifest is the payload. `shard_digest` covers digest table and manifest."""

    kind: Literal["seal"] = "seal"
    generation: int
    rank: int
    step: int
    shard_digest: HexDigest


class Fetch(Message):
    """Ask for the sealed copy of `step` of `rank`; answered by Begin, Chunk..., Seal, or Refused."""

    kind: Literal["fetch"] = "fetch"
    generation: int
    rank: int
    step: int


class AskStore(Message):
    """Ask slot 0 where the store of `generation` listens; answered by StoreIs, with port 0 after `timeout_s`."""

    kind: Literal["ask_store"] = "ask_store"
    generation: int
    timeout_s: float


class StoreIs(Message):
    """Where the store of `generation` listens; port 0 means not yet."""

    kind: Literal["store_is"] = "store_is"
    generation: int
    host: str
    port: int


class Acknowledged(Message):
    """The request is carried out; for a Seal: every digest was checked and the copy is sealed here."""

    kind: Literal["acknowledged"] = "acknowledged"
    rank: int
    step: int | None = None


class Refused(Message):
    """The request was refused; `error` is `GeminiError.to_wire()`."""

    kind: Literal["refused"] = "refused"
    error: dict[str, Any]


DataMessage = (
    Hello
    | Challenge
    | Proof
    | Welcome
    | ReserveReplica
    | Holdings
    | HoldingsReply
    | Begin
    | Chunk
    | Seal
    | Fetch
    | AskStore
    | StoreIs
    | Acknowledged
    | Refused
)
data_messages: TypeAdapter[DataMessage] = TypeAdapter(Annotated[DataMessage, Field(discriminator="kind")])
