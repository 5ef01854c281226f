"""Who holds what of one version."""

from __future__ import annotations

from gemini_ft.contracts.api import HolderModel, RankVersionModel, VersionDetailModel
from gemini_ft.contracts.errors import NotFoundError
from gemini_ft.contracts.ids import JobId
from gemini_ft.contracts.messages import Placement
from gemini_ft.coordinator.api.reading import job_and_nodes
from gemini_ft.coordinator.api.shapes import heartbeats
from gemini_ft.coordinator.observations import Observations
from gemini_ft.coordinator.progress import committed_step
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.state import Cluster, JobView

__all__ = ["version_detail"]


async def version_detail(coordinator: Coordinator, job_id: JobId, step: int) -> VersionDetailModel:
    """Show a version that was recorded or restored, or that ranks have sealed or committed by now.

    Raises:
        NotFoundError: there is no such job or version.
    """
    job, cluster = await job_and_nodes(coordinator, job_id)
    row = await coordinator.queries.version(job_id, step)
    sealed = _sealed_ranks(job, cluster, coordinator.seen, step)
    newest = committed_step(job, cluster, coordinator.seen)
    is_newest = newest is not None and step == newest
    is_committed = row is not None or is_newest or step in job.restored_steps.values()
    if not is_committed and not sealed:
        raise NotFoundError(f"{job_id} has no version of step {step}, as far as it is known", job_id=job_id)
    is_in_memory = job.phase.outcome is None and (newest is None or step >= newest)
    if is_in_memory or row is None:
        plan, slots = job.plan, dict(job.slots)
    else:
        found = await coordinator.queries.plan(job_id, row.generation)
        plan = None if found is None else found[1]
        slots = {} if plan is None else dict(plan.slots)
    placement: Placement = {} if plan is None else plan.placement
    ranks = [
        RankVersionModel(
            rank=rank,
            is_sealed_everywhere=is_committed or rank in sealed,
            holders=[_holder(job, cluster, coordinator.seen, slots, holder, rank, step) for holder in placement[slot]],
        )
        for slot in sorted(placement)
        for rank in job.geometry.ranks_of(slot)
        if slots
    ]
    return VersionDetailModel(
        step=step,
        generation=row.generation if row is not None else None,
        committed_at=row.committed_at if row is not None else None,
        is_committed=is_committed,
        is_in_memory=is_in_memory,
        ranks=ranks,
    )


def _sealed_ranks(job: JobView, cluster: Cluster, seen: Observations, step: int) -> set[int]:
    """Ranks that tell that this very version, or their newest one behind it, is sealed on all its holders."""
    return {
        status.rank
        for _, heartbeat in heartbeats(job, cluster, seen).values()
        for status in heartbeat.ranks
        if status.sealed_everywhere_step == step
    }


def _holder(
    job: JobView, cluster: Cluster, seen: Observations, slots: dict[int, str], slot: int, rank: int, step: int
) -> HolderModel:
    node_id = slots[slot]
    node = cluster.nodes.get(node_id)
    inventory = None if node is None else seen.inventory(job.job_id, job.generation, node)
    held = () if inventory is None else inventory.held
    digest = next((copy.shard_digest for copy in held if (copy.rank, copy.step) == (rank, step)), None)
    return HolderModel(slot=slot, node_id=node_id, digest=digest)
