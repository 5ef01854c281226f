"""The plain and the async client over httpx."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import httpx

from gemini_ft.client.call import Call, ListCall, Patience, Reply, StreamCall, authorization, base_url
from gemini_ft.client.operations import AsyncSender, Operations, Sender
from gemini_ft.client.problems import error_of
from gemini_ft.client.sse import EventDecoder
from gemini_ft.contracts.errors import GeminiError, TooManyStreamsError, UnavailableError

__all__ = ["PATIENCE", "STREAM_PATIENCE", "ApiClient", "AsyncApiClient"]

PATIENCE = timedelta(seconds=3)
"""How long a request is repeated that could not be delivered, or met a coordinator that cannot serve now."""
STREAM_PATIENCE = timedelta(seconds=60)
"""How long a stream of which nothing is heard is opened again."""

_TIMEOUT_S = 5.0
_STREAM_TIMEOUT = httpx.Timeout(_TIMEOUT_S, read=45.0)
"""A coordinator that has nothing to say sends a comment every 15 s."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

T = TypeVar("T")


class ApiClient(Operations, Sender):
    """Use it as a context, or close it.

    Refusals become errors of the tree; UnavailableError means that the API could not be used as long as patience
    lasted. A change is repeated only where that cannot do it twice.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience: timedelta = PATIENCE,
        stream_patience: timedelta = STREAM_PATIENCE,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`token` is the secret itself; raises ConfigurationError if it or `url` can be none."""
        self.url = base_url(url)
        self._patience = patience
        self._stream_patience = stream_patience
        self._http = httpx.Client(
            base_url=self.url, headers=authorization(token), timeout=_TIMEOUT_S, transport=transport
        )

    def send(self, call: Call[T]) -> T:
        patience = Patience(self._patience, time.monotonic)
        while True:
            try:
                return call.read(self._exchange(call))
            except GeminiError as error:
                if not call.may_be_sent_again(error):
                    raise
                pause_s = patience.pause_s(error)
            time.sleep(pause_s)

    def iterate(self, call: ListCall[T]) -> Generator[T, None, None]:
        page = self.send(call.page(None))
        yield from page.items
        while page.next_cursor is not None:
            page = self.send(call.page(page.next_cursor))
            yield from page.items

    def follow(self, call: StreamCall[T]) -> Generator[T, None, None]:
        last_id = self.send(call.begin) if call.begin is not None else call.last_event_id
        patience = Patience(self._stream_patience, time.monotonic)
        while True:
            error: GeminiError = _ended(self.url)
            try:
                with self._http.stream(**_stream_request(call, last_id)) as response:
                    if not response.is_success:
                        response.read()
                        raise _refusal(call, response)
                    decoder = EventDecoder(last_id)
                    for piece in response.iter_bytes():
                        patience.heard()
                        for event in decoder.feed(piece):
                            last_id = event.id
                            yield call.read(event.data)
                if call.is_over is not None and self.send(call.is_over):
                    return
            except httpx.TransportError as failure:
                error = _unreachable(self.url, failure)
            except (TooManyStreamsError, UnavailableError) as failure:
                error = failure
            time.sleep(patience.pause_s(error))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, call: Call[Any]) -> Reply:
        try:
            return _reply(self._http.request(**_request(call)))
        except httpx.TransportError as error:
            raise _unreachable(self.url, error) from error


class AsyncApiClient(Operations, AsyncSender):
    """As `ApiClient`, for one event loop."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience: timedelta = PATIENCE,
        stream_patience: timedelta = STREAM_PATIENCE,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """As for `ApiClient`."""
        self.url = base_url(url)
        self._patience = patience
        self._stream_patience = stream_patience
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=authorization(token), timeout=_TIMEOUT_S, transport=transport
        )

    async def send(self, call: Call[T]) -> T:
        patience = Patience(self._patience, time.monotonic)
        while True:
            try:
                return call.read(await self._exchange(call))
            except GeminiError as error:
                if not call.may_be_sent_again(error):
                    raise
                pause_s = patience.pause_s(error)
            await asyncio.sleep(pause_s)

    async def iterate(self, call: ListCall[T]) -> AsyncGenerator[T, None]:
        cursor: str | None = None
        while True:
            page = await self.send(call.page(cursor))
            for item in page.items:
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return

    async def follow(self, call: StreamCall[T]) -> AsyncGenerator[T, None]:
        last_id = await self.send(call.begin) if call.begin is not None else call.last_event_id
        patience = Patience(self._stream_patience, time.monotonic)
        while True:
            error: GeminiError = _ended(self.url)
            try:
                async with self._http.stream(**_stream_request(call, last_id)) as response:
                    if not response.is_success:
                        await response.aread()
                        raise _refusal(call, response)
                    decoder = EventDecoder(last_id)
                    async for piece in response.aiter_bytes():
                        patience.heard()
                        for event in decoder.feed(piece):
                            last_id = event.id
                            yield call.read(event.data)
                if call.is_over is not None and await self.send(call.is_over):
                    return
            except httpx.TransportError as failure:
                error = _unreachable(self.url, failure)
            except (TooManyStreamsError, UnavailableError) as failure:
                error = failure
            await asyncio.sleep(patience.pause_s(error))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncApiClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _exchange(self, call: Call[Any]) -> Reply:
        try:
            return _reply(await self._http.request(**_request(call)))
        except httpx.TransportError as error:
            raise _unreachable(self.url, error) from error


def _request(call: Call[Any]) -> dict[str, Any]:
    headers, content = dict(call.headers), None
    if call.body is not None:
        headers["Content-Type"] = "application/json"
        # What was not set is left to the coordinator, which may be older and not know it.
        content = call.body.model_dump_json(exclude_unset=True)
    return {"method": call.method, "url": call.path, "params": call.query, "headers": headers, "content": content}


def _stream_request(call: StreamCall[Any], last_id: str) -> dict[str, Any]:
    return {
        "method": "GET",
        "url": call.path,
        "params": call.query,
        "headers": call.headers(last_id),
        "timeout": _STREAM_TIMEOUT,
    }


def _refusal(call: StreamCall[Any], response: httpx.Response) -> GeminiError:
    return error_of(f"GET {call.path}", response.status_code, response.headers, response.content)


def _reply(response: httpx.Response) -> Reply:
    return Reply(response.status_code, response.headers, response.content)


def _unreachable(url: str, error: httpx.TransportError) -> UnavailableError:
    why = str(error) or type(error).__name__
    was_sent = not isinstance(error, _NEVER_SENT)
    return UnavailableError(f"the API at {url} cannot be reached: {why}", url=url, was_sent=was_sent)


def _ended(url: str) -> UnavailableError:
    return UnavailableError(f"the API at {url} has ended the stream", url=url)
