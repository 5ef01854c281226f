"""`/healthz`, `/readyz` and `/metrics`: for machines on the same listener, without a token."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from gemini_ft.contracts.api import Health, Readiness
from gemini_ft.contracts.errors import UnavailableError
from gemini_ft.coordinator.api.problems import problems
from gemini_ft.coordinator.api.services import Api
from gemini_ft.coordinator.database import DATABASE_ERRORS

__all__ = ["router"]

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Health:
    """The process lives."""
    return Health()


@router.get("/readyz", responses=problems(503))
async def readyz(api: Api) -> Readiness:
    """The process can serve: NATS is connected and the database takes writes. `leader`: it is the one that acts."""
    why = await api.coordinator.unready()
    if why is not None:
        raise UnavailableError(why)
    return Readiness(leader=api.coordinator.leadership.held)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(api: Api) -> Response:
    """Metrics in the text format of Prometheus."""
    with contextlib.suppress(*DATABASE_ERRORS):  # then they tell what was read last
        await api.coordinator.view.recent()
    return Response(api.coordinator.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
