"""The application: `/v1`, health checks, limits, and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from gemini_ft.coordinator.api import cluster, events, health, job_details, jobs, logs, nodes, tokens
from gemini_ft.coordinator.api.middleware import LargeBodies, Timed
from gemini_ft.coordinator.api.problems import Problem, install_problem_handlers, problems
from gemini_ft.coordinator.api.services import Services
from gemini_ft.coordinator.api.streams import Streams
from gemini_ft.coordinator.rank_logs import RankLogs
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.tokens import Tokens

__all__ = ["create_app", "openapi_document"]

_MAX_BODY_BYTES = 1 << 20


def create_app(coordinator: Coordinator, token: str, streams: Streams | None = None) -> FastAPI:
    """Return the ASGI application. `token` is the secret of an operator who may do everything."""
    app = _application()
    app.state.services = Services(
        coordinator=coordinator,
        tokens=Tokens(coordinator.engine, token),
        streams=streams or Streams(),
        logs=RankLogs(coordinator),
    )
    app.add_middleware(LargeBodies, max_bytes=_MAX_BODY_BYTES)
    app.add_middleware(Timed, metrics=coordinator.metrics)
    install_problem_handlers(app)
    return app


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document, as every coordinator of this release serves it."""
    return _application().openapi()


def _application() -> FastAPI:
    app = _App(
        title="Gemini-FT coordinator",
        version="1",
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(health.router)
    for part in (jobs, job_details, logs, nodes, events, tokens, cluster):
        app.include_router(part.router, responses=problems(401, 403, 413, 422, 503))
    return app


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The document, with the schema that all problems have."""
        document = super().openapi()
        schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        document["components"]["schemas"] |= schema.pop("$defs") | {"Problem": schema}
        return document
