"""The transitions of a job as SQL. Each runs inside one transaction and first moves the job from the expected
generation and phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import case, delete, select, text, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.expression import bindparam

from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.coordinator import actions
from gemini_ft.coordinator.state import HoldReason, JobPhase, NodeStatus
from gemini_ft.coordinator.tables import Event, Generation, Job, Node, Recovery, Slot, Version

__all__ = ["MovedOnError", "add_phases", "apply", "begin_generation", "end_job", "open_recovery", "record_event"]

_EVENTS_LOCK = 0x4745_4D46_4556
_KEEP_STOP = case((Job.hold_reason == HoldReason.STOP, Job.hold_reason), else_="")


class MovedOnError(Exception):
    """The job or node is no longer where the transition expected it; the transaction must be rolled back."""


async def apply(connection: AsyncConnection, action: actions.Transition, num_kept_versions: int) -> None:
    """Carry out one transition.

    Raises:
        MovedOnError: somebody else was first.
    """
    where = (action.job_id, action.generation)
    match action:
        case actions.Admit():
            cause = "the job starts"
            await _move(connection, action, JobPhase.FENCING, generation=action.generation + 1, cause=cause)
            await _take(connection, action.job_id, [*action.slots.values(), *action.standbys])
            await _seat(connection, action.job_id, action.slots)
            await begin_generation(connection, action.job_id, action.generation + 1, cause)
            if action.note:
                await record_event(connection, "domains_shared", action.note, (action.job_id, action.generation + 1))
        case actions.Recruit():
            await _move(connection, action, action.phase)
            await _take(connection, action.job_id, [action.node_id])
            message = f"{action.node_id} is a standby now"
            await record_event(connection, "standby_recruited", message, where, action.node_id)
        case actions.Dismiss():
            await _move(connection, action, action.phase)
            await _release(connection, action.job_id, [action.node_id])
            message = f"{action.node_id} {action.why}: it no longer serves the job"
            await record_event(connection, "standby_dismissed", message, where, action.node_id)
        case actions.BeginGeneration():
            await _move(
                connection,
                action,
                JobPhase.FENCING,
                generation=action.generation + 1,
                cause=action.cause,
                blocked_by=[],
                hold_reason=_KEEP_STOP,
                num_fruitless_recoveries=action.num_fruitless_recoveries,
                progress_step=action.progress_step,
            )
            await begin_generation(connection, action.job_id, action.generation + 1, action.cause)
            await open_recovery(
                connection,
                action.job_id,
                action.generation + 1,
                action.cause,
                finished_step=action.finished_step,
                detect_s=action.detect_s,
            )
        case actions.AssignPlan():
            await _assign(connection, action)
        case actions.CompleteRecovery():
            await _move(connection, action, JobPhase.RUNNING)
            await record_event(connection, "job_running", "every rank has finished a new step", where)
            await add_phases(connection, where, action.phases_s, outcome="completed")
        case actions.Block():
            await _move(connection, action, JobPhase.BLOCKED, cause=action.sentence, blocked_by=list(action.lost))
            await record_event(connection, "job_blocked", action.sentence, where)
        case actions.OrderHold():
            held = JobPhase.STOPPING if action.reason is HoldReason.STOP else action.phase
            await _move(connection, action, held, hold_reason=action.reason)
            await record_event(connection, "hold_ordered", f"the ranks are to be held: {action.why}", where)
        case actions.Suspend():
            await _suspend(connection, action)
        case actions.End():
            await _move(connection, action, action.ended)
            await end_job(connection, where, action.ended, action.cause)
        case actions.Explain():
            await _move(connection, action, action.phase, waiting_for=action.waiting_for)
        case actions.RecordVersion():
            await _record_version(connection, action, num_kept_versions)


async def begin_generation(connection: AsyncConnection, job_id: JobId, generation: int, cause: str) -> None:
    """Note that `generation` has begun. The caller has raised it in `jobs`, and told the cause there."""
    await connection.execute(insert(Generation).values(job_id=job_id, generation=generation, cause=cause))
    message = f"generation {generation} begins: {cause}"
    await record_event(connection, "generation_begun", message, (job_id, generation))


async def open_recovery(
    connection: AsyncConnection,
    job_id: JobId,
    generation: int,
    cause: str,
    *,
    finished_step: int | None = None,
    detect_s: float | None = None,
) -> None:
    """Open the record of a recovery, and close all that are open."""
    await _supersede(connection, job_id)
    await connection.execute(
        insert(Recovery).values(
            job_id=job_id,
            generation=generation,
            cause=cause,
            outcome="open",
            finished_step=finished_step,
            phases_ms={} if detect_s is None else _in_ms({"detect": detect_s}),
        )
    )


async def add_phases(
    connection: AsyncConnection, where: tuple[JobId, int], phases_s: Mapping[str, float], **values: Any
) -> None:
    """Add phases, and other values, to a recovery's record; nothing happens if the generation was no recovery."""
    added = bindparam("added", _in_ms(phases_s), type_=JSONB)
    await connection.execute(
        update(Recovery)
        .where(Recovery.job_id == where[0], Recovery.generation == where[1])
        .values(phases_ms=Recovery.phases_ms.op("||")(added), **values)
    )


async def end_job(connection: AsyncConnection, where: tuple[JobId, int], phase: JobPhase, cause: str) -> None:
    """End a job in `phase`: let go of its nodes, and close what is open."""
    job_id = where[0]
    values = {"phase": phase, "cause": cause, "waiting_for": "", "blocked_by": [], "hold_reason": ""}
    await connection.execute(update(Job).where(Job.id == job_id).values(**values))
    await connection.execute(update(Node).where(Node.job_id == job_id).values(job_id=None))
    await connection.execute(delete(Slot).where(Slot.job_id == job_id))
    await _supersede(connection, job_id)
    await record_event(connection, f"job_{phase}", f"the job has {phase}: {cause}", where)


async def record_event(
    connection: AsyncConnection,
    kind: str,
    message: str,
    where: tuple[JobId | None, int | None] = (None, None),
    node_id: NodeId | None = None,
) -> None:
    """Append an event."""
    # Ids must become visible in their order, or readers that follow the cursor would miss some.
    await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _EVENTS_LOCK})
    await connection.execute(
        insert(Event).values(kind=kind, message=message, job_id=where[0], generation=where[1], node_id=node_id)
    )


async def _move(connection: AsyncConnection, action: actions.Transition, phase: JobPhase, **values: Any) -> None:
    if phase is not action.phase:
        values = {"waiting_for": "", **values}
    changed = await connection.execute(
        update(Job)
        .where(Job.id == action.job_id, Job.generation == action.generation, Job.phase == action.phase)
        .values(phase=phase, **values)
    )
    if changed.rowcount == 0:
        raise MovedOnError


async def _take(connection: AsyncConnection, job_id: JobId, nodes: Sequence[NodeId]) -> None:
    free = (Node.id.in_(nodes), Node.job_id.is_(None), Node.status == NodeStatus.ALIVE, Node.cordoned.is_(False))
    taken = await connection.execute(update(Node).where(*free).values(job_id=job_id))
    if taken.rowcount != len(nodes):
        raise MovedOnError


async def _release(connection: AsyncConnection, job_id: JobId, nodes: Sequence[NodeId]) -> None:
    await connection.execute(update(Node).where(Node.id.in_(nodes), Node.job_id == job_id).values(job_id=None))


async def _seat(connection: AsyncConnection, job_id: JobId, slots: Mapping[int, NodeId]) -> None:
    rows = [{"job_id": job_id, "slot": slot, "node_id": node_id} for slot, node_id in slots.items()]
    await connection.execute(insert(Slot), rows)


async def _assign(connection: AsyncConnection, action: actions.AssignPlan) -> None:
    plan, where = action.plan, (action.job_id, action.generation)
    zero = {} if plan.restore_step is not None else {"zero_generation": action.generation}
    await _move(connection, action, JobPhase.ASSIGNED, from_zero=False, **zero)
    seated = await connection.execute(select(Slot.slot, Slot.node_id).where(Slot.job_id == action.job_id))
    replaced = {row.slot: row.node_id for row in seated if plan.slots[row.slot] != row.node_id}
    if replaced:
        sources = {node_id for having in plan.sources.values() for node_id in having}
        await _release(connection, action.job_id, [node_id for node_id in replaced.values() if node_id not in sources])
        await connection.execute(delete(Slot).where(Slot.job_id == action.job_id))
        await _seat(connection, action.job_id, plan.slots)
    await connection.execute(
        update(Generation)
        .where(Generation.job_id == action.job_id, Generation.generation == action.generation)
        .values(plan=plan.model_dump(mode="json"))
    )
    changes = [f"{plan.slots[slot]} replaces {node_id} in slot {slot}" for slot, node_id in sorted(replaced.items())]
    start = "zero" if plan.restore_step is None else f"step {plan.restore_step}"
    message = "; ".join([f"generation {action.generation} starts from {start}", *changes, *plan.notes])
    await record_event(connection, "generation_assigned", message, where)
    lost = None if plan.restore_step is None else Recovery.finished_step - plan.restore_step
    await add_phases(
        connection,
        where,
        action.phases_s,
        cause="; ".join([action.cause, *changes]),
        restored_step=plan.restore_step,
        num_steps_lost=lost,
    )


async def _supersede(connection: AsyncConnection, job_id: JobId) -> None:
    await connection.execute(
        update(Recovery).where(Recovery.job_id == job_id, Recovery.outcome == "open").values(outcome="superseded")
    )


async def _record_version(connection: AsyncConnection, action: actions.RecordVersion, num_kept: int) -> None:
    await _move(connection, action, action.phase)
    await _insert_version(connection, action.job_id, action.committed_in, action.step)
    await connection.execute(
        delete(Version).where(Version.job_id == action.job_id, Version.step <= action.step - num_kept)
    )


async def _suspend(connection: AsyncConnection, action: actions.Suspend) -> None:
    generation, cause = action.generation + 1, f"stopped by a person; step {action.final_step} is kept in memory"
    values = {"generation": generation, "cause": cause, "final_step": action.final_step, "hold_reason": ""}
    await _move(connection, action, JobPhase.SUSPENDED, **values)
    await _insert_version(connection, action.job_id, action.generation, action.final_step)
    await begin_generation(connection, action.job_id, generation, cause)
    await record_event(connection, "job_suspended", cause, (action.job_id, generation))


async def _insert_version(connection: AsyncConnection, job_id: JobId, generation: int, step: int) -> None:
    version = {"job_id": job_id, "generation": generation, "step": step}
    await connection.execute(insert(Version).values(**version).on_conflict_do_nothing())


def _in_ms(phases_s: Mapping[str, float]) -> dict[str, float]:
    return {phase: round(1000 * seconds, 1) for phase, seconds in phases_s.items()}
