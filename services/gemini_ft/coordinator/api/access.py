"""Who may do what: bearer tokens with a role, perhaps bound to some jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from gemini_ft.contracts.errors import AuthenticationError
from gemini_ft.contracts.ids import JobId
from gemini_ft.coordinator.api.problems import ForbiddenError
from gemini_ft.coordinator.api.services import Api
from gemini_ft.coordinator.tokens import Principal, Role
from gemini_ft.coordinator.wishes import unknown_job

__all__ = ["Admin", "JobOperator", "JobViewer", "Operator", "Viewer"]

_bearer = HTTPBearer(auto_error=False, description="a token of `POST /v1/tokens`, or the one in the token file")


async def _principal(api: Api, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Principal:
    if given is None:
        raise AuthenticationError("this request has no bearer token; send `Authorization: Bearer TOKEN`")
    return await api.tokens.authenticate(given.credentials)


_Anybody = Annotated[Principal, Depends(_principal)]


async def _viewer(principal: _Anybody) -> Principal:
    if principal.role is Role.AGENT:
        raise ForbiddenError(f"token {principal.name!r} is an agent's: it registers nodes, and nothing else")
    return principal


Viewer = Annotated[Principal, Depends(_viewer)]
"""A token that may look, at its jobs if it is bound to some."""


async def _operator(principal: Viewer) -> Principal:
    if principal.role is not Role.OPERATOR:
        raise ForbiddenError(f"token {principal.name!r} is a viewer's: it changes nothing; use an operator's")
    return principal


Operator = Annotated[Principal, Depends(_operator)]
"""A token that may make changes, to its jobs if it is bound to some."""


async def _admin(principal: Operator) -> Principal:
    if principal.job_ids is not None:
        raise ForbiddenError(
            f"token {principal.name!r} is bound to {len(principal.job_ids)} jobs: "
            "it creates no jobs, and changes neither nodes nor tokens; use a token that is not bound"
        )
    return principal


Admin = Annotated[Principal, Depends(_admin)]
"""An operator who is bound to no jobs."""


async def _job_viewer(principal: Viewer, job_id: JobId) -> Principal:
    if not principal.may_touch(job_id):
        raise unknown_job(job_id)
    return principal


JobViewer = Annotated[Principal, Depends(_job_viewer)]
"""A token that may look at the job in the path."""


async def _job_operator(principal: Operator, job_id: JobId) -> Principal:
    return await _job_viewer(principal, job_id)


JobOperator = Annotated[Principal, Depends(_job_operator)]
"""A token that may change the job in the path."""
