"""Layout of a buffer: what was sealed reads back, what was not is never taken for sealed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.buffer_format import (
    HEADER_PAGE_BYTES,
    BufferGeometry,
    BufferState,
    ShardBuffer,
    digest,
)
from gemini_ft.contracts.errors import CapacityError, IntegrityError, ProtocolError

JOB = "job-a"


def new_buffer(data_bytes: int, manifest_bytes: int = 100) -> ShardBuffer:
    geometry = BufferGeometry.for_shard(data_bytes, manifest_bytes)
    buffer = ShardBuffer(memoryview(bytearray(geometry.file_bytes)), geometry)
    buffer.format(JOB, 3, 8)
    return buffer


def fill(buffer: ShardBuffer, data: bytes, step: int = 5) -> None:
    header = buffer.begin(JOB, 2, 3, 8, step, len(data))
    for index, view in buffer.chunks(header):
        start = index * buffer.geometry.chunk_bytes
        view[:] = data[start : start + len(view)]
        buffer.set_chunk_digest(index, digest(view))


@given(data_bytes=st.integers(0, 1 << 40), manifest_bytes=st.integers(0, 1 << 20))
def test_a_geometry_holds_its_shard_with_little_waste(data_bytes: int, manifest_bytes: int) -> None:
    geometry = BufferGeometry.for_shard(data_bytes, manifest_bytes)
    assert geometry.capacity_bytes >= data_bytes
    assert geometry.capacity_bytes % geometry.chunk_bytes == 0
    assert geometry.manifest_capacity_bytes >= manifest_bytes
    pages = 4 * HEADER_PAGE_BYTES
    assert geometry.file_bytes <= 1.02 * data_bytes + manifest_bytes + pages
    assert geometry.file_bytes == geometry.manifest_offset + geometry.manifest_capacity_bytes


@given(data=st.binary(max_size=40_000), manifest=st.binary(max_size=100))
def test_what_was_sealed_reads_back(data: bytes, manifest: bytes) -> None:
    buffer = new_buffer(len(data))
    fill(buffer, data)
    sealed = buffer.seal(manifest)
    reopened = ShardBuffer.open(buffer.view)
    header = reopened.verify()
    assert header == sealed
    assert (header.state, header.job_id, header.generation, header.rank, header.world_size, header.step) == (
        BufferState.SEALED,
        JOB,
        2,
        3,
        8,
        5,
    )
    assert bytes(reopened.data(header.data_bytes)) == data
    assert reopened.manifest() == manifest


@given(data=st.data())
def test_any_flipped_bit_of_a_sealed_copy_is_found(data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=1, max_size=20_000))
    manifest = data.draw(st.binary(max_size=50))
    buffer = new_buffer(len(content))
    fill(buffer, content)
    header = buffer.seal(manifest)
    areas = [
        (HEADER_PAGE_BYTES, header.data_bytes),
        (buffer.geometry.table_offset, header.num_chunks * 16),
        (buffer.geometry.manifest_offset, len(manifest)),
        (0, 8),  # magic
        (16, 64),  # header fields
    ]
    start, size = data.draw(st.sampled_from([area for area in areas if area[1]]))
    bit = data.draw(st.integers(0, size * 8 - 1))
    buffer.view[start + bit // 8] ^= 1 << bit % 8
    with pytest.raises((IntegrityError, ProtocolError)):
        buffer.verify()


@given(data=st.binary(min_size=1, max_size=9000), state=st.integers(3, 2**32 - 1))
def test_an_unknown_state_is_refused(data: bytes, state: int) -> None:
    buffer = new_buffer(len(data))
    fill(buffer, data)
    buffer.seal(b"")
    buffer.view[8:12] = state.to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="unknown state"):
        buffer.header()


@given(garbage=st.binary(max_size=2 * HEADER_PAGE_BYTES))
def test_garbage_is_no_buffer(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        ShardBuffer.open(memoryview(bytearray(garbage)))


def test_a_cut_off_file_is_refused() -> None:
    buffer = new_buffer(10_000)
    with pytest.raises(CapacityError):
        ShardBuffer.open(buffer.view[: buffer.geometry.file_bytes - 1])


def test_no_state_but_filling_is_visible_between_begin_and_seal() -> None:
    data = bytes(range(256)) * 100
    buffer = new_buffer(len(data))
    fill(buffer, data)
    buffer.seal(b"one")
    fill(buffer, data[::-1], step=6)
    assert buffer.header().state is BufferState.FILLING
    with pytest.raises(ProtocolError, match="FILLING, not SEALED"):
        buffer.verify()
    buffer.seal(b"two")
    assert buffer.verify().step == 6
    buffer.discard()
    assert buffer.header().state is BufferState.EMPTY
    with pytest.raises(ProtocolError, match="cannot be sealed"):
        buffer.seal(b"three")


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    buffer = new_buffer(10_000, manifest_bytes=10)
    with pytest.raises(CapacityError, match="state that grows during training") as error:
        buffer.begin(JOB, 1, 3, 8, 1, 1_000_000)
    assert (error.value.need_bytes, error.value.have_bytes) == (1_000_000, buffer.geometry.capacity_bytes)
    fill(buffer, b"x")
    with pytest.raises(CapacityError, match="manifest"):
        buffer.seal(bytes(5000))
    with pytest.raises(ProtocolError, match="lies outside"):
        buffer.chunk(1, 1)
