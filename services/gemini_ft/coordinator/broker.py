"""The connection to NATS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

import nats
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import BadRequestError, NotFoundError
from nats.protocol.parser import AUTHORIZATION_VIOLATION

from gemini_ft.contracts.errors import AuthenticationError, UnavailableError
from gemini_ft.contracts.subjects import VERDICT_STREAM, VERDICTS

__all__ = ["BROKER_ERRORS", "connect", "ensure_verdict_stream"]

BROKER_ERRORS = (nats.errors.Error, OSError, TimeoutError)
"""What a NATS server that is away or restarting may raise."""

_log = logging.getLogger("gemini_ft.coordinator.broker")
_CONNECT_TIMEOUT_S = 2
_RETRY_S = 0.1
_VERDICTS_KEPT_S = 7 * 86_400.0


async def connect(
    url: str, token: str | None, patience: timedelta, *, on_reconnect: Callable[[], Awaitable[None]]
) -> Client:
    """Return a connection that comes back by itself whenever the server does.

    Raises:
        AuthenticationError: the server refuses the token.
        UnavailableError: no server answers within `patience`.
    """
    deadline = asyncio.get_running_loop().time() + patience.total_seconds()
    while True:
        try:
            # With reconnection allowed the client would hide a refused token behind endless attempts.
            probe = await nats.connect(
                url, token=token, allow_reconnect=False, connect_timeout=_CONNECT_TIMEOUT_S, error_cb=_log_error
            )
            await probe.close()
            return await nats.connect(
                url,
                token=token,
                name="gemini-ft coordinator",
                connect_timeout=_CONNECT_TIMEOUT_S,
                reconnect_time_wait=_RETRY_S,
                max_reconnect_attempts=-1,
                ping_interval=5,
                error_cb=_log_error,
                reconnected_cb=on_reconnect,
            )
        except BROKER_ERRORS as error:
            if AUTHORIZATION_VIOLATION in str(error).lower():  # the client has no type for it here
                raise AuthenticationError(
                    f"NATS at {url} refuses the coordinator's token; check --nats-token-file", url=url
                ) from error
            if asyncio.get_running_loop().time() > deadline:
                raise UnavailableError(f"NATS at {url} cannot be reached: {error}; check --nats", url=url) from error
        await asyncio.sleep(_RETRY_S)


async def ensure_verdict_stream(client: Client) -> None:
    """See that the stream of verdicts exists; whoever comes first makes it."""
    jetstream = client.jetstream()
    try:
        await jetstream.stream_info(VERDICT_STREAM)
    except NotFoundError:
        try:
            await jetstream.add_stream(StreamConfig(name=VERDICT_STREAM, subjects=[VERDICTS], max_age=_VERDICTS_KEPT_S))
        except BadRequestError:
            # Somebody was faster, with other limits: what matters is that the stream is there.
            await jetstream.stream_info(VERDICT_STREAM)


async def _log_error(error: Exception) -> None:
    _log.warning("NATS client: %s", error)
