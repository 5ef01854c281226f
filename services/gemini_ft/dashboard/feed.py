"""One reading of the API for all pages that show it to the same token: events as they come, the rest by polling."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from gemini_ft.client.api_client import AsyncApiClient
from gemini_ft.contracts.errors import AuthenticationError, GeminiError
from gemini_ft.contracts.ids import JobId
from gemini_ft.dashboard.feed_state import FeedState

__all__ = ["Feed", "Feeds", "collect"]

_log = logging.getLogger("gemini_ft.dashboard.feed")
_POLL_S = 1.0
_RETRY_S = 0.5
_LEAST_PAUSE_S = 0.2
_NUM_EARLIER_EVENTS = 500
_NUM_JOBS = 200
_MOST_EVENTS_OF_A_JOB = 5000
_FORGOTTEN_AFTER_S = 60.0

T = TypeVar("T")


async def collect(items: AsyncGenerator[T], most: int) -> list[T]:
    """Return the first `most` items of a list that comes in pages."""
    found: list[T] = []
    async with contextlib.aclosing(items):
        async for item in items:
            found.append(item)
            if len(found) >= most:
                break
    return found


class Feed:
    """Keeps `state` up to date while anybody looks: an event is there as soon as the API tells it, and everything else
    is read again at once after an event, else once a second (more rarely where a reading takes long).
    """

    def __init__(self, api: AsyncApiClient, clock: Callable[[], float] = time.monotonic) -> None:
        self.api = api
        self.state = FeedState()
        self._clock = clock
        self._looked_at_s = clock()
        self._news = asyncio.Event()
        self._learning: dict[JobId, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Say that somebody looks. A feed that nobody looks at for a minute ends."""
        self._looked_at_s = self._clock()

    def hurry(self) -> None:
        """Read everything again now, since something was changed."""
        self._news.set()

    async def run(self) -> None:
        """Read until nobody looks any more, or the token is refused."""
        following = asyncio.ensure_future(self._follow())
        try:
            while self._clock() - self._looked_at_s < _FORGOTTEN_AFTER_S and not self.state.refusal:
                begun_at_s = self._clock()
                pause_s = _POLL_S if await self._read() else _RETRY_S
                took_s = self._clock() - begun_at_s
                await asyncio.sleep(max(_LEAST_PAUSE_S, took_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(pause_s, 4 * took_s)):
                        await self._news.wait()
                self._news.clear()
                if following.done():
                    following.result()
        finally:
            for task in (following, *self._learning.values()):
                task.cancel()
            await asyncio.gather(following, *self._learning.values(), return_exceptions=True)
            await self.api.close()

    def learn(self, job_id: JobId) -> None:
        """See that the events of a job are read from its beginning."""
        task = self._learning.get(job_id)
        if self.state.events_of(job_id) is None and (task is None or task.done()):
            self._learning[job_id] = asyncio.ensure_future(self._learn(job_id))

    async def _read(self) -> bool:
        try:
            cluster = await self.api.cluster()
            jobs = await collect(self.api.jobs(page_size=_NUM_JOBS), _NUM_JOBS)
            nodes = [node async for node in self.api.nodes(page_size=1000)]
        except AuthenticationError as error:
            self.state.refuse(error)
        except GeminiError as error:
            self.state.fail(error)
        else:
            self.state.renew(cluster, nodes, jobs, self._clock())
            return True
        return False

    async def _follow(self) -> None:
        while True:
            try:
                newest = self.state.newest_event_id or (await self.api.cluster()).newest_event_id - _NUM_EARLIER_EVENTS
                async with contextlib.aclosing(self.api.follow_events(after=max(0, newest))) as events:
                    async for event in events:
                        self.state.happen(event)
                        self._news.set()
            except GeminiError as error:
                # What is wrong is told by the readings, which meet it too.
                _log.info("events are not heard: %s", error)
            await asyncio.sleep(_RETRY_S)

    async def _learn(self, job_id: JobId) -> None:
        try:
            events = await collect(self.api.events(job_id=job_id, page_size=1000), _MOST_EVENTS_OF_A_JOB)
        except GeminiError as error:
            _log.info("the events of %s are not known: %s", job_id, error)
        else:
            self.state.learn(job_id, events)


class Feeds:
    """One feed a token."""

    def __init__(self, connect: Callable[[str], AsyncApiClient]) -> None:
        """`connect` returns a client of the API that presents a token."""
        self._connect = connect
        self._running: dict[str, tuple[Feed, asyncio.Task[None]]] = {}

    def of(self, token: str) -> Feed:
        """Return the feed of a token, and look at it; one that has ended begins anew unless the token was refused."""
        key = _key(token)
        if key in self._running and self._running[key][1].done():
            feed, task = self._running[key]
            if feed.state.refusal:
                return feed
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a feed has ended: %s", error, exc_info=error)
            del self._running[key]
        if key not in self._running:
            feed = Feed(self._connect(token))
            self._running[key] = (feed, asyncio.ensure_future(feed.run()))
        feed = self._running[key][0]
        feed.look()
        return feed

    def is_refused(self, token: str) -> bool:
        """Whether the API did not take the token the last time."""
        known = self._running.get(_key(token))
        return known is not None and bool(known[0].state.refusal)

    def forget_refusal(self, token: str) -> None:
        """Let the next look at the feed of a token ask the API again."""
        if self.is_refused(token):
            self._running.pop(_key(token))[1].cancel()

    async def close(self) -> None:
        """End all feeds."""
        for _, task in self._running.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._running.values()), return_exceptions=True)
        self._running.clear()


def _key(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
