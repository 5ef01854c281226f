"""The wire codec: any cut of a good stream decodes, anything else is refused."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter

from gemini_ft.contracts.data_protocol import Chunk, Holdings, data_messages
from gemini_ft.contracts.errors import ProtocolError
from gemini_ft.contracts.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameDecoder,
    Message,
    encode_frame,
    parse_header,
)


class Note(Message):
    kind: Literal["note"] = "note"
    text: str


class Number(Message):
    kind: Literal["number"] = "number"
    value: int


messages: TypeAdapter[Note | Number] = TypeAdapter(Annotated[Note | Number, Field(discriminator="kind")])

frames = st.lists(
    st.tuples(
        st.builds(Note, text=st.text(max_size=50)) | st.builds(Number, value=st.integers()), st.binary(max_size=300)
    ),
    max_size=5,
)


def encode(sent: list[tuple[Message, bytes]]) -> bytes:
    return b"".join(encode_frame(message, len(payload)) + payload for message, payload in sent)


@given(sent=frames, cuts=st.lists(st.integers(min_value=0, max_value=2000), max_size=20))
def test_a_stream_cut_anywhere_decodes_to_what_was_sent(sent: list[tuple[Message, bytes]], cuts: list[int]) -> None:
    stream = encode(sent)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = FrameDecoder(messages)
    received = [frame for start, end in itertools.pairwise(edges) for frame in decoder.feed(stream[start:end])]
    assert received == [Frame(message, payload) for message, payload in sent]
    assert decoder.num_pending_bytes == 0


@given(sent=frames.filter(len), lost=st.integers(min_value=1, max_value=200))
def test_a_truncated_stream_gives_no_false_frame_and_shows_the_rest(
    sent: list[tuple[Message, bytes]], lost: int
) -> None:
    stream = encode(sent)
    decoder = FrameDecoder(messages)
    kept = max(0, len(stream) - lost)
    received = decoder.feed(stream[:kept])
    assert received == [Frame(message, payload) for message, payload in sent[: len(received)]]
    assert len(received) < len(sent)
    assert decoder.num_pending_bytes == kept - len(encode(sent[: len(received)]))


@given(garbage=st.binary(min_size=HEADER_BYTES, max_size=200).filter(lambda data: not data.startswith(b"GmFT")))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder(messages).feed(garbage)


@given(text=st.text(max_size=60), data=st.data())
def test_one_flipped_bit_in_header_or_body_never_decodes_to_another_message(text: str, data: st.DataObject) -> None:
    stream = bytearray(encode([(Note(text=text), b"payload")]))
    bit = data.draw(st.integers(min_value=0, max_value=(len(stream) - len(b"payload")) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    try:
        received = FrameDecoder(messages).feed(bytes(stream))
    except ProtocolError:
        return
    # A flip in a size may make the decoder wait for more, or cut the payload, but never changes the message.
    assert [frame.message for frame in received] in ([], [Note(text=text)])


@pytest.mark.parametrize(("body_bytes", "payload_bytes"), [(MAX_BODY_BYTES + 1, 0), (0, MAX_PAYLOAD_BYTES + 1)])
def test_an_oversized_frame_is_refused_by_its_header_alone(body_bytes: int, payload_bytes: int) -> None:
    header = bytearray(encode_frame(Number(value=1))[:HEADER_BYTES])
    header[8:12] = body_bytes.to_bytes(4, "little")
    header[16:24] = payload_bytes.to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="above the limit"):
        parse_header(header)


def test_the_sender_refuses_to_make_an_oversized_frame() -> None:
    with pytest.raises(ProtocolError, match="Note frame"):
        encode_frame(Note(text="x" * (MAX_BODY_BYTES + 1)))
    with pytest.raises(ProtocolError, match="above the limit"):
        encode_frame(Number(value=1), MAX_PAYLOAD_BYTES + 1)


def test_another_wire_version_is_refused_with_what_to_do() -> None:
    stream = bytearray(encode([(Number(value=1), b"")]))
    stream[4] = 9
    with pytest.raises(ProtocolError, match="run one release on all nodes"):
        FrameDecoder(messages).feed(bytes(stream))


def test_unknown_kinds_and_unknown_fields_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not an accepted message"):
        FrameDecoder(messages).feed(encode([(Holdings(generation=1, rank=0), b"")]))

    class Longer(Note):
        extra: int = 1

    with pytest.raises(ProtocolError, match="extra"):
        FrameDecoder(messages).feed(encode([(Longer(text=""), b"")]))


def test_data_plane_messages_check_their_fields() -> None:
    good = Chunk(generation=1, rank=0, step=3, index=0, chunk_digest="0" * 32)
    stream = encode_frame(good)
    assert FrameDecoder(data_messages).feed(stream)[0].message == good
    bad = good.model_construct(generation=1, rank=0, step=3, index=0, chunk_digest="0" * 31)
    with pytest.raises(ProtocolError, match="chunk_digest"):
        FrameDecoder(data_messages).feed(encode_frame(bad))
