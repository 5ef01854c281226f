"""Log in with a token, which the API has to take; log out."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import FastAPI, Form, Request
from fastapi.responses import RedirectResponse, Response
from nicegui import ui

from gemini_ft.contracts.errors import ConfigurationError, GeminiError
from gemini_ft.dashboard.dashboard import SESSION_KEY, Dashboard
from gemini_ft.dashboard.frame import title_of

__all__ = ["install"]

_REFUSED_KEY = "refused"
_REVOKED = "The API does not take the token any more; log in with another one."
_MAX_TOKEN_LENGTH = 200


def install(app: FastAPI, dashboard: Dashboard) -> None:
    """Add the page and what its forms are sent to."""

    @ui.page("/login", title=title_of("Log in"), dark=None)
    def login(request: Request, refused: bool = False) -> Response | None:
        if dashboard.visit(request) is not None:
            return RedirectResponse("/", 303)
        _form(request.session.pop(_REFUSED_KEY, _REVOKED if refused else ""))
        return None

    @app.post("/login", include_in_schema=False)
    async def log_in(request: Request, token: Annotated[str, Form(max_length=_MAX_TOKEN_LENGTH)] = "") -> Response:
        if not _is_own(request):
            return Response("this form was sent by another site", 403, media_type="text/plain")
        try:
            session = await _open(dashboard, token.strip())
        except GeminiError as error:
            request.session[_REFUSED_KEY] = str(error)
            return RedirectResponse("/login", 303)
        dashboard.sessions.end(request.session.get(SESSION_KEY))
        request.session.clear()
        request.session[SESSION_KEY] = session
        return RedirectResponse("/", 303)

    @app.post("/logout", include_in_schema=False)
    async def log_out(request: Request) -> Response:
        if not _is_own(request):
            return Response("this form was sent by another site", 403, media_type="text/plain")
        dashboard.sessions.end(request.session.get(SESSION_KEY))
        request.session.clear()
        return RedirectResponse("/login", 303)


async def _open(dashboard: Dashboard, token: str) -> str:
    """Return the name of a new session; raises GeminiError if the API does not take the token."""
    if not token:
        raise ConfigurationError("no token was given; paste one that `gemini-ft tokens create` has printed")
    async with dashboard.connect(token) as api:
        caller = (await api.cluster()).caller
    if caller is None:
        raise ConfigurationError("the coordinator is older than this dashboard and does not tell roles; update it")
    dashboard.feeds.forget_refusal(token)
    return dashboard.sessions.begin(token, caller).session_id


def _is_own(request: Request) -> bool:
    """Whether a form was sent by a page of this dashboard, beside what the cookie's SameSite sees to."""
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def _form(refused: str) -> None:
    with ui.element("div").classes("page"), ui.element("section").classes("panel login"):
        ui.html("Gemini-FT", tag="h1")
        if refused:
            ui.label(refused).classes("notice refused").props('role="alert" id="refused"')
        with ui.element("form").props('method="post" action="/login"').classes("login-form"):
            ui.html(
                '<label for="token">Token of the coordinator\'s API</label>'
                '<input id="token" name="token" type="password" autocomplete="current-password" autofocus required '
                f'maxlength="{_MAX_TOKEN_LENGTH}">'
                '<p class="faint">It stays with the dashboard\'s process and is never given to the browser again.</p>',
                sanitize=False,
            )
            ui.button("Log in").props('type="submit" outline no-caps')
