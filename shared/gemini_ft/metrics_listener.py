"""`--metrics-listen`: a process's metrics over HTTP, in the text format of Prometheus.

Requests are served by threads, but what they tell is read on the event loop, so that nobody sees a state half changed.
"""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, disable_created_metrics, make_wsgi_app
from prometheus_client.registry import Collector

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["make_registry", "serve_metrics"]

_READ_TIMEOUT_S = 5.0
_CLIENT_TIMEOUT_S = 10


def make_registry(collector: Collector) -> CollectorRegistry:
    """Return a registry with the collector's metrics and the usual ones about the process."""
    # When a series began is of no use, and would double their number.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # it is declared without types
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(collector)
    return registry


@asynccontextmanager
async def serve_metrics(listen: str, collector: Collector) -> AsyncIterator[str]:
    """Serve the collector's metrics at `listen`, HOST:PORT (port 0: any free one), and yield the URL.

    Raises:
        ConfigurationError: the address is malformed or cannot be bound.
    """
    host, port = _parse(listen)
    registry = make_registry(_OnLoop(collector, asyncio.get_running_loop()))
    try:
        server = await asyncio.to_thread(_Server, host, port)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cannot listen on {listen}: {error}; choose another --metrics-listen") from error
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def _parse(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise ConfigurationError(f"--metrics-listen is {listen!r}; give HOST:PORT, for instance 127.0.0.1:0")
    return host, int(port)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


class _OnLoop(Collector):
    """Lets another collector collect on the event loop."""

    def __init__(self, collector: Collector, loop: asyncio.AbstractEventLoop) -> None:
        self._collector = collector
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Nothing: whoever registers this collector runs on the loop, and must not wait for it."""
        return ()

    def collect(self) -> Iterable[Metric]:
        async def read() -> list[Metric]:
            return list(self._collector.collect())

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(_READ_TIMEOUT_S)
