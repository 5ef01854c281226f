"""Server-sent events, taken apart without I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["EventDecoder", "ServerSentEvent"]


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event; `id` is that of the newest event that had one."""

    data: str
    id: str


class EventDecoder:
    """Takes pieces of a stream as they come. Lines end with LF or CR LF, never at what Unicode calls a line end: data
    may hold such characters.
    """

    def __init__(self, last_event_id: str = "") -> None:
        self._id = last_event_id
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that `piece` completes; comments, which keep a stream alive, yield nothing."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode(errors="replace")
            if text:
                self._take(text)
            elif self._data:
                event = ServerSentEvent("\n".join(self._data), self._id)
                self._data = []
                yield event

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id":
            self._id = value
