"""Reads jobs and nodes from the tables into the views that decisions and answers are made from."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gemini_ft.contracts.ids import JobId
from gemini_ft.contracts.messages import Address, JobSpec
from gemini_ft.coordinator.state import Cluster, HoldReason, JobPhase, JobView, NodeStatus, NodeView, StoredPlan
from gemini_ft.coordinator.tables import Generation, Job, Node, Slot, Version

__all__ = ["ClusterReader", "node_view"]

_COMMITTED = (
    select(func.max(Version.step))
    .where(Version.job_id == Job.id, Version.generation >= Job.zero_generation)
    .scalar_subquery()
    .label("committed_step")
)
_NEWEST_PLAN = case((Generation.generation == Job.generation, Generation.plan)).label("plan")
_RESTORE_STEP = Generation.plan["restore_step"].label("restore_step")
_MAX_PARSED = 10_000
_NUM_AT_ONCE = 50


class ClusterReader:
    """Remembers what it has parsed of the columns that never change, which is most of the work."""

    def __init__(self) -> None:
        self._specs: dict[JobId, JobSpec] = {}
        self._plans: dict[tuple[JobId, int], StoredPlan] = {}

    async def read(self, connection: AsyncConnection, jobs: ColumnElement[bool], nodes: ColumnElement[bool]) -> Cluster:
        """Return the chosen jobs and nodes, as of the connection's snapshot. The nodes of a job that are not chosen are
        missing from its members.
        """
        node_rows = await connection.execute(
            select(Node.__table__, Slot.slot)
            .outerjoin(Slot, Slot.node_id == Node.id)
            .where(nodes)
            .order_by(Node.registered_at, Node.id)
        )
        node_views = {}
        for number, row in enumerate(node_rows, 1):
            node_views[row.id] = node_view(row, row.slot)
            if number % _NUM_AT_ONCE == 0:
                await asyncio.sleep(0)  # whoever else has something to do need not wait for all of it
        job_rows = (await connection.execute(select(Job.__table__, _COMMITTED).where(jobs))).all()
        plan_rows = await connection.execute(
            select(Generation.job_id, Generation.generation, _RESTORE_STEP, _NEWEST_PLAN)
            .join(Job, Job.id == Generation.job_id)
            .where(jobs, Generation.plan.is_not(None))
        )
        plans_of = defaultdict(list)
        for row in plan_rows:
            plans_of[row.job_id].append(row)
        members = defaultdict(list)
        for node in node_views.values():
            members[node.job_id].append(node)
        if len(self._specs) + len(self._plans) > _MAX_PARSED:
            self._specs.clear()
            self._plans.clear()
        return Cluster({row.id: self._job_view(row, members[row.id], plans_of[row.id]) for row in job_rows}, node_views)

    def _job_view(self, job: Any, members: Sequence[NodeView], plans: Sequence[Any]) -> JobView:
        return JobView(
            job_id=job.id,
            spec=self._spec(job),
            job_key=job.job_key,
            phase=JobPhase(job.phase),
            generation=job.generation,
            zero_generation=job.zero_generation,
            from_zero=job.from_zero,
            waiting_for=job.waiting_for,
            cause=job.cause,
            blocked_by=tuple(job.blocked_by),
            num_fruitless_recoveries=job.num_fruitless_recoveries,
            progress_step=job.progress_step,
            committed_step=job.committed_step,
            created_at=job.created_at,
            hold_reason=HoldReason(job.hold_reason),
            checkpoint_requests=job.checkpoint_requests,
            checkpoint_after_step=job.checkpoint_after_step,
            final_step=job.final_step,
            deleted=job.deleted_at is not None,
            slots={node.slot: node.node_id for node in members if node.slot is not None},
            standbys=tuple(node.node_id for node in members if node.slot is None),
            plan=next((self._plan(row) for row in plans if row.plan is not None), None),
            restored_steps={row.generation: row.restore_step for row in plans},
        )

    def _spec(self, job: Any) -> JobSpec:
        if job.id not in self._specs:
            self._specs[job.id] = JobSpec.model_validate(job.spec)
        return self._specs[job.id]

    def _plan(self, row: Any) -> StoredPlan:
        key = (row.job_id, row.generation)
        if key not in self._plans:
            self._plans[key] = StoredPlan.model_validate(row.plan)
        return self._plans[key]


def node_view(row: Any, slot: int | None = None) -> NodeView:
    """Return the view of a row of `nodes`."""
    return NodeView(
        node_id=row.id,
        incarnation=row.incarnation,
        hostname=row.hostname,
        labels=row.labels | row.operator_labels,
        address=Address(host=row.host, port=row.port),
        status=NodeStatus(row.status),
        judged_sequence=row.judged_sequence,
        job_id=row.job_id,
        slot=slot,
        registered_at=row.registered_at,
        cordoned=row.cordoned,
        draining=row.draining,
        removed=row.removed_at is not None,
    )
