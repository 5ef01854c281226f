"""The connection to NATS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import nats
from nats.aio.client import Client
from nats.js.api import KeyValueConfig, StreamConfig
from nats.js.errors import BadRequestError, BucketNotFoundError, NotFoundError
from nats.protocol.parser import AUTHORIZATION_VIOLATION

from gemini_ft.contracts.errors import AuthenticationError, UnavailableError
from gemini_ft.contracts.subjects import IMPORTS_BUCKET, VERDICT_STREAM, VERDICTS

__all__ = ["BROKER_ERRORS", "connect", "ensure_imports_bucket", "ensure_verdict_stream"]

BROKER_ERRORS = (nats.errors.Error, OSError, TimeoutError)
"""What a NATS server that is away or restarting may raise."""

_log = logging.getLogger("gemini_ft.coordinator.broker")
_CONNECT_TIMEOUT_S = 2
_CLOSE_TIMEOUT_S = 2.0
_RETRY_S = 0.1
_PING_S = 1
"""A server that vanished without a word is noticed after three of these."""
_VERDICTS_KEPT_S = _IMPORTS_KEPT_S = 7 * 86_400.0
_MAX_IMPORTS_BYTES = 64 << 20


async def connect(
    url: str, options: dict[str, Any], patience: timedelta, *, on_reconnect: Callable[[], Awaitable[None]]
) -> Client:
    """Return a connection that comes back by itself whenever the server does.

    Args:
        options: of `NatsAccess`.

    Raises:
        AuthenticationError: the server refuses the credentials, or its certificate is refused.
        UnavailableError: no server answers within `patience`.
    """
    deadline = asyncio.get_running_loop().time() + patience.total_seconds()
    while True:
        try:
            await _probe(url, options)
            return await nats.connect(
                url,
                **options,
                name="gemini-ft coordinator",
                connect_timeout=_CONNECT_TIMEOUT_S,
                reconnect_time_wait=_RETRY_S,
                max_reconnect_attempts=-1,
                ping_interval=_PING_S,
                error_cb=_log_error,
                reconnected_cb=on_reconnect,
            )
        except ssl.SSLCertVerificationError as error:
            raise AuthenticationError(
                f"the certificate of NATS at {url} is not accepted: {error.verify_message}; check --nats-ca-file",
                url=url,
            ) from error
        except BROKER_ERRORS as error:
            if AUTHORIZATION_VIOLATION in str(error).lower():  # the client has no type for it here
                raise AuthenticationError(
                    f"NATS at {url} refuses the coordinator; check its credentials or token file", url=url
                ) from error
            if asyncio.get_running_loop().time() > deadline:
                raise UnavailableError(f"NATS at {url} cannot be reached: {error}; check --nats", url=url) from error
        await asyncio.sleep(_RETRY_S)


async def _probe(url: str, options: dict[str, Any]) -> None:
    # With reconnection allowed the client would hide a refusal behind endless attempts.
    client = Client()
    try:
        await client.connect(
            url, **options, allow_reconnect=False, connect_timeout=_CONNECT_TIMEOUT_S, error_cb=_log_error
        )
    finally:
        # After a handshake that has failed it would never return.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await client.close()


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


async def ensure_imports_bucket(client: Client) -> None:
    """See that the bucket exists in which agents keep learned imports; they themselves may not make it."""
    jetstream = client.jetstream()
    try:
        await jetstream.key_value(IMPORTS_BUCKET)
    except BucketNotFoundError:
        await jetstream.create_key_value(
            KeyValueConfig(bucket=IMPORTS_BUCKET, history=1, ttl=_IMPORTS_KEPT_S, max_bytes=_MAX_IMPORTS_BYTES)
        )


async def _log_error(error: Exception) -> None:
    _log.warning("NATS client: %s", error)
