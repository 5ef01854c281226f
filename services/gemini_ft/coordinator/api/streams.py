"""Server-sent events: limited in number, kept alive by pings, ended with the process.

Nothing is queued for a client here beyond what is on its way; a client that does not read holds up its own stream
until the connection is given up (`server.bind`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from datetime import timedelta
from typing import Any

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from gemini_ft.coordinator.api.problems import TooManyStreamsError
from gemini_ft.coordinator.tokens import Principal

__all__ = ["EVENT_STREAM_CONTENT", "PING", "EventStream", "Streams", "sse"]

_EVENT_STREAM = "text/event-stream"

EVENT_STREAM_CONTENT: dict[str, Any] = {
    _EVENT_STREAM: {
        "schema": {
            "type": "object",
            "description": "one server-sent event",
            "properties": {field: {"type": "string"} for field in ("id", "event", "data")},
            "required": ["id", "data"],
        }
    }
}
"""What the OpenAPI document says of a stream."""

PING = format_sse_event(comment="ping")
_RETRY_AFTER_S = 5


class Streams:
    """Counts open streams."""

    def __init__(
        self, num_in_all: int = 64, num_a_token: int = 8, ping_interval: timedelta = timedelta(seconds=15)
    ) -> None:
        self.ping_interval_s = ping_interval.total_seconds()
        self._num_in_all = num_in_all
        self._num_a_token = num_a_token
        self._open: Counter[str] = Counter()
        self.ended = False

    def end(self) -> None:
        """Let all streams end when they next have nothing to send."""
        self.ended = True

    @property
    def num_open(self) -> int:
        """How many streams are open."""
        return self._open.total()

    @contextlib.contextmanager
    def slot(self, principal: Principal) -> Iterator[None]:
        """Take part in the count while this context is open; raises TooManyStreamsError."""
        for num_open, limit, whose in (
            (self._open[principal.token_id], self._num_a_token, f"token {principal.name!r}"),
            (self._open.total(), self._num_in_all, "this coordinator"),
        ):
            if num_open >= limit:
                raise TooManyStreamsError(
                    f"{whose} has {num_open} streams open, which is the limit; close one and try again",
                    retry_after_s=_RETRY_AFTER_S,
                )
        self._open[principal.token_id] += 1
        try:
            yield
        finally:
            self._open[principal.token_id] -= 1
            self._open += Counter()  # drops zeros


class EventStream(EventSourceResponse):
    """A response of server-sent events that counts among the streams of its principal."""

    def __init__(self, content: AsyncGenerator[bytes], streams: Streams, principal: Principal) -> None:
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._content = content
        self._streams = streams
        self._principal = principal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the content ends or the client leaves."""
        async with contextlib.aclosing(self._content):
            with self._streams.slot(self._principal):
                await super().__call__(scope, receive, send)


def sse(data: str, event_id: str, event: str | None = None) -> bytes:
    """Return one server-sent event."""
    return format_sse_event(data_str=data, id=event_id, event=event)
