"""Errors as RFC 9457 problem details. The `type` of a problem is stable; its `detail` is for people."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gemini_ft.contracts.errors import (
    AuthenticationError,
    ConfigurationError,
    ConflictError,
    GeminiError,
    NotFoundError,
    UnavailableError,
)
from gemini_ft.coordinator.database import DATABASE_ERRORS

__all__ = ["PROBLEM_JSON", "install_problem_handlers"]

PROBLEM_JSON = "application/problem+json"

_STATUS_OF_ERROR: dict[type[GeminiError], HTTPStatus] = {
    AuthenticationError: HTTPStatus.UNAUTHORIZED,
    ConfigurationError: HTTPStatus.UNPROCESSABLE_ENTITY,
    ConflictError: HTTPStatus.CONFLICT,
    NotFoundError: HTTPStatus.NOT_FOUND,
    UnavailableError: HTTPStatus.SERVICE_UNAVAILABLE,
}


def install_problem_handlers(app: FastAPI) -> None:
    """Make every error of `app` a problem document."""
    app.add_exception_handler(GeminiError, _gemini_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in DATABASE_ERRORS:
        app.add_exception_handler(kind, _database_error)


def _problem(status: HTTPStatus, kind: str, detail: str, **more: Any) -> JSONResponse:
    body = {"type": f"urn:gemini-ft:problem:{kind}", "title": status.phrase, "status": status.value, "detail": detail}
    headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else None
    return JSONResponse(body | more, status.value, headers, PROBLEM_JSON)


async def _gemini_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GeminiError)
    status = next(
        (status for kind, status in _STATUS_OF_ERROR.items() if isinstance(error, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    return _problem(status, error.code.replace("_", "-"), str(error))


async def _invalid_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    fields = [
        {"field": ".".join(str(part) for part in found["loc"] if part != "body") or "body", "message": found["msg"]}
        for found in error.errors()
    ]
    detail = "; ".join(f"{entry['field']}: {entry['message']}" for entry in fields)
    return _problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail, errors=fields)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return _problem(status, status.phrase.lower().replace(" ", "-"), detail)


async def _database_error(_: Request, error: Exception) -> JSONResponse:
    return _problem(
        HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", f"the database cannot be used now, try again: {error}"
    )
