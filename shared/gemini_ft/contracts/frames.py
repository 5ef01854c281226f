"""Frames of the data plane and of the node's socket, as a sans-I/O codec.

A frame is a fixed header, a JSON body and an optional raw payload::

    magic 4s | version u8 | flags u8 (0) | reserved u16 (0) | body_bytes u32 | body_digest u32 | payload_bytes u64

Little endian, 24 bytes. The body names its kind; payloads are chunk bytes or manifests. A reader that wants a
payload to land straight in shared memory parses the header and body itself (`parse_header`, `parse_body`);
`FrameDecoder` is for everybody else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from gemini_ft.contracts.errors import ProtocolError

__all__ = [
    "HEADER_BYTES",
    "MAX_BODY_BYTES",
    "MAX_PAYLOAD_BYTES",
    "WIRE_VERSION",
    "Frame",
    "FrameDecoder",
    "FrameHeader",
    "Message",
    "encode_frame",
    "parse_body",
    "parse_header",
]

WIRE_VERSION = 1
MAX_BODY_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20

_MAGIC = b"GmFT"
_HEADER = struct.Struct("<4sBBHIIQ")
HEADER_BYTES = _HEADER.size


class Message(BaseModel):
    """Base of every message body: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The sizes of what follows, already checked against the limits."""

    body_bytes: int
    body_digest: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Frame(Generic[M]):
    """One decoded frame."""

    message: M
    payload: bytes


def encode_frame(message: Message, payload_bytes: int = 0) -> bytes:
    """Return header and body of a frame; the caller sends the payload of `payload_bytes` right after it.

    Raises:
        ProtocolError: body or payload is above its limit.
    """
    body = message.model_dump_json().encode()
    if len(body) > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} frame of {len(body)} + {payload_bytes} bytes is above the limit of "
            f"{MAX_BODY_BYTES} + {MAX_PAYLOAD_BYTES} bytes"
        )
    return _HEADER.pack(_MAGIC, WIRE_VERSION, 0, 0, len(body), xxhash.xxh32_intdigest(body), payload_bytes) + body


def parse_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Check the first HEADER_BYTES of a frame.

    Raises:
        ProtocolError: not a frame, another wire version, or a size above its limit.
    """
    magic, version, flags, reserved, body_bytes, body_digest, payload_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError(
            f"the peer does not speak this protocol: a frame begins with {bytes(magic)!r}, not {_MAGIC!r}"
        )
    if version != WIRE_VERSION:
        raise ProtocolError(
            f"the peer speaks wire version {version}, this process version {WIRE_VERSION}; run one release on all nodes"
        )
    if flags or reserved:
        raise ProtocolError(f"a frame header has unknown flags {flags:#x}/{reserved:#x}")
    if body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"a frame announces {body_bytes} + {payload_bytes} bytes, "
            f"above the limit of {MAX_BODY_BYTES} + {MAX_PAYLOAD_BYTES} bytes"
        )
    return FrameHeader(body_bytes, body_digest, payload_bytes)


def parse_body(header: FrameHeader, body: bytes | bytearray | memoryview, messages: TypeAdapter[M]) -> M:
    """Check and decode a body against the union of messages that the reader accepts.

    Raises:
        ProtocolError: the body's digest is wrong, or it is none of the accepted messages.
    """
    data = bytes(body)
    if xxhash.xxh32_intdigest(data) != header.body_digest:
        raise ProtocolError("a frame body does not match its digest")
    try:
        return messages.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"a frame body is not an accepted message: {where}: {first['msg']}") from None


class FrameDecoder(Generic[M]):
    """Turns a byte stream, cut anywhere, into frames. After an error the stream cannot be resumed."""

    def __init__(self, messages: TypeAdapter[M]) -> None:
        self._messages = messages
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame[M]]:
        """Take bytes and return the frames that they complete.

        Raises:
            ProtocolError: the stream is not a sequence of accepted frames.
        """
        self._buffer += data
        frames: list[Frame[M]] = []
        while len(self._buffer) >= HEADER_BYTES:
            header = parse_header(self._buffer[:HEADER_BYTES])
            body_end = HEADER_BYTES + header.body_bytes
            end = body_end + header.payload_bytes
            if len(self._buffer) < end:
                break
            message = parse_body(header, self._buffer[HEADER_BYTES:body_end], self._messages)
            frames.append(Frame(message, bytes(self._buffer[body_end:end])))
            del self._buffer[:end]
        return frames

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of a frame that is not complete yet; above zero at the end of a stream means it was cut off."""
        return len(self._buffer)
