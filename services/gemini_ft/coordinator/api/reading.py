"""Jobs and nodes as the process's shared reading of the database has them, and the rest from the tables."""

from __future__ import annotations

from collections.abc import Collection

from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.state import Cluster, JobView, NodeView
from gemini_ft.coordinator.wishes import unknown_job, unknown_node

__all__ = ["job_and_nodes", "jobs_and_nodes", "node_of"]


async def jobs_and_nodes(coordinator: Coordinator, job_ids: Collection[JobId]) -> dict[JobId, tuple[JobView, Cluster]]:
    """Return those of these jobs that exist, each with a cluster that has its nodes.

    Open jobs are in the shared reading. Of ended ones, of which there may be any number, the tables are asked.
    """
    shared = await coordinator.view.recent()
    missing = [job_id for job_id in job_ids if job_id not in shared.jobs]
    read = await coordinator.queries.jobs(missing) if missing else None
    found = {}
    for job_id in job_ids:
        cluster = shared if read is None or job_id in shared.jobs else read
        job = cluster.jobs.get(job_id)
        if job is not None and not job.deleted:
            found[job_id] = (job, cluster)
    return found


async def job_and_nodes(coordinator: Coordinator, job_id: JobId) -> tuple[JobView, Cluster]:
    """Return one job, with a cluster that has its nodes.

    Raises:
        NotFoundError: there is no such job, or it was deleted.
    """
    found = await jobs_and_nodes(coordinator, [job_id])
    if job_id not in found:
        raise unknown_job(job_id)
    return found[job_id]


async def node_of(coordinator: Coordinator, node_id: NodeId) -> NodeView:
    """Return one node.

    Raises:
        NotFoundError: there is no such node, or it was removed.
    """
    node = (await coordinator.view.recent()).nodes.get(node_id)
    if node is None or node.removed:
        raise unknown_node(node_id)
    return node
