"""Events as they appear: one reader of the database a process, however many follow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from gemini_ft.coordinator.database import DATABASE_ERRORS, describe
from gemini_ft.coordinator.queries import Queries

__all__ = ["EventFeed"]

_log = logging.getLogger("gemini_ft.coordinator.events")
_PAGE = 500
_NUM_KEPT = 4096


class EventFeed:
    """Keeps the newest events in memory while somebody follows.

    A follower holds nothing but the id of the event that it has seen last: one that is slow, or that comes back after
    a break, reads from the database what is no longer kept here.
    """

    def __init__(self, queries: Queries, interval: timedelta) -> None:
        self._queries = queries
        self._interval_s = interval.total_seconds()
        self._kept: deque[Any] = deque(maxlen=_NUM_KEPT)
        self._newest: int | None = None
        self._num_followers = 0
        self._wanted = asyncio.Event()
        self._news = asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        """Read what is new while anybody follows, until cancelled."""
        while True:
            await self._wanted.wait()
            try:
                await self._read()
            except DATABASE_ERRORS as error:
                _log.warning("events are late, the database cannot be read: %s", describe(error))
            await asyncio.sleep(self._interval_s)

    def end(self) -> None:
        """Let all followers go."""
        self.ended = True
        self._announce()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Events are read while this context is open."""
        self._num_followers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self._num_followers -= 1
            if self._num_followers == 0:
                self._wanted.clear()
                self._kept.clear()
                self._newest = None

    async def after(self, cursor: int) -> list[Any]:
        """Return the events after the one with id `cursor`, oldest first, at most a page; none if there are none."""
        oldest = self._kept[0].id if self._kept else None
        if self._newest is not None and cursor >= self._newest:
            return []
        if oldest is None or cursor < oldest:
            return await self._queries.events(cursor, _PAGE)
        kept = list(self._kept)
        begin = bisect_right(kept, cursor, key=lambda event: int(event.id))
        return kept[begin : begin + _PAGE]

    async def wait_beyond(self, cursor: int, timeout_s: float) -> bool:
        """Wait for an event after `cursor`, or for the end; False when neither came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.ended and (self._newest is None or self._newest <= cursor):
                    await self._news.wait()
                return True
        return False

    async def _read(self) -> None:
        newest = self._newest
        if newest is None:
            newest = self._newest = await self._queries.newest_event_id()
            self._announce()
        while rows := await self._queries.events(newest, _PAGE):
            if self._newest != newest:
                return  # meanwhile everybody has gone
            self._kept.extend(rows)
            newest = self._newest = rows[-1].id
            self._announce()

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
