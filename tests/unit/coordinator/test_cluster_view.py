"""One reading of the database for everybody, no older than promised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from gemini_ft.coordinator.cluster_view import ClusterView
from gemini_ft.coordinator.state import Cluster


class Database:
    """Counts readings; one takes until it is let go."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_readings = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.during: Callable[[], None] | None = None
        self.view = ClusterView(self._load, lambda: self.now, timedelta(seconds=1))

    async def _load(self) -> Cluster:
        self.num_readings += 1
        await self.is_open.wait()
        if self.during is not None:
            self.during()
        return Cluster({}, {})


async def test_all_who_ask_at_once_share_one_reading() -> None:
    database = Database()
    readings = await asyncio.gather(*(database.view.current() for _ in range(10)), database.view.recent())
    assert database.num_readings == 1
    assert len({id(reading) for reading in readings}) == 1


async def test_a_decision_is_made_from_what_is_at_most_a_tick_old() -> None:
    database = Database()
    first = await database.view.current()
    database.now = 1.0
    assert await database.view.current() is first
    database.now = 1.1
    assert await database.view.current() is not first
    database.view.invalidate(for_readers=False)
    await database.view.current()
    assert database.num_readings == 3


async def test_readers_do_not_wait_for_what_is_only_a_little_old() -> None:
    database = Database()
    first = await database.view.current()
    refreshing = asyncio.create_task(database.view.run())
    database.is_open.clear()
    database.now = 1.5
    assert await database.view.recent() is first
    await asyncio.sleep(0)
    assert database.num_readings == 2, "it is read anew meanwhile"
    database.is_open.set()
    database.now = 2.1
    assert await database.view.recent() is not first
    refreshing.cancel()


async def test_readers_see_their_own_changes_but_need_not_see_the_leaders_at_once() -> None:
    database = Database()
    first = await database.view.current()
    database.view.invalidate(for_readers=False)
    assert await database.view.recent() is first
    database.view.invalidate()
    assert await database.view.recent() is not first


async def test_what_was_read_before_a_change_is_not_shown_after_it() -> None:
    database = Database()

    def change_once() -> None:
        database.during = None
        database.view.invalidate()

    database.during = change_once
    await database.view.current()
    assert database.num_readings == 2


async def test_changes_without_end_do_not_hold_up_a_reading() -> None:
    database = Database()
    database.during = database.view.invalidate
    await database.view.current()
    assert database.num_readings == 3


async def test_a_reader_who_leaves_takes_nobody_along() -> None:
    database = Database()
    database.is_open.clear()
    one, other = (asyncio.create_task(database.view.current()) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    database.is_open.set()
    await asyncio.wait((one, other))
    assert one.cancelled()
    assert other.result() is database.view.newest
