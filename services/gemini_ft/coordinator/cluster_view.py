"""One reading of the database that the leader's loop and all readers of this process share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from gemini_ft.coordinator.database import DATABASE_ERRORS
from gemini_ft.coordinator.state import Cluster

__all__ = ["ClusterView"]

_MAX_ATTEMPTS = 3


class ClusterView:
    """Reads the cluster at most once a `max_age`, however many ask."""

    def __init__(self, load: Callable[[], Awaitable[Cluster]], clock: Callable[[], float], max_age: timedelta) -> None:
        self._load = load
        self._clock = clock
        self._max_age_s = max_age.total_seconds()
        self._loading = asyncio.Lock()
        self._wanted = asyncio.Event()
        self.newest: Cluster | None = None
        """The newest reading, however old."""
        self._read_at = 0.0
        self._num_changes = 0
        self._num_shown_changes = 0
        self._num_read_changes = -1

    async def run(self) -> None:
        """Read anew when readers would soon have to wait for it, until cancelled."""
        while True:
            await self._wanted.wait()
            try:
                await self.current()
            except DATABASE_ERRORS:
                await asyncio.sleep(self._max_age_s)  # whoever needs it will see the error
            self._wanted.clear()

    def invalidate(self, *, for_readers: bool = True) -> None:
        """The database has changed: `current` reads it anew, and `recent` too unless the change is not one that anybody
        waits for.
        """
        self._num_changes += 1
        if for_readers:
            self._num_shown_changes = self._num_changes

    async def current(self) -> Cluster:
        """Return a reading that is not older than `max_age` and the last `invalidate`, for decisions."""
        async with self._loading:
            for _ in range(_MAX_ATTEMPTS):
                if (
                    self.newest is not None
                    and self._num_read_changes == self._num_changes
                    and self._age_s <= self._max_age_s
                ):
                    break
                num_changes, read_at = self._num_changes, self._clock()
                self.newest = await self._load()
                self._num_read_changes, self._read_at = num_changes, read_at
            # Or changes come faster than they can be read: even so this reading is newer than the call.
            assert self.newest is not None
            return self.newest

    async def recent(self) -> Cluster:
        """Return a reading for people: at once if there is one that is not older than twice `max_age` and than the last
        change that they wait for.
        """
        is_shown = self._num_read_changes >= self._num_shown_changes
        if self.newest is None or not is_shown or self._age_s > 2 * self._max_age_s:
            return await self.current()
        if self._age_s > self._max_age_s:
            self._wanted.set()
        return self.newest

    @property
    def _age_s(self) -> float:
        return self._clock() - self._read_at
