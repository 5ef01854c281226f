"""Who is logged in. Tokens stay in this process; a browser gets nothing but the signed name of its session."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from gemini_ft.contracts.api import CallerModel, Role

__all__ = ["LIFETIME", "Session", "Sessions"]

LIFETIME = timedelta(hours=12)
"""A session that nobody uses ends after this time."""

_MOST = 1000


@dataclass(slots=True)
class Session:
    """One browser that presented a token which the API has taken. `theme` is what its pages look like."""

    session_id: str
    token: str
    caller: CallerModel
    theme: str
    used_at_s: float

    @property
    def may_change(self) -> bool:
        """Whether the token is an operator's."""
        return self.caller.role is Role.OPERATOR

    @property
    def may_change_nodes(self) -> bool:
        """Whether the token is that of an operator who is bound to no jobs."""
        return self.may_change and self.caller.job_ids is None


class Sessions:
    """All sessions of this process; the one that was used least recently makes room."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, Session] = {}

    def begin(self, token: str, caller: CallerModel, theme: str = "auto") -> Session:
        """Begin a session under a name that nobody can guess."""
        session = Session(secrets.token_urlsafe(32), token, caller, theme, self._clock())
        self._open[session.session_id] = session
        while len(self._open) > _MOST:
            del self._open[min(self._open.values(), key=lambda one: one.used_at_s).session_id]
        return session

    def use(self, session_id: str | None) -> Session | None:
        """Return a session, which counts as used now; None: there is none, or it has ended."""
        session = self._open.get(session_id or "")
        if session is None:
            return None
        now_s = self._clock()
        if now_s - session.used_at_s > LIFETIME.total_seconds():
            del self._open[session.session_id]
            return None
        session.used_at_s = now_s
        return session

    def end(self, session_id: str | None) -> None:
        """End a session; harmless when there is none."""
        self._open.pop(session_id or "", None)
