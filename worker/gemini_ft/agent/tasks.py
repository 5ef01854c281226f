"""Running and ending tasks together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

__all__ = ["end_tasks", "first_to_end"]

_CANCEL_AGAIN_S = 0.2


async def first_to_end(*works: Coroutine[Any, Any, object]) -> None:
    """Run all until one ends or fails, end the others, and raise what it raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(tasks)
    for task in done:
        task.result()


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is left in them."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        # Before Python 3.12 `asyncio.wait_for`, which libraries use, now and then swallows a cancellation.
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
