"""Around all routes: the size of bodies, and the time that answers take."""

from __future__ import annotations

import time
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemini_ft.coordinator.api.problems import problem
from gemini_ft.coordinator.metrics import CoordinatorMetrics

__all__ = ["LargeBodies", "Timed"]


class LargeBodies:
    """Refuses bodies that are too large: before they are read if they say so, else as soon as it shows."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        length = Headers(scope=scope).get("content-length", "0") if scope["type"] == "http" else "0"
        if length.isdigit() and int(length) > self._max_bytes:
            headers = {"Connection": "close"}
            await problem(HTTPStatus(413), "content-too-large", self._detail, headers)(scope, receive, send)
            return
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._detail)
            return message

        await self._app(scope, counted_receive, send)

    @property
    def _detail(self) -> str:
        return f"the body is too large; at most {self._max_bytes} bytes are taken"


class Timed:
    """Notes how long answers take, by route."""

    def __init__(self, app: ASGIApp, metrics: CoordinatorMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_at = time.perf_counter()

        async def timed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if route != "none" else "none"
                labels = (method, route, str(message["status"]))
                self._metrics.request_seconds.labels(*labels).observe(time.perf_counter() - begun_at)
            await send(message)

        await self._app(scope, receive, timed_send)
