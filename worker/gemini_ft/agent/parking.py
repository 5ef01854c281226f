"""Requests that wait until the node's state lets them be answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

__all__ = ["Parking"]

T = TypeVar("T")


class Parking:
    """Wakes whoever waits for a state whenever `notify` says that the state has changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """The state has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for(self, look: Callable[[], T | None], limit: timedelta) -> T | None:
        """Return the first result of `look` that is not None, or None after `limit`; what it raises passes through."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit.total_seconds()
        while True:
            changed = self._changed
            if (found := look()) is not None:
                return found
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return None

    async def run_while(self, check: Callable[[], object], work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, but give it up as soon as `check` raises, and raise that."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    check()
                    await asyncio.wait((task, changed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if task.done():
                    return task.result()
        finally:
            task.cancel()
