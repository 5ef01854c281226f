"""`/v1/jobs/{job_id}/ranks/{rank}/log`: what a rank has written, now or as it writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from gemini_ft.contracts.api import LogModel
from gemini_ft.contracts.errors import NotFoundError, UnavailableError
from gemini_ft.contracts.ids import JobId
from gemini_ft.contracts.messages import MAX_LOG_BYTES, ReadLog
from gemini_ft.coordinator.api.access import JobViewer
from gemini_ft.coordinator.api.answers import answer
from gemini_ft.coordinator.api.job_details import Number
from gemini_ft.coordinator.api.problems import problems
from gemini_ft.coordinator.api.reading import job_and_nodes
from gemini_ft.coordinator.api.services import Api, Services
from gemini_ft.coordinator.api.streams import EVENT_STREAM_CONTENT, PING, EventStream, sse
from gemini_ft.coordinator.database import DATABASE_ERRORS
from gemini_ft.coordinator.rank_logs import LogText

__all__ = ["router"]

router = APIRouter(tags=["jobs"])
_POLL_S = 0.5


@router.get(
    "/v1/jobs/{job_id}/ranks/{rank}/log",
    response_model=LogModel,
    responses={200: {"content": EVENT_STREAM_CONTENT}, **problems(404, 429)},
)
async def read_log(
    job_id: JobId,
    rank: Number,
    api: Api,
    principal: JobViewer,
    generation: Annotated[
        int | None,
        Query(ge=1, lt=2**63, description="none: the newest that was assigned, and with `follow` those after it"),
    ] = None,
    offset: Annotated[
        int | None, Query(ge=0, lt=2**63, description="in bytes, from the beginning; none: the last `tail_lines`")
    ] = None,
    tail_lines: Annotated[int, Query(ge=0, le=100_000)] = 100,
    max_bytes: Annotated[int, Query(ge=4, le=MAX_LOG_BYTES)] = 64 << 10,
    follow: Annotated[
        bool, Query(description="stream of such parts, as server-sent events, until the job ends")
    ] = False,
    last_event_id: Annotated[
        str | None, Header(pattern=r"^[0-9]{1,18}:[0-9]{1,18}$", description="with `follow`: go on after this part")
    ] = None,
) -> Response:
    """What a rank has written."""
    job, _ = await job_and_nodes(api.coordinator, job_id)
    question = ReadLog(
        job_id=job_id, generation=generation, rank=rank, offset=offset, tail_lines=tail_lines, max_bytes=max_bytes
    )
    if follow and last_event_id is not None:
        seen_generation, seen_offset = (int(number) for number in last_event_id.split(":"))
        question = question.model_copy(update={"generation": seen_generation, "offset": seen_offset})
    part = await api.logs.read(job_id, rank, job.spec.num_ranks_per_node, question)
    if not follow:
        return answer(_model(part))
    parts = _follow(api, job_id, rank, job.spec.num_ranks_per_node, question, part, only=generation is not None)
    return EventStream(parts, api.streams, principal)


async def _follow(
    api: Services, job_id: JobId, rank: int, num_ranks_per_node: int, question: ReadLog, part: LogText, *, only: bool
) -> AsyncGenerator[bytes]:
    """Yield the parts from `part` on, those of later generations too unless `only` this one is wanted."""
    yield PING  # the headers go out with it: the client knows that it is heard
    silent_s = 0.0
    while not api.streams.ended:
        if part.text or part.next_offset != part.offset:
            yield sse(_model(part).model_dump_json(), f"{part.generation}:{part.next_offset}")
            silent_s = 0.0
        at = {"generation": part.generation, "offset": part.next_offset}
        if part.is_end:
            newer = await _newer_generation(api, job_id, part.generation)
            if newer is None:
                return
            if newer > part.generation:
                if only:
                    return
                at = {"generation": newer, "offset": 0}
            await asyncio.sleep(_POLL_S)
            silent_s += _POLL_S
            if silent_s >= api.streams.ping_interval_s:
                yield PING
                silent_s = 0.0
        question = question.model_copy(update=at)
        try:
            part = await api.logs.read(job_id, rank, num_ranks_per_node, question)
        except (NotFoundError, UnavailableError, *DATABASE_ERRORS):
            # The node is away or the rank has not begun to write there: the same is asked again.
            part = LogText(part.node_id, question.generation or 0, question.offset or 0, question.offset or 0, "", True)


async def _newer_generation(api: Services, job_id: JobId, generation: int) -> int | None:
    """Return the newest assigned generation; None: the job has ended, and this was its last."""
    try:
        job, _ = await job_and_nodes(api.coordinator, job_id)
        newest = await api.logs.generation(job_id) or generation
    except NotFoundError:
        return None
    except DATABASE_ERRORS:
        return generation
    return None if job.phase.outcome is not None and newest <= generation else newest


def _model(part: LogText) -> LogModel:
    return LogModel(**{name: getattr(part, name) for name in LogModel.model_fields})
