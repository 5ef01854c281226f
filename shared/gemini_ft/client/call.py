"""Requests and how their answers are read, as data: what the plain and the async client have in common."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from gemini_ft.client.problems import error_of
from gemini_ft.contracts.api import Page
from gemini_ft.contracts.errors import ConfigurationError, GeminiError, ProtocolError, UnavailableError

__all__ = ["Call", "ListCall", "Patience", "Reply", "StreamCall", "authorization", "base_url", "new_key", "query"]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0

T = TypeVar("T")
Query = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether the request was granted."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `repeatable`: it may reach the API twice, and its effect is that of once."""

    method: str
    path: str
    parse: Callable[[Reply], T]
    query: Query = ()
    body: BaseModel | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True

    def read(self, reply: Reply) -> T:
        """Return what the answer says.

        Raises:
            GeminiError: the request was refused, with the error that the problem document stands for.
            ProtocolError: the answer cannot be understood.
        """
        request = f"{self.method} {self.path}"
        if not reply.is_success:
            raise error_of(request, reply.status, reply.headers, reply.content)
        try:
            return self.parse(reply)
        except ValidationError as error:
            raise unintelligible(request, error) from error

    def may_be_sent_again(self, error: GeminiError) -> bool:
        """Whether it can do no harm to send the request once more after `error`."""
        return isinstance(error, UnavailableError) and (self.repeatable or not error.facts.get("was_sent", True))


@dataclass(frozen=True, slots=True)
class ListCall(Generic[T]):
    """A list that comes in pages: the request for the page at a cursor."""

    page: Callable[[str | None], Call[Page[T]]]


@dataclass(frozen=True, slots=True)
class StreamCall(Generic[T]):
    """A stream of server-sent events, those after `last_event_id`, for which `begin` asks if it has to be found out.

    `is_over` is asked when the stream has ended in good order, as it does too when a coordinator is stopped; none: it
    is never over.
    """

    path: str
    parse: Callable[[str], T]
    query: Query = ()
    last_event_id: str = ""
    begin: Call[str] | None = None
    is_over: Call[bool] | None = None

    def headers(self, last_event_id: str) -> dict[str, str]:
        """Of the request that goes on after the event with that id."""
        accept = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        return accept | ({"Last-Event-ID": last_event_id} if last_event_id else {})

    def read(self, data: str) -> T:
        """Return what an event says; raises ProtocolError if it cannot be understood."""
        try:
            return self.parse(data)
        except ValidationError as error:
            raise unintelligible(f"GET {self.path}", error) from error


def unintelligible(request: str, error: ValidationError) -> ProtocolError:
    """Return the error about an answer that is not of the API."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the whole"
    return ProtocolError(
        f"the answer to {request} cannot be understood: {where}: {first['msg']}; is it a coordinator's?"
    )


class Patience:
    """How long to go on trying: pauses grow until nothing was heard for `limit`."""

    def __init__(self, limit: timedelta, clock: Callable[[], float]) -> None:
        self._limit_s = limit.total_seconds()
        self._clock = clock
        self._failed_at: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def heard(self) -> None:
        """The other side has said something: patience is new."""
        self._failed_at = None
        self._pause_s = _FIRST_PAUSE_S

    def pause_s(self, error: GeminiError) -> float:
        """Return how long to wait after `error` before the next attempt; raises `error` when patience is at its end."""
        now = self._clock()
        if self._failed_at is None:
            self._failed_at = now
        pause_s = max(self._pause_s, float(error.facts.get("retry_after_s") or 0))
        if now + pause_s - self._failed_at > self._limit_s:
            raise error
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


def base_url(url: str) -> str:
    """Return a coordinator's URL without what people may have put behind it (`/`, `/v1`); raises ConfigurationError."""
    scheme, separator, rest = url.strip().partition("://")
    if scheme not in ("http", "https") or not separator or not rest or rest.startswith("/"):
        raise ConfigurationError(f"{url!r} is not a coordinator's URL; give for instance http://127.0.0.1:8080")
    return f"{scheme}://{rest.rstrip('/').removesuffix('/v1')}"


def authorization(token: str) -> dict[str, str]:
    """Return the header that presents `token`; raises ConfigurationError if it can be none."""
    secret = token.strip()
    if not secret or not all("!" <= character <= "~" for character in secret):
        raise ConfigurationError("the API token is empty or has characters that no token has; check its file")
    return {"Authorization": f"Bearer {secret}"}


def new_key() -> str:
    """Return an idempotency key that was never used."""
    return secrets.token_urlsafe(18)


def query(**values: object) -> Query:
    """Return query parameters; None is left out, and what is many is repeated."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if value is None:
            continue
        many: Iterable[object] = value if isinstance(value, (list, tuple)) else (value,)
        pairs += [(name, str(one).lower() if isinstance(one, bool) else str(one)) for one in many]
    return tuple(pairs)
