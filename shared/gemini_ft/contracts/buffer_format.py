"""Layout of one buffer of the replica store, the same for the rank that fills it and the agent that keeps it.

::

    header page 4 KiB | data (whole chunks) | digest table, 16 bytes a chunk | manifest (JSON)

The state is EMPTY, FILLING or SEALED. SEALED is written last, so that whoever is killed at any moment leaves
FILLING, which nobody trusts. Every chunk has an xxh3-128 digest, taken from the source bytes when they were
staged; the shard digest is the xxh3-128 of digest table and manifest, and names the contents of a copy.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from gemini_ft.contracts.errors import CapacityError, IntegrityError, ProtocolError

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "DIGEST_BYTES",
    "HEADER_PAGE_BYTES",
    "BufferGeometry",
    "BufferHeader",
    "BufferState",
    "ShardBuffer",
    "digest",
]

FORMAT_VERSION = 1
HEADER_PAGE_BYTES = 4096
DIGEST_BYTES = 16
DEFAULT_CHUNK_BYTES = 1 << 20

_MAGIC = b"GEMFTBUF"
_STATE = struct.Struct("<I")
_STATE_OFFSET = 8
_FIELDS = struct.Struct("<I64sQIIQQQII16sI")
_FIELDS_OFFSET = 16


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the xxh3-128 digest of `data`, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


class BufferState(enum.IntEnum):
    """What may be believed about a buffer."""

    EMPTY = 0
    FILLING = 1
    SEALED = 2


@dataclass(frozen=True, slots=True)
class BufferGeometry:
    """Sizes of a buffer; they are fixed when it is reserved. `capacity_bytes` is a whole number of chunks."""

    capacity_bytes: int
    chunk_bytes: int
    manifest_capacity_bytes: int

    @classmethod
    def for_shard(cls, data_bytes: int, manifest_bytes: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> BufferGeometry:
        """Return the smallest geometry that holds a shard; small shards get smaller chunks so that little is wasted."""
        while chunk_bytes > HEADER_PAGE_BYTES and chunk_bytes > max(data_bytes // 64, 1):
            chunk_bytes //= 2
        num_chunks = max(1, -(-data_bytes // chunk_bytes))
        return cls(num_chunks * chunk_bytes, chunk_bytes, -(-manifest_bytes // HEADER_PAGE_BYTES) * HEADER_PAGE_BYTES)

    @property
    def max_chunks(self) -> int:
        """Number of chunks that the data area holds."""
        return self.capacity_bytes // self.chunk_bytes

    @property
    def table_offset(self) -> int:
        """Offset of the digest table in the file."""
        return HEADER_PAGE_BYTES + self.capacity_bytes

    @property
    def manifest_offset(self) -> int:
        """Offset of the manifest in the file."""
        return self.table_offset + self.max_chunks * DIGEST_BYTES

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.manifest_offset + self.manifest_capacity_bytes


@dataclass(frozen=True, slots=True)
class BufferHeader:
    """What a header page says. `shard_digest` is all zero until the buffer is sealed."""

    state: BufferState
    job_id: str
    generation: int
    rank: int
    world_size: int
    step: int
    data_bytes: int
    geometry: BufferGeometry
    manifest_bytes: int
    shard_digest: bytes

    @property
    def num_chunks(self) -> int:
        """Number of chunks that hold data; the last one may be short."""
        return -(-self.data_bytes // self.geometry.chunk_bytes)


class ShardBuffer:
    """A view of one mapped buffer. It never allocates; the caller owns the mapping and its lifetime."""

    def __init__(self, view: memoryview, geometry: BufferGeometry) -> None:
        if len(view) < geometry.file_bytes:
            raise CapacityError(
                f"a buffer of {len(view)} bytes was mapped, but its geometry needs {geometry.file_bytes} bytes",
                need_bytes=geometry.file_bytes,
                have_bytes=len(view),
            )
        self.view = view
        self.geometry = geometry

    @classmethod
    def open(cls, view: memoryview) -> ShardBuffer:
        """Open a buffer whose geometry is in its own header page.

        Raises:
            ProtocolError: the page is not one of ours, of another format version, or damaged.
        """
        return cls(view, _read_header(view).geometry)

    def format(self, job_id: str, rank: int, world_size: int) -> None:
        """Make the buffer EMPTY, whatever it held."""
        self._write_header(
            BufferHeader(BufferState.EMPTY, job_id, 0, rank, world_size, 0, 0, self.geometry, 0, bytes(16))
        )

    def header(self) -> BufferHeader:
        """Read the header page.

        Raises:
            ProtocolError: the page is not one of ours, of another format version, or damaged.
        """
        return _read_header(self.view)

    def begin(
        self, job_id: str, generation: int, rank: int, world_size: int, step: int, data_bytes: int
    ) -> BufferHeader:
        """Give up what the buffer held and begin to fill it with `step`.

        Raises:
            CapacityError: the shard is larger than what was reserved.
        """
        if data_bytes > self.geometry.capacity_bytes:
            raise CapacityError(
                f"rank {rank} staged {data_bytes} bytes at step {step}, but {self.geometry.capacity_bytes} bytes "
                "were reserved; state that grows during training must exist when the Checkpointer is built",
                need_bytes=data_bytes,
                have_bytes=self.geometry.capacity_bytes,
            )
        header = BufferHeader(
            BufferState.FILLING,
            job_id,
            generation,
            rank,
            world_size,
            step,
            data_bytes,
            self.geometry,
            0,
            bytes(16),
        )
        self._write_header(header)
        return header

    def chunk(self, index: int, data_bytes: int) -> memoryview:
        """Return the writable bytes of chunk `index` of a shard of `data_bytes`."""
        start = index * self.geometry.chunk_bytes
        end = min(start + self.geometry.chunk_bytes, data_bytes)
        if not 0 <= start < end:
            raise ProtocolError(f"chunk {index} lies outside a shard of {data_bytes} bytes")
        return self.view[HEADER_PAGE_BYTES + start : HEADER_PAGE_BYTES + end]

    def data(self, data_bytes: int) -> memoryview:
        """Return the first `data_bytes` of the data area."""
        return self.view[HEADER_PAGE_BYTES : HEADER_PAGE_BYTES + data_bytes]

    def set_chunk_digest(self, index: int, chunk_digest: bytes) -> None:
        """Record the digest of chunk `index`."""
        offset = self.geometry.table_offset + index * DIGEST_BYTES
        self.view[offset : offset + DIGEST_BYTES] = chunk_digest

    def chunk_digest(self, index: int) -> bytes:
        """Return the recorded digest of chunk `index`."""
        offset = self.geometry.table_offset + index * DIGEST_BYTES
        return bytes(self.view[offset : offset + DIGEST_BYTES])

    def seal(self, manifest: bytes | memoryview) -> BufferHeader:
        """Write the manifest and then, last, the state SEALED. All chunks and their digests must be there.

        Raises:
            CapacityError: the manifest is larger than what was reserved.
            ProtocolError: the buffer is not being filled.
        """
        header = self.header()
        if header.state is not BufferState.FILLING:
            raise ProtocolError(f"a buffer in state {header.state.name} cannot be sealed")
        if len(manifest) > self.geometry.manifest_capacity_bytes:
            raise CapacityError(
                f"the manifest of rank {header.rank} has {len(manifest)} bytes, but "
                f"{self.geometry.manifest_capacity_bytes} were reserved; "
                "non-tensor state may not grow without bound during training",
                need_bytes=len(manifest),
                have_bytes=self.geometry.manifest_capacity_bytes,
            )
        offset = self.geometry.manifest_offset
        self.view[offset : offset + len(manifest)] = manifest
        sealed = BufferHeader(
            BufferState.SEALED,
            header.job_id,
            header.generation,
            header.rank,
            header.world_size,
            header.step,
            header.data_bytes,
            self.geometry,
            len(manifest),
            _shard_digest(self.digest_table(header.num_chunks), manifest),
        )
        self._write_header(sealed)
        return sealed

    def discard(self) -> None:
        """Make a buffer EMPTY in one store, for instance because its copy is bad or was rolled back."""
        _STATE.pack_into(self.view, _STATE_OFFSET, BufferState.EMPTY)

    def digest_table(self, num_chunks: int) -> memoryview:
        """Return the recorded digests of the first `num_chunks` chunks."""
        offset = self.geometry.table_offset
        return self.view[offset : offset + num_chunks * DIGEST_BYTES]

    def manifest(self) -> bytes:
        """Return the manifest of a sealed buffer."""
        header = self.header()
        offset = self.geometry.manifest_offset
        return bytes(self.view[offset : offset + header.manifest_bytes])

    def verify(self) -> BufferHeader:
        """Check every byte of a sealed buffer against its digests and return its header.

        Raises:
            ProtocolError: the header page is damaged or the buffer is not sealed.
            IntegrityError: a chunk, the digest table or the manifest does not match.
        """
        header = self.verify_manifest()
        for index, data in self.chunks(header):
            self.check_chunk(header, index, data)
        return header

    def verify_manifest(self) -> BufferHeader:
        """Check header, digest table and manifest of a sealed buffer, but not its chunks; raises as `verify`."""
        header = self.header()
        if header.state is not BufferState.SEALED:
            raise ProtocolError(f"the copy of rank {header.rank} is {header.state.name}, not SEALED")
        found = _shard_digest(self.digest_table(header.num_chunks), self.manifest())
        if found != header.shard_digest:
            raise IntegrityError(
                f"the manifest of rank {header.rank} at step {header.step} does not match its digest; "
                "this copy must not be used",
                where="manifest",
                expected=header.shard_digest.hex(),
                found=found.hex(),
            )
        return header

    def check_chunk(self, header: BufferHeader, index: int, data: memoryview | bytes) -> None:
        """Check `data` against the recorded digest of chunk `index`; raises IntegrityError."""
        expected, found = self.chunk_digest(index), digest(data)
        if found != expected:
            raise IntegrityError(
                f"chunk {index} of rank {header.rank} at step {header.step} does not match its digest; "
                "this copy must not be used",
                where=f"chunk {index}",
                expected=expected.hex(),
                found=found.hex(),
            )

    def chunks(self, header: BufferHeader) -> Iterator[tuple[int, memoryview]]:
        """Yield (index, bytes) of every chunk that holds data."""
        for index in range(header.num_chunks):
            yield index, self.chunk(index, header.data_bytes)

    def _write_header(self, header: BufferHeader) -> None:
        geometry = header.geometry
        fields = _FIELDS.pack(
            FORMAT_VERSION,
            header.job_id.encode(),
            header.generation,
            header.rank,
            header.world_size,
            header.step,
            header.data_bytes,
            geometry.capacity_bytes,
            geometry.chunk_bytes,
            geometry.manifest_capacity_bytes,
            header.shard_digest,
            header.manifest_bytes,
        )
        # The order is the promise: no state but FILLING is visible while fields change.
        _STATE.pack_into(self.view, _STATE_OFFSET, BufferState.FILLING)
        self.view[: len(_MAGIC)] = _MAGIC
        self.view[_FIELDS_OFFSET : _FIELDS_OFFSET + len(fields)] = fields
        end = _FIELDS_OFFSET + len(fields)
        self.view[end : end + DIGEST_BYTES] = digest(fields)
        _STATE.pack_into(self.view, _STATE_OFFSET, header.state)


def _shard_digest(table: memoryview, manifest: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_128()
    hasher.update(table)
    hasher.update(manifest)
    return hasher.digest()


def _read_header(view: memoryview) -> BufferHeader:
    if len(view) < HEADER_PAGE_BYTES or bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise ProtocolError("the file is not a buffer of the replica store")
    end = _FIELDS_OFFSET + _FIELDS.size
    fields = bytes(view[_FIELDS_OFFSET:end])
    if bytes(view[end : end + DIGEST_BYTES]) != digest(fields):
        raise ProtocolError("the header page of a buffer is damaged")
    version, job, generation, rank, world_size, step, data_bytes, *sizes, shard_digest, manifest_bytes = _FIELDS.unpack(
        fields
    )
    if version != FORMAT_VERSION:
        raise ProtocolError(f"a buffer has format version {version}, this release reads version {FORMAT_VERSION}")
    (state,) = _STATE.unpack_from(view, _STATE_OFFSET)
    try:
        known = BufferState(state)
    except ValueError:
        raise ProtocolError(f"a buffer is in the unknown state {state}") from None
    return BufferHeader(
        known,
        job.rstrip(b"\0").decode(),
        generation,
        rank,
        world_size,
        step,
        data_bytes,
        BufferGeometry(*sizes),
        manifest_bytes,
        shard_digest,
    )
