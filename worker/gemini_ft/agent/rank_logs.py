"""Pieces of the ranks' output for people who ask the coordinator: `<log_dir>/<job>/generation-<g>/rank-<r>.log`.

Whoever can write there is the user whose job it is, so a link or anything else than a plain file is not followed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import ValidationError

from gemini_ft.contracts.errors import GeminiError, NotFoundError, ProtocolError, UnavailableError
from gemini_ft.contracts.messages import LogPiece, LogRefused, LogReply, ReadLog
from gemini_ft.contracts.subjects import log_subject

__all__ = ["answer_log_requests", "read_log"]

_GENERATION = re.compile(r"generation-([1-9][0-9]{0,18})")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe must not wait for somebody to write to it.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
_MAX_WAITING = 64

logger = logging.getLogger(__name__)


async def answer_log_requests(connection: Client, node_id: str, log_dir: Path) -> None:
    """Answer on this connection from now on, one request after the other; returns at once."""

    async def answer(message: Msg) -> None:
        reply = await _reply(log_dir, message.data)
        try:
            await message.respond(reply.model_dump_json().encode())
        except (OSError, nats.errors.Error) as error:
            logger.info("nobody can be told what a log says: %s", error)

    await connection.subscribe(log_subject(node_id), cb=answer, pending_msgs_limit=_MAX_WAITING)


async def _reply(log_dir: Path, data: bytes) -> LogReply:
    try:
        request = ReadLog.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        refusal = ProtocolError(f"a request for a log is malformed: {where}: {first['msg']}")
        return LogRefused(error=refusal.to_wire())
    try:
        return await asyncio.to_thread(read_log, log_dir, request)
    except GeminiError as known:
        return LogRefused(error=known.to_wire())


def read_log(log_dir: Path, request: ReadLog) -> LogPiece:
    """Return the piece that is asked for, never more than `max_bytes`, however long a line is. Blocks on the disk.

    Raises:
        NotFoundError: there is no such log on this node.
        UnavailableError: it cannot be read.
    """
    with ExitStack() as opened:
        try:
            generation, log = _open(log_dir, request, opened)
            size = os.fstat(log).st_size
            if request.offset is not None:
                offset = min(request.offset, size)
                data = os.pread(log, request.max_bytes, offset)
            else:
                offset = max(0, size - request.max_bytes)
                data = os.pread(log, size - offset, offset)
                start = _start_of_tail(data, request.tail_lines)
                offset, data = offset + start, data[start:]
        except OSError as error:
            raise UnavailableError(f"{_name(request)} cannot be read: {error.strerror}") from error
    next_offset = offset + len(data)
    return LogPiece(
        generation=generation, offset=offset, next_offset=next_offset, data=data, is_end=next_offset >= size
    )


def _open(log_dir: Path, request: ReadLog, opened: ExitStack) -> tuple[int, int]:
    """Return the generation and the file, opened folder by folder below `log_dir`."""
    job = _open_at(str(log_dir / request.job_id), _FOLDER, None, opened)
    if job is not None:
        wanted = _generations(job) if request.generation is None else (request.generation,)
        for generation in wanted:
            folder = _open_at(f"generation-{generation}", _FOLDER, job, opened)
            log = None if folder is None else _open_at(f"rank-{request.rank}.log", _FILE, folder, opened)
            if log is not None and stat.S_ISREG(os.fstat(log).st_mode):
                return generation, log
    raise NotFoundError(f"{_name(request)} is not on this node; a rank has its log where it ran")


def _open_at(name: str, flags: int, folder: int | None, opened: ExitStack) -> int | None:
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
    opened.callback(os.close, descriptor)
    return descriptor


def _generations(job: int) -> Iterable[int]:
    """Return the generations that have a folder, the newest first."""
    found = (_GENERATION.fullmatch(name) for name in os.listdir(job))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _start_of_tail(data: bytes, num_lines: int) -> int:
    """Return where the last lines begin; a last line without an end counts."""
    if num_lines == 0:
        return len(data)
    start = len(data) - data.endswith(b"\n")
    for _ in range(num_lines):
        start = data.rfind(b"\n", 0, start)
        if start < 0:
            break
    return start + 1


def _name(request: ReadLog) -> str:
    generation = "any generation" if request.generation is None else f"generation {request.generation}"
    return f"the log of rank {request.rank} in {generation} of {request.job_id}"
