"""Nodes of a job tell each other what its script imports, so that a standby is warm before it has run a rank.

The names lie in a key-value bucket of JetStream, one key a job: the first node that has learned them puts them there,
every other one hands them to its launcher. Losing all of it costs a slower first start, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.js.errors import Error as JetStreamError
from nats.js.errors import KeyNotFoundError

from gemini_ft.agent.launcher.learning import read_names, write_names
from gemini_ft.contracts.errors import ProtocolError
from gemini_ft.contracts.subjects import IMPORTS_BUCKET

__all__ = ["JobImports", "exchange_imports"]

_POLL_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobImports:
    """Files of a job's launcher: `learned` is what it preloads, `reported` is where more names may be left for it."""

    job_id: str
    learned: Path
    reported: Path


async def exchange_imports(connection: NatsClient, find_files: Callable[[], JobImports | None]) -> None:
    """Exchange until cancelled. What NATS refuses is tried again; nothing here ends the connection."""
    settled: str | None = None
    while True:
        files = find_files()
        if files is not None and files.job_id != settled:
            try:
                if await _exchange(connection, files):
                    settled = files.job_id
            except (OSError, ProtocolError, ValueError, nats.errors.Error, JetStreamError) as error:
                logger.debug("learned imports of job %s are not exchanged yet: %s", files.job_id, error)
        await asyncio.sleep(_POLL_S)


async def _exchange(connection: NatsClient, files: JobImports) -> bool:
    """Give or take the names; return whether there is nothing left to do."""
    mine = await asyncio.to_thread(read_names, files.learned)
    # Made by the coordinator: agents may not make streams.
    bucket = await connection.jetstream().key_value(IMPORTS_BUCKET)
    try:
        entry = await bucket.get(files.job_id)
    except KeyNotFoundError:
        if mine is not None:
            await bucket.put(files.job_id, json.dumps(mine).encode())
        return mine is not None
    if mine is None:
        names = json.loads(entry.value or b"null")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ProtocolError(f"the imports of job {files.job_id} in bucket {IMPORTS_BUCKET} are no list of names")
        if not files.reported.parent.is_dir():
            return False
        await asyncio.to_thread(write_names, files.reported, names)
        logger.info("handed %d learned imports of other nodes to the launcher of job %s", len(names), files.job_id)
    return True
