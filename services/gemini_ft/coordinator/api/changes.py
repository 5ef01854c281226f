"""Changes that people wish for: with If-Match on what they have seen, and repeatable under an Idempotency-Key.

A wish, its audit event and the answer that is kept for repetitions are one transaction; the leader makes it true.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.coordinator.api.access import Operator
from gemini_ft.coordinator.api.answers import JSON
from gemini_ft.coordinator.api.problems import PreconditionFailedError, problems
from gemini_ft.coordinator.api.services import Api
from gemini_ft.coordinator.api.shapes import job_etag, job_model, node_etag, node_model
from gemini_ft.coordinator.idempotency import Answer, RepeatableRequest
from gemini_ft.coordinator.tables import Node, Slot
from gemini_ft.coordinator.tokens import Principal
from gemini_ft.coordinator.views import node_view
from gemini_ft.coordinator.wishes import By, Wishes

__all__ = ["CHANGED", "ETAG", "READ", "Change", "RepeatableChange"]

ETAG = {"ETag": {"description": "names this state; for If-Match", "schema": {"type": "string"}}}
"""For a route's documentation, as what follows."""
READ: dict[int | str, dict[str, Any]] = {200: {"headers": ETAG}, **problems(404)}
CHANGED: dict[int | str, dict[str, Any]] = {200: {"headers": ETAG}, **problems(404, 409, 412)}

Wish = Callable[[Wishes, By], Awaitable[Any]]


class _Change:
    """One change, by whoever sent this request."""

    def __init__(self, api: Api, request: Request, principal: Principal, if_match: str | None, key: str | None) -> None:
        self.actor = principal.name
        self._api = api
        self._request = request
        self._principal = principal
        self._if_match = if_match
        self._key = key

    async def of_job(self, job_id: JobId, wish: Wish) -> Response:
        """Let a wish about a job come true, and answer with the job."""

        async def act(connection: AsyncConnection) -> Answer:
            await wish(_lent(connection), self._by(job_etag))
            return await self.job_answer(connection, job_id)

        return await self.run(act)

    async def of_node(self, node_id: NodeId, wish: Wish) -> Response:
        """Let a wish about a node come true, and answer with the node."""

        async def act(connection: AsyncConnection) -> Answer:
            await wish(_lent(connection), self._by(lambda row: node_etag(node_view(row))))
            query = select(Node.__table__, Slot.slot).outerjoin(Slot, Slot.node_id == Node.id)
            row = (await connection.execute(query.where(Node.id == node_id))).one()
            node = node_view(row, row.slot)
            return Answer(200, node_model(node, self._api.coordinator.seen).model_dump(mode="json"), node_etag(node))

        return await self.run(act)

    async def job_answer(self, connection: AsyncConnection, job_id: JobId, status: int = 200) -> Answer:
        """Answer with a job as this transaction leaves it."""
        job, cluster = await self._api.coordinator.queries.job(connection, job_id)
        shown = job_model(job, cluster, self._api.coordinator.seen)
        return Answer(status, shown.model_dump(mode="json"), job_etag(job))

    async def create_job(self, wish: Callable[[Wishes, By], Awaitable[JobId]]) -> Response:
        """Let the wish for a job come true, and answer with the job."""

        async def act(connection: AsyncConnection) -> Answer:
            return await self.job_answer(connection, await wish(_lent(connection), By(self.actor)), 201)

        return await self.run(act)

    async def gone(self, wish: Wish, etag: Callable[[Any], str] | None = None) -> Response:
        """Let the wish that something disappears come true."""

        async def act(connection: AsyncConnection) -> Answer:
            await wish(_lent(connection), self._by(etag))
            return Answer(204, {})

        return await self.run(act)

    async def run(
        self, act: Callable[[AsyncConnection], Awaitable[Answer]], *, secret: dict[str, Any] | None = None
    ) -> Response:
        """Make a change, unless an earlier request with the same key has made it. What `act` puts into `secret` is part
        of this answer only, and not kept.
        """
        repeatable = await self._repeatable()
        async with self._api.coordinator.engine.begin() as connection:
            if repeatable is not None:
                earlier = await repeatable.earlier_answer(connection)
                if earlier is not None:
                    return _response(earlier, {"Idempotent-Replay": "true"})
            answer = await act(connection)
            if repeatable is not None:
                await repeatable.keep(connection, answer)
        self._api.coordinator.wake()
        return _response(answer, {}, secret)

    def _by(self, etag: Callable[[Any], str] | None) -> By:
        if self._if_match is None or etag is None:
            return By(self.actor)
        wanted = [tag.strip() for tag in self._if_match.split(",")]

        def check(row: Any) -> None:
            if "*" not in wanted and etag(row) not in wanted:
                raise PreconditionFailedError(
                    f"{row.id} is {etag(row)} now, not {self._if_match}: it has changed; read it again"
                )

        return By(self.actor, check)

    async def _repeatable(self) -> RepeatableRequest | None:
        if self._key is None:
            return None
        request = self._request
        target = f"{request.method} {request.url.path}?{request.url.query} {self._if_match}"
        return RepeatableRequest.of(self._principal.token_id, self._key, (target.encode(), await request.body()))


def _lent(connection: AsyncConnection) -> Wishes:
    """Wishes that become part of a transaction which is under way."""
    return Wishes(lambda: nullcontext(connection))


def _response(answer: Answer, headers: dict[str, str], more: dict[str, Any] | None = None) -> Response:
    if answer.etag is not None:
        headers = {"ETag": answer.etag, **headers}
    content = json.dumps(answer.body | (more or {})) if answer.status != 204 else None
    return Response(content, answer.status, headers, JSON if content is not None else None)


IfMatch = Annotated[
    str | None, Header(max_length=1000, description="ETag that the resource must still have; else 412 and no change")
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=r"^[!-~]{1,200}$",
        description="for 24 hours, the same request with the same key gets the first answer, and changes nothing",
    ),
]


async def _change(api: Api, request: Request, principal: Operator, if_match: IfMatch = None) -> _Change:
    return _Change(api, request, principal, if_match, None)


async def _repeatable_change(
    api: Api,
    request: Request,
    principal: Operator,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> _Change:
    return _Change(api, request, principal, if_match, idempotency_key)


Change = Annotated[_Change, Depends(_change)]
"""For methods that are idempotent by themselves."""

RepeatableChange = Annotated[_Change, Depends(_repeatable_change)]
"""For POST."""
