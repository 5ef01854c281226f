"""Narrow reads for people: each touches a bounded number of rows, by an index."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, false, func, select, text, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gemini_ft.contracts.ids import JobId
from gemini_ft.coordinator.state import Cluster, JobPhase, JobView, StoredPlan
from gemini_ft.coordinator.tables import Event, Generation, Job, Node, Recovery, Version
from gemini_ft.coordinator.views import ClusterReader
from gemini_ft.coordinator.wishes import unknown_job

__all__ = ["Queries"]


class Queries:
    """What the API reads beside the cluster view. Pages come in a fixed order, those after a key of it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._reader = ClusterReader()

    async def jobs(self, job_ids: Collection[JobId]) -> Cluster:
        """Return these jobs, as far as they exist, with their own nodes."""
        async with self._engine.connect() as connection:
            return await self._reader.read(connection, Job.id.in_(job_ids), Node.job_id.in_(job_ids))

    async def job(self, connection: AsyncConnection, job_id: JobId) -> tuple[JobView, Cluster]:
        """Return one job as this transaction sees it, with its own nodes.

        Raises:
            NotFoundError: there is no such job.
        """
        cluster = await self._reader.read(connection, Job.id == job_id, Node.job_id == job_id)
        if job_id not in cluster.jobs:
            raise unknown_job(job_id)
        return cluster.jobs[job_id], cluster

    async def job_keys(
        self,
        limit: int,
        after: tuple[datetime, str] | None,
        *,
        phases: Collection[JobPhase],
        name: str | None,
        job_ids: Collection[JobId] | None,
    ) -> list[tuple[datetime, str]]:
        """Return (created_at, id) of jobs that were not deleted, newest first; no `phases`: in any phase."""
        conditions: list[ColumnElement[bool]] = [Job.deleted_at.is_(None)]
        if after is not None:
            conditions.append(tuple_(Job.created_at, Job.id) < after)
        if phases:
            conditions.append(Job.phase.in_(phases))
        if name is not None:
            conditions.append(Job.spec["name"].astext == name)
        if job_ids is not None:
            conditions.append(Job.id.in_(job_ids))
        rows = await self._rows(
            select(Job.created_at, Job.id)
            .where(*conditions)
            .order_by(Job.created_at.desc(), Job.id.desc())
            .limit(limit)
        )
        return [(row.created_at, row.id) for row in rows]

    async def num_jobs_by_phase(self, job_ids: Collection[JobId] | None) -> dict[JobPhase, int]:
        """Count the jobs that were not deleted."""
        query = select(Job.phase, func.count()).where(Job.deleted_at.is_(None)).group_by(Job.phase)
        rows = await self._rows(query if job_ids is None else query.where(Job.id.in_(job_ids)))
        return {JobPhase(phase): num_jobs for phase, num_jobs in rows}

    async def versions(self, job_id: JobId, limit: int, after: tuple[int, int] | None) -> list[Any]:
        """Return recorded versions, newest first, those after (generation, step)."""
        query = select(Version.__table__).where(Version.job_id == job_id)
        if after is not None:
            query = query.where(tuple_(Version.generation, Version.step) < after)
        return await self._rows(query.order_by(Version.generation.desc(), Version.step.desc()).limit(limit))

    async def version(self, job_id: JobId, step: int) -> Any:
        """Return the newest record of a version; None: there is none."""
        query = select(Version.__table__).where(Version.job_id == job_id, Version.step == step)
        rows = await self._rows(query.order_by(Version.generation.desc()).limit(1))
        return rows[0] if rows else None

    async def recoveries(self, job_id: JobId, limit: int, after: int | None) -> list[Any]:
        """Return recoveries, newest first, those of generations below `after`."""
        query = select(Recovery.__table__).where(Recovery.job_id == job_id)
        if after is not None:
            query = query.where(Recovery.generation < after)
        return await self._rows(query.order_by(Recovery.generation.desc()).limit(limit))

    async def recovery(self, job_id: JobId, generation: int) -> Any:
        """Return one recovery; None: that generation was none."""
        rows = await self._rows(
            select(Recovery.__table__).where(Recovery.job_id == job_id, Recovery.generation == generation)
        )
        return rows[0] if rows else None

    async def plan(self, job_id: JobId, generation: int | None = None) -> tuple[int, StoredPlan] | None:
        """Return (generation, plan) of one generation, or of the newest that was assigned; None: there is none."""
        query = select(Generation.generation, Generation.plan).where(
            Generation.job_id == job_id, Generation.plan.is_not(None)
        )
        if generation is not None:
            query = query.where(Generation.generation == generation)
        rows = await self._rows(query.order_by(Generation.generation.desc()).limit(1))
        return (rows[0].generation, StoredPlan.model_validate(rows[0].plan)) if rows else None

    async def events(
        self,
        after: int,
        limit: int,
        *,
        job_id: JobId | None = None,
        kind: str | None = None,
        job_ids: Collection[JobId] | None = None,
    ) -> list[Any]:
        """Return the events after the one with id `after`, oldest first."""
        query = select(Event.__table__).where(Event.id > after)
        if job_id is not None:
            query = query.where(Event.job_id == job_id)
        if kind is not None:
            query = query.where(Event.kind == kind)
        if job_ids is not None:
            query = query.where(Event.job_id.in_(job_ids))
        return await self._rows(query.order_by(Event.id).limit(limit))

    async def newest_event_id(self) -> int:
        """Return the id of the newest event; 0: there is none."""
        return int((await self._rows(select(func.coalesce(func.max(Event.id), 0).label("id"))))[0].id)

    async def write(self) -> None:
        """Write to the database as proof that it can be done."""
        async with self._engine.begin() as connection:
            # A read-only server refuses this, though there is nothing to change.
            await connection.execute(update(Event).where(false()).values(kind=""))
            await connection.execute(text("SELECT pg_logical_emit_message(true, 'gemini-ft', 'ready')"))

    async def _rows(self, query: Any) -> list[Any]:
        async with self._engine.connect() as connection:
            return list((await connection.execute(query)).all())
