"""Requests that may be repeated: the answer is kept in the transaction that makes the change; both happen or none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.coordinator.tables import IdempotencyKey

__all__ = ["Answer", "IdempotencyKeyReusedError", "RepeatableRequest"]

_KEPT_FOR = timedelta(hours=24)
_LOCK_SPACE = 0x4745_4D46


class IdempotencyKeyReusedError(ConfigurationError):
    """One key came with two different requests."""

    code = "idempotency_key_reused"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a change is answered with."""

    status: int
    body: dict[str, Any]
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class RepeatableRequest:
    """A request under a key that its sender chose; keys of different tokens have nothing to do with each other."""

    token_id: str
    key: str
    request_sha256: str

    @classmethod
    def of(cls, token_id: str, key: str, parts: Iterable[bytes]) -> RepeatableRequest:
        """`parts` are all that makes the request what it is."""
        digest = hashlib.sha256()
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return cls(token_id, key, digest.hexdigest())

    async def earlier_answer(self, connection: AsyncConnection) -> Answer | None:
        """Return the answer to an earlier such request, after waiting for one that is under way; None: be the first.

        Raises:
            IdempotencyKeyReusedError: the earlier request was another one.
        """
        await connection.execute(
            text("SELECT pg_advisory_xact_lock(:space, hashtext(:name))"),
            {"space": _LOCK_SPACE, "name": f"{self.token_id} {self.key}"},
        )
        await connection.execute(delete(IdempotencyKey).where(IdempotencyKey.created_at < func.now() - _KEPT_FOR))
        found = await connection.execute(
            select(IdempotencyKey.__table__).where(
                IdempotencyKey.token_id == self.token_id, IdempotencyKey.key == self.key
            )
        )
        row = found.one_or_none()
        if row is None:
            return None
        if row.request_sha256 != self.request_sha256:
            raise IdempotencyKeyReusedError(
                f"Idempotency-Key {self.key!r} came with another request before; use a new key for a new request"
            )
        return Answer(row.status, row.body, row.etag)

    async def keep(self, connection: AsyncConnection, answer: Answer) -> None:
        """Keep the answer for a day."""
        await connection.execute(
            insert(IdempotencyKey).values(
                token_id=self.token_id,
                key=self.key,
                request_sha256=self.request_sha256,
                status=answer.status,
                body=answer.body,
                etag=answer.etag,
            )
        )
