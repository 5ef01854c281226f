"""Serves the API beside the reconcile loop, and ends both together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import uvicorn

from gemini_ft.coordinator.api.app import create_app
from gemini_ft.coordinator.api.streams import Streams
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.security.exposure import bind_http

__all__ = ["bind", "make_server", "serve"]

_UNREAD_LIMIT = timedelta(seconds=20)
_log = logging.getLogger("gemini_ft.coordinator.server")


class _Server(uvicorn.Server):
    """Announces itself, and leaves the signals to `serve`."""

    def __init__(
        self, config: uvicorn.Config, url: str, ready_file: Path | None, end_streams: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._end_streams = end_streams
        self._url = url
        self._ready_file = ready_file

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _log.info("serving at %s", self._url)
        if self._ready_file is not None:
            draft = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}")
            draft.write_text(f"{self._url}\n")
            draft.replace(self._ready_file)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Streams have no end of their own, and the server waits for what is being answered.
        self._end_streams()
        await super().shutdown(sockets)


def bind(
    listen: str, unread_limit: timedelta = _UNREAD_LIMIT, *, encrypted: bool = False, insecure_plaintext: bool = False
) -> tuple[socket.socket, str]:
    """Bind HOST:PORT (port 0: any free one) and return the socket and its URL. A client that takes nothing of what is
    sent to it for `unread_limit` is dropped.

    Raises:
        ConfigurationError: the address is malformed or cannot be bound, or tokens would reach it unencrypted.
    """
    bound, url = bind_http("the API", listen, encrypted=encrypted, insecure_plaintext=insecure_plaintext)
    # Accepted sockets inherit both. asyncio sets the second only where the protocol is named, which it is not here.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_limit.total_seconds() * 1000))
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound, url


def make_server(
    coordinator: Coordinator,
    token: str,
    url: str,
    ready_file: Path | None = None,
    streams: Streams | None = None,
    tls: ssl.SSLContext | None = None,
) -> uvicorn.Server:
    """Return what serves the API of an open coordinator; `should_exit` ends it, streams included."""
    streams = streams or Streams()
    config = uvicorn.Config(
        create_app(coordinator, token, streams),
        http="h11",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )

    def end_streams() -> None:
        streams.end()
        coordinator.feed.end()

    return _Server(config, url, ready_file, end_streams)


async def serve(
    coordinator: Coordinator,
    token: str,
    listening: socket.socket,
    url: str,
    ready_file: Path | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Run until SIGINT or SIGTERM. Raises what ends the coordinator before that."""
    server = make_server(coordinator, token, url, ready_file, tls=tls)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    await coordinator.open()
    try:
        running = asyncio.ensure_future(coordinator.run())
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        await asyncio.wait((running, serving), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        if running.done():
            running.result()
        running.cancel()
        await asyncio.wait((running,))
    finally:
        await coordinator.close()
