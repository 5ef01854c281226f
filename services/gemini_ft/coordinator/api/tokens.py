"""`/v1/tokens`: who else may use the API."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from sqlalchemy.ext.asyncio import AsyncConnection

from gemini_ft.contracts.api import NewTokenModel, NewTokenRequest, Role, TokenModel
from gemini_ft.coordinator.api.access import Admin
from gemini_ft.coordinator.api.answers import answer
from gemini_ft.coordinator.api.changes import Change, RepeatableChange
from gemini_ft.coordinator.api.paging import BY_TIME_AND_ID, Cursor, Limit, Page, after, page_of
from gemini_ft.coordinator.api.problems import InvalidRequestError, problems
from gemini_ft.coordinator.api.services import Api
from gemini_ft.coordinator.idempotency import Answer
from gemini_ft.coordinator.tokens import TokenRequest, create_token, revoke_token

__all__ = ["router"]

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])
TokenId = Annotated[str, Path(pattern=r"^tok-[0-9a-f]{12}$")]


@router.post("", status_code=201, response_model=NewTokenModel, responses=problems(409))
async def make_token(request: NewTokenRequest, change: RepeatableChange, _: Admin) -> Response:
    """Make a token. Write its secret down: it cannot be shown again."""
    if request.role is Role.AGENT and request.job_ids is not None:
        raise InvalidRequestError("an agent's token is bound to no jobs; leave job_ids out", field="job_ids")
    lifetime = None if request.lifetime_s is None else timedelta(seconds=request.lifetime_s)
    secret: dict[str, Any] = {}

    async def act(connection: AsyncConnection) -> Answer:
        wanted = TokenRequest(request.name, request.role, request.job_ids, lifetime)
        row, secret["token"] = await create_token(connection, wanted, change.actor)
        return Answer(201, NewTokenModel(**_values(row)).model_dump(mode="json"))

    return await change.run(act, secret=secret)


@router.get("", response_model=Page[TokenModel])
async def list_tokens(api: Api, _: Admin, limit: Limit = 100, cursor: Cursor = None) -> Response:
    """All tokens that were made, oldest first."""
    rows = await api.tokens.page(limit + 1, after(cursor, BY_TIME_AND_ID))
    return answer(page_of(rows, limit, lambda row: (row.created_at, row.id), lambda row: TokenModel(**_values(row))))


@router.delete("/{token_id}", status_code=204, responses=problems(404))
async def delete_token(token_id: TokenId, change: Change, _: Admin) -> Response:
    """Revoke a token, from now on. It stays in the list."""

    async def act(connection: AsyncConnection) -> Answer:
        await revoke_token(connection, token_id, change.actor)
        return Answer(204, {})

    return await change.run(act)


def _values(row: Any) -> dict[str, Any]:
    return {"token_id": row.id, **{name: getattr(row, name) for name in TokenModel.model_fields if name != "token_id"}}
