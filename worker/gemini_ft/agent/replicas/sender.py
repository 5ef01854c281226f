"""Sending one version over a connection, chunk by chunk as they are staged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from gemini_ft.agent.replicas.connection import Connection
from gemini_ft.agent.replicas.counts import ReplicaCounts
from gemini_ft.agent.replicas.versions import OutgoingVersion
from gemini_ft.faults import fault_point

__all__ = ["send_version"]


async def send_version(
    connection: Connection,
    version: OutgoingVersion,
    generation: int,
    counts: ReplicaCounts,
    stop: asyncio.Future[Any] | None = None,
) -> bool:
    """Send Begin, every chunk and Seal; wait for chunks that are not staged yet.

    Args:
        stop: when it is done, for instance because the receiver has refused, nothing more is sent.

    Returns False if the version was stopped or abandoned before the seal was sent.
    """
    fault_point("sender.before_begin")
    await connection.send(version.begin_message(generation))
    fault_point("sender.after_begin")
    for index in range(version.header.num_chunks):
        if not await _ready(version, partial(_is_staged, version, index), stop):
            return False
        fault_point("sender.before_chunk")
        message, chunk = version.chunk_message(generation, index)
        await connection.send(message, chunk)
        counts.sent_bytes += len(chunk)
        # A socket that always has room would keep every other task of the agent waiting.
        await asyncio.sleep(0)
    if not await _ready(version, partial(_is_sealed, version), stop):
        return False
    fault_point("sender.before_seal")
    await connection.send(*version.seal_message(generation))
    fault_point("sender.after_seal")
    return True


async def _ready(version: OutgoingVersion, condition: Callable[[], bool], stop: asyncio.Future[Any] | None) -> bool:
    """Wait until `condition` holds; False if the version is abandoned or stopped first."""
    while not version.abandoned and (stop is None or not stop.done()):
        change = version.changes.next
        if condition():
            return True
        waiter = asyncio.ensure_future(change.wait())
        try:
            await asyncio.wait({waiter} if stop is None else {waiter, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
    return False


def _is_staged(version: OutgoingVersion, index: int) -> bool:
    return version.num_staged > index


def _is_sealed(version: OutgoingVersion) -> bool:
    return version.sealed is not None
