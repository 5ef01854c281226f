"""What all pages share, and how one visit of a page is kept up to date."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import Request

from gemini_ft.client.api_client import AsyncApiClient
from gemini_ft.dashboard.feed import Feed, Feeds
from gemini_ft.dashboard.feed_state import FeedState
from gemini_ft.dashboard.sessions import Session, Sessions
from gemini_ft.dashboard.simulation import Simulations

__all__ = ["SESSION_KEY", "Dashboard", "Visit"]

SESSION_KEY = "login"
"""Where the signed cookie keeps the name of the session."""

Show = Callable[[FeedState], Awaitable[None] | None]


@dataclass(slots=True)
class Visit:
    """A page that somebody has open. What is in `shows` is called with every new state, and after `again`."""

    dashboard: Dashboard
    session: Session
    shows: list[Show] = field(default_factory=list)
    is_wanted: bool = False

    @property
    def feed(self) -> Feed:
        """The feed of the session's token; to ask for it is to look at it."""
        return self.dashboard.feeds.of(self.session.token)

    @property
    def api(self) -> AsyncApiClient:
        """The API, under the session's token."""
        return self.feed.api

    def again(self) -> None:
        """Have everything shown again, since the reader has chosen something else."""
        self.is_wanted = True


class Dashboard:
    """Sessions, and a feed for each token that one of them uses."""

    def __init__(self, connect: Callable[[str], AsyncApiClient]) -> None:
        """`connect` returns a client of the API that presents a token."""
        self.connect = connect
        self.sessions = Sessions(time.monotonic)
        self.feeds = Feeds(connect)
        self.simulations = Simulations()

    async def close(self) -> None:
        """End what runs beside the pages."""
        await self.feeds.close()
        self.simulations.close()

    def visit(self, request: Request) -> Visit | None:
        """Return the visit that a request begins; None: somebody has to log in first."""
        session = self.sessions.use(request.session.get(SESSION_KEY))
        return None if session is None else Visit(self, session)

    def way_out(self, visit: Visit) -> str | None:
        """Return where a visit has to go since its session has ended, or ends now because the API does not take its
        token any more; None: it goes on.
        """
        if self.feeds.is_refused(visit.session.token):
            self.sessions.end(visit.session.session_id)
            return "/login?refused=true"
        return "/login" if self.sessions.use(visit.session.session_id) is None else None
