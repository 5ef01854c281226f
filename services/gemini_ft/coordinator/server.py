"""Serves the API beside the reconcile loop, and ends both together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.coordinator.api.app import create_app
from gemini_ft.coordinator.service import Coordinator

__all__ = ["bind", "serve"]

_log = logging.getLogger("gemini_ft.coordinator.server")


class _Server(uvicorn.Server):
    """Announces itself, and leaves the signals to `serve`."""

    def __init__(self, config: uvicorn.Config, url: str, ready_file: Path | None) -> None:
        super().__init__(config)
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


def bind(listen: str) -> tuple[socket.socket, str]:
    """Bind HOST:PORT (port 0: any free one) and return the socket and its URL.

    Raises:
        ConfigurationError: the address is malformed or cannot be bound.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise ConfigurationError(f"--listen is {listen!r}; give HOST:PORT, for instance 127.0.0.1:0")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, int(port)), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cannot listen on {listen}: {error}; choose another --listen") from error
    shown = f"[{host}]" if ":" in host else host
    return bound, f"http://{shown}:{bound.getsockname()[1]}"


async def serve(
    coordinator: Coordinator, token: str, listening: socket.socket, url: str, ready_file: Path | None = None
) -> None:
    """Run until SIGINT or SIGTERM. Raises what ends the coordinator before that."""
    config = uvicorn.Config(
        create_app(coordinator, token), log_config=None, access_log=False, timeout_graceful_shutdown=2
    )
    server = _Server(config, url, ready_file)
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
