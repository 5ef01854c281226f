"""Bearer tokens of the API: 32 random bytes each, of which the database keeps the hash."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gemini_ft.contracts.api import Role
from gemini_ft.contracts.errors import AuthenticationError, ConflictError, NotFoundError
from gemini_ft.contracts.ids import JobId
from gemini_ft.coordinator.database import DATABASE_ERRORS
from gemini_ft.coordinator.tables import Token
from gemini_ft.coordinator.transitions import record_event

__all__ = ["BOOTSTRAP", "Principal", "Role", "TokenRequest", "Tokens", "create_token", "revoke_token"]

BOOTSTRAP = "bootstrap"
"""Name of the token in the coordinator's token file."""

_TOKEN = re.compile(r"gft_[A-Za-z0-9_-]{43}")
_NOTED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. `job_ids` none: all jobs."""

    token_id: str
    name: str
    role: Role
    job_ids: frozenset[JobId] | None = None

    def may_touch(self, job_id: JobId | None) -> bool:
        """Whether what belongs to this job (none: to no job) is this token's business."""
        return self.job_ids is None or job_id in self.job_ids


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A token to be made; `lifetime` none: until it is revoked."""

    name: str
    role: Role
    job_ids: Sequence[JobId] | None
    lifetime: timedelta | None


class Tokens:
    """Tells who a bearer token belongs to. `bootstrap` is the secret of the unscoped operator of that name, if any."""

    def __init__(self, engine: AsyncEngine, bootstrap: str | None = None) -> None:
        self._engine = engine
        self._bootstrap_sha256 = "" if bootstrap is None else _sha256(bootstrap)

    async def authenticate(self, token: str) -> Principal:
        """Return who presents `token`, and note that it was used.

        Raises:
            AuthenticationError: it is unknown, revoked or expired.
        """
        digest = _sha256(token)
        if hmac.compare_digest(digest, self._bootstrap_sha256):
            return Principal(BOOTSTRAP, BOOTSTRAP, Role.OPERATOR)
        row = await self._find(digest) if _TOKEN.fullmatch(token) else None
        if row is None or not hmac.compare_digest(digest, row.token_sha256):
            raise AuthenticationError("the bearer token is wrong, expired or revoked; ask an operator for another one")
        if row.is_due:
            with contextlib.suppress(*DATABASE_ERRORS):  # a read-only database can be read nevertheless
                await self._note_use(row.id)
        job_ids = None if row.job_ids is None else frozenset(row.job_ids)
        return Principal(row.id, row.name, Role(row.role), job_ids)

    async def page(self, limit: int, after: tuple[datetime, str] | None) -> list[Any]:
        """Return tokens without their secrets, oldest first, those after (created_at, id)."""
        query = select(Token.__table__).order_by(Token.created_at, Token.id).limit(limit)
        if after is not None:
            query = query.where(tuple_(Token.created_at, Token.id) > after)
        async with self._engine.connect() as connection:
            return list((await connection.execute(query)).all())

    async def _find(self, digest: str) -> Any:
        is_due = or_(Token.last_used_at.is_(None), Token.last_used_at < func.now() - _NOTED_EVERY)
        query = select(Token.__table__, is_due.label("is_due")).where(
            Token.token_sha256 == digest,
            Token.revoked_at.is_(None),
            or_(Token.expires_at.is_(None), Token.expires_at > func.now()),
        )
        async with self._engine.connect() as connection:
            return (await connection.execute(query)).one_or_none()

    async def _note_use(self, token_id: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(update(Token).where(Token.id == token_id).values(last_used_at=func.now()))


async def create_token(connection: AsyncConnection, request: TokenRequest, actor: str) -> tuple[Any, str]:
    """Make a token and return (its row, its secret); nobody can read the secret again.

    Raises:
        ConflictError: there is a token of this name, revoked ones included.
    """
    secret = f"gft_{secrets.token_urlsafe(32)}"
    made = await connection.execute(
        insert(Token)
        .values(
            id=f"tok-{secrets.token_hex(6)}",
            name=request.name,
            role=request.role,
            job_ids=None if request.job_ids is None else list(request.job_ids),
            token_sha256=_sha256(secret),
            expires_at=None if request.lifetime is None else func.now() + request.lifetime,
        )
        .on_conflict_do_nothing(index_elements=[Token.name])
        .returning(Token.__table__)
    )
    row = made.one_or_none()
    if row is None or request.name == BOOTSTRAP:
        raise ConflictError(f"there is a token {request.name!r} already; choose another name", name=request.name)
    scope = "" if request.job_ids is None else f" for {', '.join(request.job_ids)}"
    await record_event(connection, "audit_create_token", f"{actor}: create token {row.name!r} ({row.role}){scope}")
    return row, secret


async def revoke_token(connection: AsyncConnection, token_id: str, actor: str) -> None:
    """Make a token useless from now on; once more changes nothing.

    Raises:
        NotFoundError: there is no such token.
    """
    found = await connection.execute(select(Token.name, Token.revoked_at).where(Token.id == token_id).with_for_update())
    row = found.one_or_none()
    if row is None:
        raise NotFoundError(f"there is no token {token_id}; GET /v1/tokens lists the tokens", token_id=token_id)
    if row.revoked_at is None:
        await connection.execute(update(Token).where(Token.id == token_id).values(revoked_at=func.now()))
        await record_event(connection, "audit_revoke_token", f"{actor}: revoke token {row.name!r}")


def _sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
