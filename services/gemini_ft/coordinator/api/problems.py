"""Errors as RFC 9457 problem details. The `type` of a problem is stable; its `detail` is for people."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

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
)
from gemini_ft.coordinator.database import DATABASE_ERRORS, describe

__all__ = [
    "PROBLEM_JSON",
    "ForbiddenError",
    "InvalidRequestError",
    "PreconditionFailedError",
    "Problem",
    "TooManyStreamsError",
    "install_problem_handlers",
    "problem",
    "problems",
]

PROBLEM_JSON = "application/problem+json"
_TRY_AGAIN = {"Retry-After": "1"}

_STATUS_OF_ERROR: dict[type[GeminiError], HTTPStatus] = {
    AuthenticationError: HTTPStatus.UNAUTHORIZED,
    ForbiddenError: HTTPStatus.FORBIDDEN,
    NotFoundError: HTTPStatus.NOT_FOUND,
    ConflictError: HTTPStatus.CONFLICT,
    PreconditionFailedError: HTTPStatus.PRECONDITION_FAILED,
    ConfigurationError: HTTPStatus.UNPROCESSABLE_ENTITY,
    TooManyStreamsError: HTTPStatus.TOO_MANY_REQUESTS,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that may answer with these statuses besides those that every route has."""
    content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def problem(
    status: HTTPStatus, kind: str, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> JSONResponse:
    """Return a problem as a response."""
    body = {"type": f"urn:gemini-ft:problem:{kind}", "title": status.phrase, "status": status.value, "detail": detail}
    return JSONResponse(body | more, status.value, headers, PROBLEM_JSON)


def install_problem_handlers(app: FastAPI) -> None:
    """Make every error of `app` a problem document."""
    app.add_exception_handler(GeminiError, _gemini_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in DATABASE_ERRORS:
        app.add_exception_handler(kind, _database_error)


async def _gemini_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GeminiError)
    status = next(
        (status for kind, status in _STATUS_OF_ERROR.items() if isinstance(error, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    headers: Mapping[str, str] = {}
    more = {}
    match error:
        case AuthenticationError():
            headers = {"WWW-Authenticate": "Bearer"}
        case UnavailableError():
            headers = _TRY_AGAIN
        case TooManyStreamsError():
            headers = {"Retry-After": str(error.retry_after_s)}
        case InvalidRequestError():
            more = {"errors": [{"field": error.field, "message": str(error)}]}
    return problem(status, error.code.replace("_", "-"), str(error), headers, **more)


async def _invalid_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # What a route and a dependency of it both take is reported by both.
    found = dict.fromkeys((_field(one["loc"]), one["msg"]) for one in error.errors())
    fields = [{"field": field, "message": message} for field, message in found]
    detail = "; ".join(f"{entry['field']}: {entry['message']}" for entry in fields)
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail, errors=fields)


def _field(location: tuple[int | str, ...]) -> str:
    """The name of a field without where it stands: everybody knows what is in the body and what in the query."""
    return ".".join(str(part) for part in location[1:]) or str(location[0])


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status, headers = HTTPStatus(error.status_code), dict(error.headers or {})
    if status is HTTPStatus.BAD_REQUEST:  # FastAPI could not even decode the body
        return await _invalid_request(request, RequestValidationError([{"loc": ("body",), "msg": "is no JSON"}]))
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = _allowed_methods(request)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    kind = "content-too-large" if status.value == 413 else status.phrase.lower().replace(" ", "-")
    return problem(status, kind, detail, headers)


def _allowed_methods(request: Request) -> str:
    """All methods of the path; the router itself names those of one route."""
    methods = request.app.openapi()["paths"].get(request.scope["route"].path, {})
    return ", ".join(sorted(method.upper() for method in methods))


async def _database_error(_: Request, error: Exception) -> JSONResponse:
    detail = f"the database cannot be used now, try again: {describe(error)}"
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", detail, _TRY_AGAIN)
