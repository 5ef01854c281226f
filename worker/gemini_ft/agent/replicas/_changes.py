"""Waking those who wait for a change of state."""

from __future__ import annotations

import asyncio

__all__ = ["Changes"]


class Changes:
    """Take `next`, look at the state, then wait on it: no change in between is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Event that is set at the next change."""
        return self._event

    def notify(self) -> None:
        """Something has changed: wake everybody who waits."""
        changed, self._event = self._event, asyncio.Event()
        changed.set()
