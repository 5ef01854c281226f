"""What registration and the leader read and write. Every change of a job is one transaction that compares the
generation and phase it expects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from gemini_ft.contracts.errors import NotFoundError
from gemini_ft.contracts.ids import JobId, NodeId, new_node_id
from gemini_ft.contracts.messages import Register, Verdict, VerdictKind
from gemini_ft.coordinator import actions
from gemini_ft.coordinator.state import Cluster, JobPhase, NodeStatus, NodeView
from gemini_ft.coordinator.tables import Job, Node
from gemini_ft.coordinator.transitions import (
    MovedOnError,
    add_phases,
    apply,
    record_event,
)
from gemini_ft.coordinator.views import ClusterReader, node_view

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
        self._reader = ClusterReader()

    # ---- reading

    async def load(self, job_ids: Collection[JobId] = ()) -> Cluster:
        """Read all nodes and all open jobs, plus the jobs in `job_ids`, as of one instant.

        Nodes that were removed are left out, unless their job has not let go of them yet.
        """
        jobs = or_(Job.phase.in_(_OPEN_PHASES), Job.id.in_(job_ids))
        nodes = or_(Node.removed_at.is_(None), Node.job_id.is_not(None))
        async with self._snapshots.begin() as connection:
            return await self._reader.read(connection, jobs, nodes)

    # ---- nodes

    async def register(self, request: Register, *, may_replace: Collection[str]) -> NodeView | None:
        """Issue or confirm an identity; None if it belongs to a living process of another address.

        `may_replace` holds the incarnations that are known to be silent. A node id that is presented from the address
        that it is known by is confirmed: nobody else can listen there.

        Raises:
            NotFoundError: the id was not issued by this coordinator, or the node was removed.
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
            if node is not None and node.removed_at is not None:
                raise NotFoundError(
                    f"node {node.id}, presented by {request.hostname} at {address.host}:{address.port}, was removed "
                    "from this cluster; remove node.json from the agent's state folder to be issued a new id",
                    node_id=node.id,
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
        return node_view(row)

    async def find_node(self, node_id: NodeId) -> NodeView | None:
        """Read one node."""
        rows = await self._rows(select(Node.__table__).where(Node.id == node_id))
        return node_view(rows[0]) if rows else None

    async def record_verdict(self, verdict: Verdict) -> bool:
        """Keep the detector's verdict about a node's present life."""
        status = _STATUS_OF_VERDICT[verdict.kind]
        async with self._engine.begin() as connection:
            changed = await connection.execute(
                update(Node)
                .where(Node.id == verdict.node_id, Node.incarnation == verdict.incarnation, Node.status != status)
                .where(Node.removed_at.is_(None))
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
                .where(Node.removed_at.is_(None))
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
