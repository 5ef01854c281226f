"""Answers as JSON."""

from __future__ import annotations

from fastapi import Response
from pydantic import BaseModel

__all__ = ["JSON", "answer"]

JSON = "application/json"


def answer(model: BaseModel, *, etag: str | None = None) -> Response:
    """Answer with a model that was made here: it is written as it stands, without checking it a second time."""
    headers = {} if etag is None else {"ETag": etag}
    return Response(model.model_dump_json(), headers=headers, media_type=JSON)
