"""Serves the pages with NiceGUI, of which one process has one."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from nicegui import app as nicegui_app
from nicegui import ui
from starlette.middleware.sessions import SessionMiddleware

from gemini_ft.dashboard import cluster, events, job, login, recoveries, simulator
from gemini_ft.dashboard.dashboard import Dashboard
from gemini_ft.dashboard.sessions import LIFETIME

__all__ = ["create_app", "serve"]

_log = logging.getLogger("gemini_ft.dashboard.server")
_STATIC = Path(__file__).with_name("static")
_HEADERS = {
    # Nothing of another host is loaded, and nobody else shows these pages. Templates are compiled in the browser.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'self'",
            "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "font-src 'self' data:",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    ),
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def create_app(dashboard: Dashboard, cookie_secret: str, *, encrypted: bool = False) -> FastAPI:
    """Return the application with all pages. To be called once a process."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await dashboard.close()

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)

    app.add_middleware(
        SessionMiddleware,
        secret_key=cookie_secret,
        session_cookie="gemini_ft_dashboard",
        same_site="strict",
        https_only=encrypted,
        max_age=int(LIFETIME.total_seconds()),
    )

    @app.middleware("http")
    async def add_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    login.install(app, dashboard)
    for page in (cluster, job, recoveries, events, simulator):
        page.install(dashboard)
    nicegui_app.add_static_files("/static", _STATIC, max_cache_age=0)
    ui.add_head_html('<link rel="stylesheet" href="/static/dashboard.css">', shared=True)
    ui.run_with(
        app,
        title="Gemini-FT",
        dark=None,
        language="en-US",
        reconnect_timeout=10.0,
        tailwind=False,
        show_welcome_message=False,
    )
    return app


class _Server(uvicorn.Server):
    """Announces itself, and ends at once when it is told to."""

    def __init__(self, config: uvicorn.Config, url: str, ready_file: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._ready_file = ready_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _log.info("serving at %s", self._url)
        if self._ready_file is not None:
            draft = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}")
            draft.write_text(f"{self._url}\n")
            draft.replace(self._ready_file)


def serve(
    app: FastAPI, listening: socket.socket, url: str, ready_file: Path | None, tls: ssl.SSLContext | None
) -> None:
    """Serve until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        ws_max_size=1 << 20,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    _Server(config, url, ready_file).run(sockets=[listening])
