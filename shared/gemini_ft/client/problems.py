"""Refusals of the API as errors of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gemini_ft.contracts.api import Problem
from gemini_ft.contracts.errors import (
    AuthenticationError,
    ConfigurationError,
    ConflictError,
    ForbiddenError,
    GeminiError,
    InvalidRequestError,
    NotFoundError,
    PreconditionFailedError,
    TooManyStreamsError,
    UnavailableError,
    from_wire,
)

__all__ = ["error_of"]

_KIND_OF_STATUS: dict[int, type[GeminiError]] = {
    400: ConfigurationError,
    401: AuthenticationError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    412: PreconditionFailedError,
    413: ConfigurationError,
    422: ConfigurationError,
    429: TooManyStreamsError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}
_MAX_SHOWN_BYTES = 200


def error_of(request: str, status: int, headers: Mapping[str, str], content: bytes) -> GeminiError:
    """Return the error that an answer stands for. Facts: status, problem (its kind), errors (of fields), retry_after_s.

    A kind that is not known here counts as what its status says.
    """
    facts: dict[str, Any] = {"status": status}
    retry_after = headers.get("retry-after", "")
    if retry_after.isdigit():
        facts["retry_after_s"] = int(retry_after)
    try:
        problem = Problem.model_validate_json(content)
    except ValidationError:
        text = content[:_MAX_SHOWN_BYTES].decode(errors="replace")
        kind, detail = "", f"{request} was answered with HTTP {status}: {text}"
    else:
        kind, detail = problem.type.rpartition(":")[2], problem.detail
        facts |= {"problem": kind, "errors": problem.errors}
    error = from_wire({"code": kind.replace("-", "_"), "message": detail, "facts": facts})
    if type(error) is GeminiError:
        error = _KIND_OF_STATUS.get(status, GeminiError)(detail, **facts)
    if isinstance(error, InvalidRequestError):
        error.facts["field"] = next((entry.field for entry in facts["errors"]), "")
    return error
