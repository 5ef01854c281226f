"""`/v1/jobs/{job_id}/...`: placement, versions, recoveries, ranks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from gemini_ft.contracts.api import (
    JobRankModel,
    PlacementModel,
    RecoveryDetailModel,
    RecoveryModel,
    VersionDetailModel,
    VersionModel,
)
from gemini_ft.contracts.errors import NotFoundError
from gemini_ft.contracts.ids import JobId
from gemini_ft.coordinator.api.access import JobViewer
from gemini_ft.coordinator.api.answers import answer
from gemini_ft.coordinator.api.paging import BY_NUMBER, BY_TWO_NUMBERS, Cursor, Limit, Page, after, page_of
from gemini_ft.coordinator.api.problems import problems
from gemini_ft.coordinator.api.reading import job_and_nodes
from gemini_ft.coordinator.api.services import Api
from gemini_ft.coordinator.api.shapes import job_ranks, recovery_model, version_model
from gemini_ft.coordinator.api.version_detail import version_detail
from gemini_ft.planning.placement import mixed_placement

__all__ = ["Number", "router"]

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"], responses=problems(404))
Number = Annotated[int, Path(ge=0, lt=2**63)]


@router.get("/placement", response_model=PlacementModel)
async def get_placement(job_id: JobId, api: Api, _: JobViewer) -> Response:
    """Who holds whose shards."""
    job, _cluster = await job_and_nodes(api.coordinator, job_id)
    placement = job.plan.placement if job.plan is not None else None
    if placement is None:
        placement = mixed_placement(job.spec.num_nodes, job.spec.num_replicas)
    return answer(PlacementModel(placement=placement, slots=dict(job.slots)))


@router.get("/versions", response_model=Page[VersionModel])
async def list_versions(job_id: JobId, api: Api, _: JobViewer, limit: Limit = 100, cursor: Cursor = None) -> Response:
    """The newest committed versions that were recorded."""
    await job_and_nodes(api.coordinator, job_id)
    rows = await api.coordinator.queries.versions(job_id, limit + 1, after(cursor, BY_TWO_NUMBERS))
    return answer(page_of(rows, limit, lambda row: (row.generation, row.step), version_model))


@router.get("/versions/{step}", response_model=VersionDetailModel)
async def get_version(job_id: JobId, step: Number, api: Api, _: JobViewer) -> Response:
    """Who holds what of a version."""
    return answer(await version_detail(api.coordinator, job_id, step))


@router.get("/recoveries", response_model=Page[RecoveryModel])
async def list_recoveries(job_id: JobId, api: Api, _: JobViewer, limit: Limit = 100, cursor: Cursor = None) -> Response:
    """The newest recoveries, with their phases."""
    await job_and_nodes(api.coordinator, job_id)
    rows = await api.coordinator.queries.recoveries(job_id, limit + 1, after(cursor, BY_NUMBER))
    return answer(page_of(rows, limit, lambda row: row.generation, recovery_model))


@router.get("/recoveries/{generation}", response_model=RecoveryDetailModel)
async def get_recovery(job_id: JobId, generation: Number, api: Api, _: JobViewer) -> Response:
    """One recovery: where every shard came from."""
    await job_and_nodes(api.coordinator, job_id)
    row = await api.coordinator.queries.recovery(job_id, generation)
    if row is None:
        raise NotFoundError(f"generation {generation} of {job_id} did not begin with a recovery", job_id=job_id)
    found = await api.coordinator.queries.plan(job_id, generation)
    plan = None if found is None else found[1]
    return answer(
        RecoveryDetailModel(
            **recovery_model(row).model_dump(),
            slots={} if plan is None else plan.slots,
            sources={} if plan is None else {rank: list(nodes) for rank, nodes in plan.sources.items()},
            notes=[] if plan is None else list(plan.notes),
        )
    )


@router.get("/ranks", response_model=Page[JobRankModel])
async def list_ranks(job_id: JobId, api: Api, _: JobViewer, limit: Limit = 100, cursor: Cursor = None) -> Response:
    """The ranks as their agents saw them last."""
    job, cluster = await job_and_nodes(api.coordinator, job_id)
    newest = after(cursor, BY_TWO_NUMBERS)
    ranks = [
        rank
        for rank in job_ranks(job, cluster, api.coordinator.seen)
        if newest is None or (rank.rank, rank.generation) > newest
    ]
    return answer(page_of(ranks, limit, lambda rank: (rank.rank, rank.generation), lambda rank: rank))
