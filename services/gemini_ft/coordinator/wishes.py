"""People's wishes: each is one transaction that writes what is wanted, and leaves it to the leader to make it true."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gemini_ft.contracts.errors import ConflictError, NotFoundError
from gemini_ft.contracts.handshake import new_job_key
from gemini_ft.contracts.ids import JobId, NodeId, new_job_id
from gemini_ft.contracts.messages import JobSpec
from gemini_ft.coordinator.state import Decision, HoldReason, JobPhase, NodeStatus
from gemini_ft.coordinator.tables import Job, Node
from gemini_ft.coordinator.transitions import begin_generation, end_job, open_recovery, record_event

__all__ = ["By", "Wishes", "unknown_job", "unknown_node"]


@dataclass(frozen=True, slots=True)
class By:
    """Who wishes. `check` sees the row, locked, before anything changes, and raises to refuse the wish."""

    name: str = "a person"
    check: Callable[[Any], None] | None = None


_SOMEBODY = By()


class Wishes:
    """What people want, written to Postgres together with its audit event.

    Methods about a job or node raise NotFoundError if there is none (any more), and ConflictError if the wish does
    not fit its state; a wish that is granted already changes nothing.
    """

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[AsyncConnection]]) -> None:
        """`begin` opens a transaction (an engine's), or lends one that holds more than the wish."""
        self._begin = begin

    # ---- jobs

    async def create_job(self, spec: JobSpec, by: By = _SOMEBODY) -> JobId:
        """Wish for a job; the leader finds nodes for it."""
        job_id = new_job_id()
        async with self._begin() as connection:
            await connection.execute(
                insert(Job).values(
                    id=job_id, spec=spec.model_dump(mode="json"), job_key=new_job_key(), phase=JobPhase.PENDING
                )
            )
            await record_event(connection, "job_created", f"job {spec.name!r} was created", (job_id, 0))
            await _audit(connection, by, f"create job {spec.name!r}", (job_id, 0))
        return job_id

    async def stop(self, job_id: JobId, *, now: bool = False, by: By = _SOMEBODY) -> None:
        """Let the job come to rest at a committed step, which stays in memory (`suspended`); a pending job just ends.

        `now` ends it at once in any phase, and frees its memory.
        """
        async with self._about_job(job_id, by, "stop now" if now else "stop") as (connection, job):
            phase, where = JobPhase(job.phase), (job_id, job.generation)
            if phase.outcome is not None:
                raise ConflictError(f"{job_id} has {phase} already, so it cannot be stopped", phase=phase)
            if now or phase is JobPhase.PENDING:
                await end_job(connection, where, JobPhase.STOPPED, f"{by.name} stopped the job")
            elif phase is JobPhase.SUSPENDED:
                raise ConflictError(
                    f"{job_id} is suspended already; resume it, or stop it with now=true to free its memory",
                    phase=phase,
                )
            elif job.hold_reason == HoldReason.STOP:
                return
            elif phase in (JobPhase.FENCING, JobPhase.BLOCKED):
                raise ConflictError(
                    f"{job_id} is {phase}, so there is no step to hold it at; "
                    "stop it again when it runs, or with now=true",
                    phase=phase,
                )
            else:
                values: dict[str, Any] = {"hold_reason": HoldReason.STOP}
                if phase is JobPhase.RUNNING:
                    values |= {"phase": JobPhase.STOPPING, "waiting_for": ""}
                await _set_job(connection, job_id, **values)
                await record_event(connection, "job_stopping", "the ranks are to be held after a step", where)

    async def resume(self, job_id: JobId, by: By = _SOMEBODY) -> None:
        """Let a suspended job go on from its final step."""
        async with self._about_job(job_id, by, "resume") as (connection, job):
            if job.phase != JobPhase.SUSPENDED:
                raise ConflictError(f"{job_id} is {job.phase}, not suspended: it cannot be resumed", phase=job.phase)
            await _begin_again(
                connection, job, f"{by.name} resumed the job", final_step=None, finished_step=job.final_step
            )

    async def checkpoint(self, job_id: JobId, newest_step: int | None, by: By = _SOMEBODY) -> int:
        """Ask all ranks for a version newer than `newest_step`, which the ranks have finished already. Returns the
        number of the request.
        """
        async with self._about_job(job_id, by, "checkpoint") as (connection, job):
            if JobPhase(job.phase) not in (JobPhase.ASSIGNED, JobPhase.RUNNING):
                raise ConflictError(
                    f"{job_id} is {job.phase}: only ranks that run can make a checkpoint", phase=job.phase
                )
            number = int(job.checkpoint_requests) + 1
            after = -1 if newest_step is None else newest_step
            await _set_job(connection, job_id, checkpoint_requests=number, checkpoint_after_step=after)
        return number

    async def decide(self, job_id: JobId, decision: Decision, by: By = _SOMEBODY) -> None:
        """Carry out a decision about a blocked job."""
        async with self._about_job(job_id, by, f"decision {decision}") as (connection, job):
            if job.phase != JobPhase.BLOCKED:
                raise ConflictError(
                    f"{job_id} is {job.phase}, not blocked: there is nothing to decide", phase=job.phase
                )
            if decision is Decision.STOP:
                reason = f"{by.name} stopped the blocked job"
                await end_job(connection, (job_id, job.generation), JobPhase.STOPPED, reason)
                return
            values: dict[str, Any] = {
                "from_zero": True,
                "progress_step": None,
                "blocked_by": [],
                "checkpoint_after_step": None,
            }
            await _begin_again(connection, job, f"{by.name} decided to restart from zero", **values)

    async def delete(self, job_id: JobId, *, force: bool = False, by: By = _SOMEBODY) -> None:
        """Hide a job that is pending, suspended or has ended; its members free their memory. `force` ends any other."""
        async with self._about_job(job_id, by, "delete") as (connection, job):
            phase = JobPhase(job.phase)
            if phase.outcome is None:
                if not force and phase not in (JobPhase.PENDING, JobPhase.SUSPENDED):
                    raise ConflictError(
                        f"{job_id} is {phase}; stop it first, or delete it with force=true", phase=phase
                    )
                await end_job(connection, (job_id, job.generation), JobPhase.STOPPED, f"{by.name} deleted the job")
            await _set_job(connection, job_id, deleted_at=func.now())

    # ---- nodes

    async def cordon(self, node_id: NodeId, by: By = _SOMEBODY) -> None:
        """Give the node no new slot and no standby's part."""
        async with self._about_node(node_id, by, "cordon") as (connection, _):
            await _set_node(connection, node_id, cordoned=True)

    async def uncordon(self, node_id: NodeId, by: By = _SOMEBODY) -> None:
        """Take `cordon` and `drain` back."""
        async with self._about_node(node_id, by, "uncordon") as (connection, _):
            await _set_node(connection, node_id, cordoned=False, draining=False)

    async def drain(self, node_id: NodeId, by: By = _SOMEBODY) -> None:
        """Cordon the node, and let its job replace it without losing a step."""
        async with self._about_node(node_id, by, "drain") as (connection, _):
            await _set_node(connection, node_id, cordoned=True, draining=True)

    async def relabel(self, node_id: NodeId, labels: Mapping[str, str | None], by: By = _SOMEBODY) -> None:
        """Set labels over those of the agent; None takes back what an operator has set."""
        async with self._about_node(node_id, by, f"relabel {dict(labels)}") as (connection, node):
            merged = {key: value for key, value in {**node.operator_labels, **labels}.items() if value is not None}
            await _set_node(connection, node_id, operator_labels=merged)

    async def remove(self, node_id: NodeId, *, is_silent: bool, by: By = _SOMEBODY) -> None:
        """Forget a node that serves no job, or that is failed or silent; its job takes it for lost. Its id is refused
        from now on.
        """
        async with self._about_node(node_id, by, "remove") as (connection, node):
            if node.job_id is not None and node.status != NodeStatus.FAILED and not is_silent:
                raise ConflictError(f"{node_id} is alive and serves {node.job_id}; drain it first", job_id=node.job_id)
            await _set_node(
                connection, node_id, removed_at=func.now(), status=NodeStatus.FAILED, cordoned=True, draining=False
            )
            await record_event(
                connection, "node_removed", f"{node_id} was removed", (node.job_id, None), node_id=node_id
            )

    # ---- one wish

    @asynccontextmanager
    async def _about_job(self, job_id: JobId, by: By, wish: str) -> AsyncIterator[tuple[AsyncConnection, Any]]:
        query = select(Job.__table__).where(Job.id == job_id, Job.deleted_at.is_(None)).with_for_update()
        async with self._begin() as connection:
            job = (await connection.execute(query)).one_or_none()
            if job is None:
                raise unknown_job(job_id)
            if by.check is not None:
                by.check(job)
            yield connection, job
            await _audit(connection, by, wish, (job_id, job.generation))

    @asynccontextmanager
    async def _about_node(self, node_id: NodeId, by: By, wish: str) -> AsyncIterator[tuple[AsyncConnection, Any]]:
        query = select(Node.__table__).where(Node.id == node_id, Node.removed_at.is_(None)).with_for_update()
        async with self._begin() as connection:
            node = (await connection.execute(query)).one_or_none()
            if node is None:
                raise unknown_node(node_id)
            if by.check is not None:
                by.check(node)
            yield connection, node
            await _audit(connection, by, wish, (node.job_id, None), node_id)


def unknown_job(job_id: str) -> NotFoundError:
    """Return the error about a job that does not exist, or was deleted."""
    return NotFoundError(f"there is no job {job_id}; GET /v1/jobs lists the jobs", job_id=job_id)


def unknown_node(node_id: str) -> NotFoundError:
    """Return the error about a node that does not exist, or was removed."""
    return NotFoundError(f"there is no node {node_id}; GET /v1/nodes lists the nodes", node_id=node_id)


async def _audit(
    connection: AsyncConnection,
    by: By,
    wish: str,
    where: tuple[JobId | None, int | None],
    node_id: NodeId | None = None,
) -> None:
    """Record the wish. To be done last, as all events are: what follows an event must not wait for a row."""
    await record_event(connection, f"audit_{wish.partition(' ')[0]}", f"{by.name}: {wish}", where, node_id)


async def _begin_again(
    connection: AsyncConnection, job: Any, cause: str, *, finished_step: int | None = None, **values: Any
) -> None:
    """Begin the next generation because a person wants it."""
    generation = job.generation + 1
    values |= {"generation": generation, "phase": JobPhase.FENCING, "cause": cause, "waiting_for": ""}
    values |= {"hold_reason": HoldReason.NONE, "num_fruitless_recoveries": 0}
    await _set_job(connection, job.id, **values)
    await begin_generation(connection, job.id, generation, cause)
    await open_recovery(connection, job.id, generation, cause, finished_step=finished_step)


async def _set_job(connection: AsyncConnection, job_id: JobId, **values: Any) -> None:
    await connection.execute(update(Job).where(Job.id == job_id).values(**values))


async def _set_node(connection: AsyncConnection, node_id: NodeId, **values: Any) -> None:
    await connection.execute(update(Node).where(Node.id == node_id).values(**values))
