"""The routes of `/v1`."""

from __future__ import annotations

import hmac
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from gemini_ft.contracts.errors import AuthenticationError, NotFoundError, UnavailableError
from gemini_ft.contracts.messages import JobSpec, RankStatus
from gemini_ft.coordinator.api.models import (
    DecisionRequest,
    EventModel,
    EventPage,
    JobModel,
    NodeModel,
    PlacementModel,
    RankModel,
    RecoveryModel,
    VersionModel,
)
from gemini_ft.coordinator.api.problems import install_problem_handlers
from gemini_ft.coordinator.reconcile import committed_step, finished_step
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.state import Cluster, JobView, NodeView
from gemini_ft.planning.placement import mixed_placement

__all__ = ["create_app"]

Limit = Annotated[int, Query(ge=1, le=1000)]


def create_app(coordinator: Coordinator, token: str) -> FastAPI:
    """Return the ASGI application; all but the health checks ask for `token`."""
    app = FastAPI(
        title="Gemini-FT coordinator", version="1", openapi_url="/v1/openapi.json", docs_url=None, redoc_url=None
    )
    install_problem_handlers(app)
    app.include_router(_health(coordinator))
    app.include_router(_v1(coordinator), prefix="/v1", dependencies=[Depends(_bearer(token))])
    return app


def _bearer(token: str) -> Any:
    expected = token.encode()

    async def check(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
    ) -> None:
        if given is None:
            raise AuthenticationError("this request has no bearer token; send `Authorization: Bearer TOKEN`")
        if not hmac.compare_digest(given.credentials.encode(), expected):
            raise AuthenticationError("the bearer token is wrong; use the one in the coordinator's token file")

    return check


def _health(coordinator: Coordinator) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process lives."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """The process can serve; `leader` tells whether it is the one that acts."""
        why = await coordinator.unready()
        if why is not None:
            raise UnavailableError(why)
        return JSONResponse({"status": "ok", "leader": coordinator.leadership.held})

    return router


def _v1(coordinator: Coordinator) -> APIRouter:
    router = APIRouter()
    store = coordinator.store

    @router.post("/jobs", status_code=201, tags=["jobs"])
    async def create_job(spec: JobSpec) -> JobModel:
        """Create a job. It is `pending` until enough nodes are free."""
        mixed_placement(spec.num_nodes, spec.num_replicas)
        job_id = await store.create_job(spec)
        coordinator.wake()
        return _job_model(coordinator, *await store.job(job_id))

    @router.get("/jobs", tags=["jobs"])
    async def list_jobs(limit: Limit = 100, before: str | None = None) -> list[JobModel]:
        """The newest jobs first; `before` is the last job id of the page before."""
        job_ids = await store.job_ids(limit, before)
        cluster = await store.load(job_ids)
        return [_job_model(coordinator, cluster.jobs[job_id], cluster) for job_id in job_ids]

    @router.get("/jobs/{job_id}", tags=["jobs"])
    async def get_job(job_id: str) -> JobModel:
        """One job."""
        return _job_model(coordinator, *await store.job(job_id))

    @router.post("/jobs/{job_id}/stop", tags=["jobs"])
    async def stop_job(job_id: str) -> JobModel:
        """End a job; its nodes stop their processes and free their memory."""
        await store.stop_job(job_id, "a person stopped the job")
        coordinator.wake()
        return _job_model(coordinator, *await store.job(job_id))

    @router.post("/jobs/{job_id}/decision", tags=["jobs"])
    async def decide_job(job_id: str, request: DecisionRequest) -> JobModel:
        """Decide what becomes of a blocked job."""
        await store.decide(job_id, request.decision)
        coordinator.wake()
        return _job_model(coordinator, *await store.job(job_id))

    @router.get("/jobs/{job_id}/placement", tags=["jobs"])
    async def get_placement(job_id: str) -> PlacementModel:
        """Who holds whose shards."""
        job, _ = await store.job(job_id)
        placement = mixed_placement(job.spec.num_nodes, job.spec.num_replicas)
        return PlacementModel(placement=placement, slots=dict(job.slots))

    @router.get("/jobs/{job_id}/versions", tags=["jobs"])
    async def list_versions(job_id: str, limit: Limit = 100) -> list[VersionModel]:
        """The newest committed versions that were recorded."""
        await store.job(job_id)
        return [
            VersionModel(generation=row.generation, step=row.step, committed_at=row.committed_at)
            for row in await store.versions(job_id, limit)
        ]

    @router.get("/jobs/{job_id}/recoveries", tags=["jobs"])
    async def list_recoveries(job_id: str, limit: Limit = 100) -> list[RecoveryModel]:
        """The newest recoveries, with their phases."""
        await store.job(job_id)
        return [
            RecoveryModel(
                generation=row.generation,
                cause=row.cause,
                outcome=row.outcome,
                finished_step=row.finished_step,
                restored_step=row.restored_step,
                num_steps_lost=row.num_steps_lost,
                phases_ms=row.phases_ms,
                started_at=row.started_at,
            )
            for row in await store.recoveries(job_id, limit)
        ]

    @router.get("/nodes", tags=["nodes"])
    async def list_nodes() -> list[NodeModel]:
        """All nodes."""
        cluster = await store.load()
        return [_node_model(coordinator, node) for node in cluster.nodes.values()]

    @router.get("/nodes/{node_id}", tags=["nodes"])
    async def get_node(node_id: str) -> NodeModel:
        """One node."""
        cluster = await store.load()
        if node_id not in cluster.nodes:
            raise NotFoundError(f"there is no node {node_id}; GET /v1/nodes lists the nodes", node_id=node_id)
        return _node_model(coordinator, cluster.nodes[node_id])

    @router.get("/events", tags=["events"])
    async def list_events(
        after: Annotated[int, Query(ge=0)] = 0, limit: Limit = 100, job_id: str | None = None
    ) -> EventPage:
        """What happened after the cursor `after`, oldest first."""
        rows = await store.events(after, limit, job_id)
        events = [
            EventModel(
                id=row.id,
                at=row.at,
                kind=row.kind,
                job_id=row.job_id,
                node_id=row.node_id,
                generation=row.generation,
                message=row.message,
            )
            for row in rows
        ]
        return EventPage(events=events, next_after=events[-1].id if events else after)

    return router


def _job_model(coordinator: Coordinator, job: JobView, cluster: Cluster) -> JobModel:
    return JobModel(
        job_id=job.job_id,
        spec=job.spec,
        phase=job.phase,
        generation=job.generation,
        waiting_for=job.waiting_for,
        cause=job.cause,
        committed_step=committed_step(job, cluster, coordinator.seen),
        finished_step=finished_step(job, cluster, coordinator.seen),
        restored_step=job.plan.restore_step if job.plan is not None else None,
        num_recoveries_without_progress=job.num_fruitless_recoveries,
        slots=dict(job.slots),
        standbys=list(job.standbys),
        created_at=job.created_at,
    )


def _node_model(coordinator: Coordinator, node: NodeView) -> NodeModel:
    model = NodeModel(
        node_id=node.node_id,
        hostname=node.hostname,
        labels=dict(node.labels),
        address=node.address,
        status=node.status,
        job_id=node.job_id,
        slot=node.slot,
    )
    sighting = coordinator.seen.sighting(node)
    if sighting is None:
        return model
    heartbeat = sighting.heartbeat
    return model.model_copy(
        update={
            "heard_s_ago": round(coordinator.seen.age_s(sighting), 3),
            "ordered_generation": heartbeat.ordered_generation,
            "assigned_generation": heartbeat.assigned_generation,
            "launcher_pid": heartbeat.launcher_pid,
            "finished": heartbeat.finished,
            "redundancy_whole": heartbeat.redundancy_whole,
            "store_used_bytes": heartbeat.store_used_bytes,
            "store_capacity_bytes": heartbeat.store_capacity_bytes,
            "ranks": [_rank_model(status) for status in heartbeat.ranks],
        }
    )


def _rank_model(status: RankStatus) -> RankModel:
    shown = set(RankModel.model_fields)
    return RankModel.model_validate(status.model_dump(include=shown))
