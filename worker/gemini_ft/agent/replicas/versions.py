"""One version of one shard on its way: a sender reads an `OutgoingVersion`, a receiver fills an `IncomingVersion`.

Both directions of the data plane use both: an owner sends to its holders, and a source answers a fetch, with
the same frames.
"""

from __future__ import annotations

from gemini_ft.agent.replicas._changes import Changes
from gemini_ft.agent.replicas.buffer_file import BufferFile
from gemini_ft.contracts.buffer_format import (
    HEADER_PAGE_BYTES,
    BufferGeometry,
    BufferHeader,
    BufferState,
    ShardBuffer,
    digest,
)
from gemini_ft.contracts.data_protocol import Begin, Chunk, Seal
from gemini_ft.contracts.errors import IntegrityError, ProtocolError
from gemini_ft.contracts.frames import MAX_PAYLOAD_BYTES
from gemini_ft.faults import fault_point

__all__ = ["IncomingVersion", "OutgoingVersion", "geometry_of"]


class OutgoingVersion:
    """A version in a local buffer, sealed or still being staged by a rank."""

    def __init__(
        self, buffer: ShardBuffer, header: BufferHeader, base_step: int | None, changes: Changes, num_staged: int = 0
    ) -> None:
        self.buffer = buffer
        self.header = header
        self.base_step = base_step
        self.changes = changes
        """Notified whenever `num_staged`, `sealed` or `abandoned` changes."""
        self.num_staged = header.num_chunks if header.state is BufferState.SEALED else num_staged
        self.sealed: BufferHeader | None = header if header.state is BufferState.SEALED else None
        self.abandoned = False
        """Nobody sends it any more."""
        self.damaged = False
        """Its bytes do not match the digests that were taken when they were staged."""

    @property
    def step(self) -> int:
        """The step of the version."""
        return self.header.step

    def seal(self, sealed: BufferHeader) -> None:
        """The rank has sealed it: everything can be sent."""
        self.sealed = sealed
        self.num_staged = sealed.num_chunks

    def begin_message(self, generation: int) -> Begin:
        """Return the announcement of this version."""
        header = self.header
        return Begin(
            generation=generation,
            rank=header.rank,
            world_size=header.world_size,
            step=header.step,
            version_generation=header.generation,
            data_bytes=header.data_bytes,
            chunk_bytes=header.geometry.chunk_bytes,
            manifest_capacity_bytes=header.geometry.manifest_capacity_bytes,
            base_step=self.base_step,
        )

    def chunk_message(self, generation: int, index: int) -> tuple[Chunk, memoryview]:
        """Return chunk `index` with its bytes."""
        header = self.header
        message = Chunk(
            generation=generation,
            rank=header.rank,
            step=header.step,
            index=index,
            chunk_digest=self.buffer.chunk_digest(index).hex(),
        )
        return message, self.buffer.chunk(index, header.data_bytes)

    def seal_message(self, generation: int) -> tuple[Seal, bytes]:
        """Return the seal with the manifest."""
        header = self.sealed or self.header
        message = Seal(
            generation=generation, rank=header.rank, step=header.step, shard_digest=header.shard_digest.hex()
        )
        return message, self.buffer.manifest()


class IncomingVersion:
    """A version that is being received into a buffer, which is FILLING until `seal`.

    The task that makes it is the only one that may write to that buffer from now on.
    """

    def __init__(self, target: BufferFile, begin: Begin, job_id: str) -> None:
        self._target = target
        self._received = bytearray(-(-begin.data_bytes // begin.chunk_bytes))
        self.begin = begin
        target.take_for_writing()
        fault_point("receiver.before_filling")
        self._header = target.buffer.begin(
            job_id, begin.version_generation, begin.rank, begin.world_size, begin.step, begin.data_bytes
        )
        fault_point("receiver.after_filling")

    def chunk_view(self, message: Chunk, payload_bytes: int) -> memoryview:
        """Return where the bytes of a chunk go.

        Raises:
            ProtocolError: the chunk is not one of this version.
        """
        self._require_own(message)
        view = self._target.buffer.chunk(message.index, self.begin.data_bytes)
        if len(view) != payload_bytes:
            raise ProtocolError(f"chunk {message.index} came with {payload_bytes} bytes where {len(view)} belong")
        return view

    def chunk_arrived(self, message: Chunk) -> None:
        """The bytes are in place: check them.

        Raises:
            IntegrityError: they do not match their digest.
        """
        fault_point("receiver.before_chunk_digest")
        found = digest(self._target.buffer.chunk(message.index, self.begin.data_bytes))
        if found.hex() != message.chunk_digest:
            raise IntegrityError(
                f"chunk {message.index} of rank {message.rank} at step {message.step} was damaged on its way here",
                where=f"chunk {message.index}",
                expected=message.chunk_digest,
                found=found.hex(),
            )
        self._target.buffer.set_chunk_digest(message.index, found)
        self._received[message.index] = 1
        fault_point("receiver.after_chunk_digest")

    def seal(self, message: Seal, manifest: memoryview) -> BufferHeader:
        """Check that every chunk was received and the shard digest matches, and only then write SEALED.

        Raises:
            ProtocolError: chunks are missing.
            IntegrityError: digest table and manifest do not match the shard digest.
        """
        self._require_own(message)
        num_missing = self._received.count(0)
        if num_missing:
            raise ProtocolError(
                f"the seal of rank {message.rank} at step {message.step} came before {num_missing} of its chunks"
            )
        buffer = self._target.buffer
        found = digest(b"".join((buffer.digest_table(len(self._received)), manifest))).hex()
        if found != message.shard_digest:
            raise IntegrityError(
                f"the manifest of rank {message.rank} at step {message.step} was damaged on its way here",
                where="manifest",
                expected=message.shard_digest,
                found=found,
            )
        fault_point("receiver.before_sealed")
        header = buffer.seal(manifest)
        fault_point("receiver.after_sealed")
        self._target.trust(header)
        self._target.give_back()
        return header

    def give_up(self) -> None:
        """End the transfer; the buffer stays FILLING, which nobody trusts."""
        self._target.give_back()

    def _require_own(self, message: Chunk | Seal) -> None:
        if (message.rank, message.step) != (self.begin.rank, self.begin.step):
            raise ProtocolError(
                f"a {message.kind} of rank {message.rank} at step {message.step} came in the middle of "
                f"rank {self.begin.rank} at step {self.begin.step}"
            )


def geometry_of(begin: Begin) -> BufferGeometry:
    """Return the geometry of a buffer that holds the announced version.

    Raises:
        ProtocolError: the announced sizes are impossible.
    """
    if (
        min(begin.data_bytes, begin.step, begin.rank, begin.world_size, begin.version_generation) < 0
        or max(begin.rank, begin.world_size, begin.version_generation) >= 1 << 32
        or max(begin.data_bytes, begin.step) >= 1 << 63
        or not HEADER_PAGE_BYTES <= begin.chunk_bytes <= MAX_PAYLOAD_BYTES
        or not 0 <= begin.manifest_capacity_bytes <= MAX_PAYLOAD_BYTES
    ):
        raise ProtocolError(
            f"step {begin.step} of rank {begin.rank} with {begin.data_bytes} bytes in chunks of "
            f"{begin.chunk_bytes} bytes with a manifest of {begin.manifest_capacity_bytes} bytes cannot be received"
        )
    num_chunks = max(1, -(-begin.data_bytes // begin.chunk_bytes))
    return BufferGeometry(num_chunks * begin.chunk_bytes, begin.chunk_bytes, begin.manifest_capacity_bytes)
