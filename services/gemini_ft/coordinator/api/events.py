"""`/v1/events`: what happened, in pages or as it happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from gemini_ft.contracts.api import EventModel
from gemini_ft.contracts.ids import JobId
from gemini_ft.coordinator.api.access import Viewer
from gemini_ft.coordinator.api.answers import answer
from gemini_ft.coordinator.api.paging import Limit, Page
from gemini_ft.coordinator.api.problems import problems
from gemini_ft.coordinator.api.services import Api, Services
from gemini_ft.coordinator.api.shapes import event_model
from gemini_ft.coordinator.api.streams import EVENT_STREAM_CONTENT, PING, EventStream, sse
from gemini_ft.coordinator.database import DATABASE_ERRORS
from gemini_ft.coordinator.tokens import Principal

__all__ = ["router"]

router = APIRouter(prefix="/v1/events", tags=["events"])
_RETRY_S = 0.5
Kind = Annotated[str | None, Query(pattern=r"^[a-z][a-z_]{0,62}$", description="of this kind only")]
OfJob = Annotated[JobId | None, Query(description="of this job only")]


@router.get("", response_model=Page[EventModel])
async def list_events(
    api: Api,
    principal: Viewer,
    after: Annotated[int, Query(ge=0, lt=2**63, description="id of the last event that was seen")] = 0,
    limit: Limit = 100,
    job_id: OfJob = None,
    kind: Kind = None,
) -> Response:
    """What happened after the event with id `after`, oldest first; `next_cursor` is the next `after`."""
    rows = await api.coordinator.queries.events(after, limit + 1, job_id=job_id, kind=kind, job_ids=principal.job_ids)
    shown = rows[:limit]
    more = str(shown[-1].id) if len(rows) > limit else None
    return answer(Page(items=[event_model(row) for row in shown], next_cursor=more))


@router.get(
    "/stream",
    response_class=StreamingResponse,
    responses={200: {"content": EVENT_STREAM_CONTENT}, **problems(429)},
)
async def stream_events(
    api: Api,
    principal: Viewer,
    job_id: OfJob = None,
    kind: Kind = None,
    after: Annotated[
        int | None, Query(ge=0, lt=2**63, description="begin after the event with this id; none: with the next one")
    ] = None,
    last_event_id: Annotated[
        int | None, Header(ge=0, lt=2**63, description="goes before `after`; browsers send it when they come back")
    ] = None,
) -> Response:
    """What happens, as server-sent events: `data` is an event as in the list, `id` its id."""
    cursor = after if last_event_id is None else last_event_id
    if cursor is None:
        cursor = await api.coordinator.queries.newest_event_id()
    return EventStream(_events(api, principal, cursor, job_id, kind), api.streams, principal)


async def _events(
    api: Services, principal: Principal, cursor: int, job_id: JobId | None, kind: str | None
) -> AsyncGenerator[bytes]:
    feed, streams = api.coordinator.feed, api.streams
    yield PING  # the headers go out with it: the client knows that it is heard
    with feed.following():
        while not streams.ended:
            try:
                rows = await feed.after(cursor)
            except DATABASE_ERRORS:
                yield PING
                await asyncio.sleep(_RETRY_S)
                continue
            for row in rows:
                cursor = row.id
                if (
                    (job_id is None or row.job_id == job_id)
                    and (kind is None or row.kind == kind)
                    and principal.may_touch(row.job_id)
                ):
                    yield sse(event_model(row).model_dump_json(), str(row.id))
            if not rows and not await feed.wait_beyond(cursor, streams.ping_interval_s):
                yield PING
