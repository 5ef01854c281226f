"""All SQL of the coordinator. Every change of a job is one transaction that compares the generation and phase it
expects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, case, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gemini_ft.contracts.errors import ConflictError, NotFoundError
from gemini_ft.contracts.handshake import new_job_key
from gemini_ft.contracts.ids import JobId, NodeId, new_job_id, new_node_id
from gemini_ft.contracts.messages import Address, JobSpec, Register, Verdict, VerdictKind
from gemini_ft.coordinator import actions
from gemini_ft.coordinator.state import Cluster, Decision, JobPhase, JobView, NodeStatus, NodeView, StoredPlan
from gemini_ft.coordinator.tables import Event, Generation, Job, Node, Recovery, Slot, Version
from gemini_ft.coordinator.transitions import (
    MovedOnError,
    add_phases,
    apply,
    begin_generation,
    end_job,
    open_recovery,
    record_event,
)

__all__ = ["Store"]

_OPEN_PHASES = [phase for phase in JobPhase if phase.outcome is None]
_STATUS_OF_VERDICT = {
    VerdictKind.SUSPECTED: NodeStatus.SUSPECTED,
    VerdictKind.FAILED: NodeStatus.FAILED,
    VerdictKind.RECOVERED: NodeStatus.ALIVE,
}


class Store:
    """The coordinator's memory in Postgres. Methods that return bool return False when the expected state has moved
    on.
    """

    def __init__(self, engine: AsyncEngine, num_kept_versions: int) -> None:
        self._engine = engine
        self._snapshots = engine.execution_options(isolation_level="REPEATABLE READ")
        self._num_kept_versions = num_kept_versions

    # ---- reading

    async def load(self, job_ids: Collection[JobId] = (), *, only: JobId | None = None) -> Cluster:
        """Read all nodes and all open jobs, plus the jobs in `job_ids`, as of one instant; or the one job `only`."""
        wanted: ColumnElement[bool] = Job.id == only
        if only is None:
            wanted = or_(Job.phase.in_(_OPEN_PHASES), Job.id.in_(job_ids))
        committed = (
            select(func.max(Version.step))
            .where(Version.job_id == Job.id, Version.generation >= Job.zero_generation)
            .scalar_subquery()
        )
        newest_plan = case((Generation.generation == Job.generation, Generation.plan))
        async with self._snapshots.begin() as connection:
            nodes = await connection.execute(
                select(Node.__table__, Slot.slot).outerjoin(Slot, Slot.node_id == Node.id).order_by(Node.registered_at)
            )
            node_views = {row.id: _node_view(row, row.slot) for row in nodes}
            jobs = (
                await connection.execute(select(Job.__table__, committed.label("committed_step")).where(wanted))
            ).all()
            plans = await connection.execute(
                select(
                    Generation.job_id,
                    Generation.generation,
                    Generation.plan["restore_step"].label("restore_step"),
                    newest_plan.label("plan"),
                )
                .join(Job, Job.id == Generation.job_id)
                .where(wanted, Generation.plan.is_not(None))
            )
            plans_of: dict[JobId, list[Any]] = {job.id: [] for job in jobs}
            for row in plans:
                plans_of[row.job_id].append(row)
        return Cluster({job.id: _job_view(job, node_views.values(), plans_of[job.id]) for job in jobs}, node_views)

    async def job(self, job_id: JobId) -> tuple[JobView, Cluster]:
        """Read one job, with all nodes.

        Raises:
            NotFoundError: there is no such job.
        """
        cluster = await self.load(only=job_id)
        if job_id not in cluster.jobs:
            raise _unknown_job(job_id)
        return cluster.jobs[job_id], cluster

    async def job_ids(self, limit: int, before: JobId | None) -> list[JobId]:
        """Return the newest jobs first, those after `before` in that order."""
        query = select(Job.id).order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)
        if before is not None:
            mark = select(Job.created_at).where(Job.id == before).scalar_subquery()
            query = query.where(or_(Job.created_at < mark, (Job.created_at == mark) & (Job.id < before)))
        async with self._engine.connect() as connection:
            return list((await connection.execute(query)).scalars())

    async def versions(self, job_id: JobId, limit: int) -> list[Any]:
        """Return the newest recorded versions."""
        return await self._rows(
            select(Version.__table__)
            .where(Version.job_id == job_id)
            .order_by(Version.generation.desc(), Version.step.desc())
            .limit(limit)
        )

    async def recoveries(self, job_id: JobId, limit: int) -> list[Any]:
        """Return the newest recoveries."""
        return await self._rows(
            select(Recovery.__table__)
            .where(Recovery.job_id == job_id)
            .order_by(Recovery.generation.desc())
            .limit(limit)
        )

    async def events(self, after: int, limit: int, job_id: JobId | None) -> list[Any]:
        """Return the events after cursor `after`, oldest first."""
        query = select(Event.__table__).where(Event.id > after).order_by(Event.id).limit(limit)
        return await self._rows(query if job_id is None else query.where(Event.job_id == job_id))

    async def is_writable(self) -> bool:
        """True if this database takes writes; a standby answers reads all the same."""
        async with self._engine.connect() as connection:
            return bool((await connection.execute(text("SHOW transaction_read_only"))).scalar_one() == "off")

    # ---- people's wishes

    async def create_job(self, spec: JobSpec) -> JobId:
        """Record the wish for a job; the leader finds nodes for it."""
        job_id = new_job_id()
        async with self._engine.begin() as connection:
            await connection.execute(
                insert(Job).values(
                    id=job_id, spec=spec.model_dump(mode="json"), job_key=new_job_key(), phase=JobPhase.PENDING
                )
            )
            await record_event(connection, "job_created", f"job {spec.name!r} was created", (job_id, 0))
        return job_id

    async def stop_job(self, job_id: JobId, reason: str) -> None:
        """End a job that has not ended.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: it has ended already.
        """
        async with self._engine.begin() as connection:
            job = await _locked_job(connection, job_id)
            if JobPhase(job.phase).outcome is not None:
                raise ConflictError(f"{job_id} has {job.phase} already, so it cannot be stopped", phase=job.phase)
            await end_job(connection, (job_id, job.generation), JobPhase.STOPPED, reason)

    async def decide(self, job_id: JobId, decision: Decision) -> None:
        """Carry out a person's decision about a blocked job.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: it is not blocked.
        """
        async with self._engine.begin() as connection:
            job = await _locked_job(connection, job_id)
            if job.phase != JobPhase.BLOCKED:
                raise ConflictError(
                    f"{job_id} is {job.phase}, not blocked: there is nothing to decide", phase=job.phase
                )
            if decision is Decision.STOP:
                reason = "a person stopped the blocked job"
                await end_job(connection, (job_id, job.generation), JobPhase.STOPPED, reason)
                return
            generation, cause = job.generation + 1, "a person decided to restart from zero"
            values = {"generation": generation, "phase": JobPhase.FENCING, "from_zero": True}
            values |= {"num_fruitless_recoveries": 0, "progress_step": None, "cause": cause, "blocked_by": []}
            await connection.execute(update(Job).where(Job.id == job_id).values(**values))
            await begin_generation(connection, job_id, generation, cause)
            await open_recovery(connection, job_id, generation, cause)

    # ---- nodes

    async def register(self, request: Register, *, may_replace: Collection[str]) -> NodeView | None:
        """Issue or confirm an identity; None if it belongs to a living process of another address.

        `may_replace` holds the incarnations that are known to be silent. A node id that is presented from the address
        that it is known by is confirmed: nobody else can listen there.

        Raises:
            NotFoundError: the id was not issued by this coordinator.
        """
        address = request.address
        values = {
            "incarnation": request.incarnation,
            "hostname": request.hostname,
            "labels": request.labels,
            "host": address.host,
            "port": address.port,
        }
        async with self._engine.begin() as connection:
            known = Node.id == request.node_id if request.node_id else Node.incarnation == request.incarnation
            node = (await connection.execute(select(Node.__table__).where(known).with_for_update())).one_or_none()
            if node is None and request.node_id:
                raise NotFoundError(
                    f"node id {request.node_id}, presented by {request.hostname} at {address.host}:{address.port}, "
                    "was not issued by this coordinator; "
                    "remove node.json from the agent's state folder to be issued a new one",
                    node_id=request.node_id,
                )
            if node is None:
                node_id = new_node_id()
                await connection.execute(insert(Node).values(id=node_id, status=NodeStatus.ALIVE, **values))
                message = f"{request.hostname} at {address.host}:{address.port} is {node_id}"
                await record_event(connection, "node_registered", message, node_id=node_id)
            else:
                node_id = node.id
                if node.incarnation != request.incarnation:
                    same_address = (node.host, node.port) == (address.host, address.port)
                    if not (same_address or node.status == NodeStatus.FAILED or node.incarnation in may_replace):
                        return None
                    values |= {"status": NodeStatus.ALIVE, "judged_sequence": 0}
                    message = f"the agent of {node_id} was restarted at {address.host}:{address.port}"
                    await record_event(connection, "node_restarted", message, (node.job_id, None), node_id)
                await connection.execute(update(Node).where(Node.id == node_id).values(**values))
            row = (await connection.execute(select(Node.__table__).where(Node.id == node_id))).one()
        return _node_view(row)

    async def find_node(self, node_id: NodeId) -> NodeView | None:
        """Read one node."""
        rows = await self._rows(select(Node.__table__).where(Node.id == node_id))
        return _node_view(rows[0]) if rows else None

    async def record_verdict(self, verdict: Verdict) -> bool:
        """Keep the detector's verdict about a node's present life."""
        status = _STATUS_OF_VERDICT[verdict.kind]
        async with self._engine.begin() as connection:
            changed = await connection.execute(
                update(Node)
                .where(Node.id == verdict.node_id, Node.incarnation == verdict.incarnation, Node.status != status)
                .values(status=status, judged_sequence=verdict.sequence)
                .returning(Node.job_id)
            )
            row = changed.one_or_none()
            if row is None:
                return False
            message = f"{verdict.node_id} is {status}" + (f": {verdict.detail}" if verdict.detail else "")
            await record_event(connection, f"node_{status}", message, (row.job_id, None), verdict.node_id)
        return True

    async def revive(self, action: actions.Revive) -> bool:
        """A heartbeat contradicts the verdict."""
        async with self._engine.begin() as connection:
            changed = await connection.execute(
                update(Node)
                .where(Node.id == action.node_id, Node.incarnation == action.incarnation)
                .where(Node.status != NodeStatus.ALIVE, Node.judged_sequence < action.sequence)
                .values(status=NodeStatus.ALIVE)
            )
            if changed.rowcount:
                message = f"{action.node_id} is alive: it sent a newer heartbeat"
                await record_event(connection, "node_alive", message, node_id=action.node_id)
            return bool(changed.rowcount)

    # ---- the leader's work

    async def apply(self, action: actions.Transition) -> bool:
        """Carry out one transition; False if the job has moved on meanwhile."""
        try:
            async with self._engine.begin() as connection:
                await apply(connection, action, self._num_kept_versions)
        except MovedOnError:
            return False
        return True

    async def add_phases(self, job_id: JobId, generation: int, phases_s: Mapping[str, float]) -> None:
        """Add phases to a recovery's record."""
        async with self._engine.begin() as connection:
            await add_phases(connection, (job_id, generation), phases_s)

    async def _rows(self, query: Any) -> list[Any]:
        async with self._engine.connect() as connection:
            return list((await connection.execute(query)).all())


async def _locked_job(connection: AsyncConnection, job_id: JobId) -> Any:
    found = await connection.execute(select(Job.__table__).where(Job.id == job_id).with_for_update())
    job = found.one_or_none()
    if job is None:
        raise _unknown_job(job_id)
    return job


def _unknown_job(job_id: str) -> NotFoundError:
    return NotFoundError(f"there is no job {job_id}; GET /v1/jobs lists the jobs", job_id=job_id)


def _node_view(row: Any, slot: int | None = None) -> NodeView:
    return NodeView(
        node_id=row.id,
        incarnation=row.incarnation,
        hostname=row.hostname,
        labels=row.labels,
        address=Address(host=row.host, port=row.port),
        status=NodeStatus(row.status),
        judged_sequence=row.judged_sequence,
        job_id=row.job_id,
        slot=slot,
        registered_at=row.registered_at,
    )


def _job_view(job: Any, nodes: Iterable[NodeView], plans: Iterable[Any]) -> JobView:
    ours = [node for node in nodes if node.job_id == job.id]
    return JobView(
        job_id=job.id,
        spec=JobSpec.model_validate(job.spec),
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
        slots={node.slot: node.node_id for node in ours if node.slot is not None},
        standbys=tuple(node.node_id for node in ours if node.slot is None),
        plan=next((StoredPlan.model_validate(row.plan) for row in plans if row.plan is not None), None),
        restored_steps={row.generation: row.restore_step for row in plans},
    )
