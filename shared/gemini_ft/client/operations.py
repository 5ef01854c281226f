"""The operations as methods, declared once for the plain and the async client.

`client.job(job_id)` returns a job, and with the async client an awaitable of one. Lists and streams are iterators:
`for job in client.jobs()`, `async for event in client.follow_events()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar, overload

from gemini_ft.client import calls
from gemini_ft.client.call import Call, ListCall, StreamCall

__all__ = ["AsyncSender", "Operations", "Sender"]

P = ParamSpec("P")
T = TypeVar("T")


class Sender(ABC):
    """Sends requests and waits for what comes back."""

    @abstractmethod
    def send(self, call: Call[T]) -> T:
        """Return the answer."""

    @abstractmethod
    def iterate(self, call: ListCall[T]) -> Generator[T, None, None]:
        """Yield all items of a list, page by page."""

    @abstractmethod
    def follow(self, call: StreamCall[T]) -> Generator[T, None, None]:
        """Yield what a stream brings."""


class AsyncSender(ABC):
    """As `Sender`, without blocking."""

    @abstractmethod
    async def send(self, call: Call[T]) -> T:
        """Return the answer."""

    @abstractmethod
    def iterate(self, call: ListCall[T]) -> AsyncGenerator[T, None]:
        """Yield all items of a list, page by page."""

    @abstractmethod
    def follow(self, call: StreamCall[T]) -> AsyncGenerator[T, None]:
        """Yield what a stream brings."""


class _One(Generic[P, T]):
    def __init__(self, make: Callable[P, Call[T]]) -> None:
        self.make = make

    @overload
    def __get__(self, sender: Sender, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, sender: AsyncSender, owner: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, sender: Any, owner: type) -> Any:
        return _method(self.make, sender.send)


class _Many(Generic[P, T]):
    def __init__(self, make: Callable[P, ListCall[T]]) -> None:
        self.make = make

    @overload
    def __get__(self, sender: Sender, owner: type) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(self, sender: AsyncSender, owner: type) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(self, sender: Any, owner: type) -> Any:
        return _method(self.make, sender.iterate)


class _Stream(Generic[P, T]):
    def __init__(self, make: Callable[P, StreamCall[T]]) -> None:
        self.make = make

    @overload
    def __get__(self, sender: Sender, owner: type) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(self, sender: AsyncSender, owner: type) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(self, sender: Any, owner: type) -> Any:
        return _method(self.make, sender.follow)


def _method(make: Callable[..., Any], perform: Callable[[Any], Any]) -> Callable[..., Any]:
    @wraps(make)
    def method(*args: Any, **kwargs: Any) -> Any:
        return perform(make(*args, **kwargs))

    return method


class Operations:
    """All operations; what each does is said in `calls`."""

    create_job = _One(calls.create_job)
    jobs = _Many(calls.jobs)
    job = _One(calls.job)
    job_and_etag = _One(calls.job_and_etag)
    stop_job = _One(calls.stop_job)
    resume_job = _One(calls.resume_job)
    checkpoint_job = _One(calls.checkpoint_job)
    decide_job = _One(calls.decide_job)
    delete_job = _One(calls.delete_job)

    placement = _One(calls.placement)
    versions = _Many(calls.versions)
    version = _One(calls.version)
    recoveries = _Many(calls.recoveries)
    recovery = _One(calls.recovery)
    ranks = _Many(calls.ranks)
    log = _One(calls.log)
    follow_log = _Stream(calls.follow_log)

    nodes = _Many(calls.nodes)
    node = _One(calls.node)
    node_and_etag = _One(calls.node_and_etag)
    relabel_node = _One(calls.relabel_node)
    cordon_node = _One(calls.cordon_node)
    uncordon_node = _One(calls.uncordon_node)
    drain_node = _One(calls.drain_node)
    remove_node = _One(calls.remove_node)

    events = _Many(calls.events)
    follow_events = _Stream(calls.follow_events)

    create_token = _One(calls.create_token)
    tokens = _Many(calls.tokens)
    revoke_token = _One(calls.revoke_token)

    cluster = _One(calls.cluster)
    health = _One(calls.health)
    readiness = _One(calls.readiness)
