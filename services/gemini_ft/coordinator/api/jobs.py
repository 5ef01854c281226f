"""`/v1/jobs`: create, list, steer."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from gemini_ft.contracts.api import DecisionRequest, JobModel, StopRequest
from gemini_ft.contracts.ids import JobId
from gemini_ft.contracts.messages import JobSpec
from gemini_ft.coordinator.api.access import Admin, JobOperator, JobViewer, Viewer
from gemini_ft.coordinator.api.answers import answer
from gemini_ft.coordinator.api.changes import ETAG, READ, Change, RepeatableChange
from gemini_ft.coordinator.api.paging import BY_TIME_AND_ID, Cursor, Limit, Page, after, page_of
from gemini_ft.coordinator.api.problems import problems
from gemini_ft.coordinator.api.reading import job_and_nodes, jobs_and_nodes
from gemini_ft.coordinator.api.services import Api
from gemini_ft.coordinator.api.shapes import job_etag, job_model
from gemini_ft.coordinator.progress import finished_step
from gemini_ft.coordinator.state import JobPhase
from gemini_ft.planning.placement import mixed_placement

__all__ = ["router"]

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
_ONE: dict[str, Any] = {"response_model": JobModel, "responses": READ}
_CHANGED: dict[str, Any] = {
    "response_model": JobModel,
    "responses": {200: {"headers": ETAG}, **problems(404, 409, 412)},
}


@router.post("", status_code=201, response_model=JobModel, responses={201: {"headers": ETAG}})
async def create_job(spec: JobSpec, change: RepeatableChange, _: Admin) -> Response:
    """Create a job. It is `pending` until enough nodes are free."""
    mixed_placement(spec.num_nodes, spec.num_replicas)
    return await change.create_job(lambda wishes, by: wishes.create_job(spec, by))


@router.get("", response_model=Page[JobModel])
async def list_jobs(
    api: Api,
    principal: Viewer,
    phase: Annotated[list[JobPhase], Query(max_length=20, description="in one of these phases")] = [],  # noqa: B006
    name: Annotated[
        str | None, Query(max_length=200, pattern=r"^[^\x00]*$", description="of exactly this name")
    ] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """The newest jobs first."""
    keys = await api.coordinator.queries.job_keys(
        limit + 1, after(cursor, BY_TIME_AND_ID), phases=phase, name=name, job_ids=principal.job_ids
    )
    found = await jobs_and_nodes(api.coordinator, [job_id for _, job_id in keys])

    def shown(key: tuple[datetime, str]) -> JobModel | None:
        return job_model(*found[key[1]], api.coordinator.seen) if key[1] in found else None

    return answer(page_of(keys, limit, lambda key: key, shown))


@router.get("/{job_id}", **_ONE)
async def get_job(job_id: JobId, api: Api, _: JobViewer) -> Response:
    """One job."""
    job, cluster = await job_and_nodes(api.coordinator, job_id)
    return answer(job_model(job, cluster, api.coordinator.seen), etag=job_etag(job))


@router.delete("/{job_id}", status_code=204, responses=problems(404, 409, 412))
async def delete_job(
    job_id: JobId,
    change: Change,
    _: JobOperator,
    force: Annotated[bool, Query(description="end it first if it has not ended")] = False,
) -> Response:
    """Hide a job that is pending, suspended or has ended; what it holds in memory is freed."""
    return await change.gone(lambda wishes, by: wishes.delete(job_id, force=force, by=by), job_etag)


@router.post("/{job_id}/stop", **_CHANGED)
async def stop_job(
    job_id: JobId, change: RepeatableChange, _: JobOperator, request: StopRequest | None = None
) -> Response:
    """Let a job come to rest at a committed step, to be resumed from there; or end it at once."""
    now = request is not None and request.now
    return await change.of_job(job_id, lambda wishes, by: wishes.stop(job_id, now=now, by=by))


@router.post("/{job_id}/resume", **_CHANGED)
async def resume_job(job_id: JobId, change: RepeatableChange, _: JobOperator) -> Response:
    """Let a suspended job go on from its final step."""
    return await change.of_job(job_id, lambda wishes, by: wishes.resume(job_id, by))


@router.post("/{job_id}/checkpoint", **_CHANGED)
async def checkpoint_job(job_id: JobId, api: Api, change: RepeatableChange, _: JobOperator) -> Response:
    """Ask for a version newer than the newest step that was finished, whatever the job's interval is."""
    job, cluster = await job_and_nodes(api.coordinator, job_id)
    newest = finished_step(job, cluster, api.coordinator.seen)
    return await change.of_job(job_id, lambda wishes, by: wishes.checkpoint(job_id, newest, by))


@router.post("/{job_id}/decision", **_CHANGED)
async def decide_job(job_id: JobId, request: DecisionRequest, change: RepeatableChange, _: JobOperator) -> Response:
    """Decide what becomes of a blocked job."""
    return await change.of_job(job_id, lambda wishes, by: wishes.decide(job_id, request.decision, by))
