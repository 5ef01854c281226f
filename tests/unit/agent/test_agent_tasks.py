"""Parked requests, and tasks that end together."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from gemini_ft.agent.parking import Parking
from gemini_ft.agent.tasks import end_tasks, first_to_end
from gemini_ft.contracts.errors import FencedError

LONG = timedelta(seconds=30)


async def swallows(num_cancellations: int) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            num_cancellations -= 1
            if num_cancellations < 0:
                raise


async def test_a_task_that_swallows_a_cancellation_is_ended_all_the_same() -> None:
    task = asyncio.create_task(swallows(1))
    await asyncio.sleep(0)
    await end_tasks([task])
    assert task.cancelled()


async def test_the_first_to_fail_ends_the_others_and_is_raised() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("other")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise FencedError("old")

    with pytest.raises(FencedError):
        await first_to_end(wait(), fail())
    assert ended == ["other"]


async def test_a_parked_request_is_answered_by_the_change_that_it_waits_for() -> None:
    parking, state = Parking(), [None]
    waiting = asyncio.create_task(parking.wait_for(lambda: state[0], LONG))
    await asyncio.sleep(0)
    parking.notify()
    await asyncio.sleep(0)
    assert not waiting.done()
    state[0] = 7
    parking.notify()
    assert await waiting == 7
    assert await parking.wait_for(lambda: None, timedelta()) is None


async def test_work_is_given_up_when_its_condition_fails() -> None:
    parking, is_old = Parking(), False
    given_up = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    def check() -> None:
        if is_old:
            raise FencedError("old")

    running = asyncio.create_task(parking.run_while(check, work()))
    await asyncio.sleep(0)
    parking.notify()
    await asyncio.sleep(0)
    assert not running.done()
    is_old = True
    parking.notify()
    with pytest.raises(FencedError):
        await running
    await given_up.wait()


async def test_work_that_ends_gives_its_result() -> None:
    async def work() -> int:
        return 3

    assert await Parking().run_while(lambda: None, work()) == 3
