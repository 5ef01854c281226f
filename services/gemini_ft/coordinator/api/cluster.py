"""`/v1/cluster`: everything in a few numbers."""

from __future__ import annotations

from collections import Counter

from fastapi import APIRouter, Response

from gemini_ft.contracts.api import CallerModel, ClusterModel, JobPhase, NodeStatus
from gemini_ft.coordinator.api.access import Viewer
from gemini_ft.coordinator.api.answers import answer
from gemini_ft.coordinator.api.services import Api
from gemini_ft.coordinator.reconcile import free_nodes

__all__ = ["router"]

router = APIRouter(tags=["cluster"])


@router.get("/v1/cluster", response_model=ClusterModel)
async def get_cluster(api: Api, principal: Viewer) -> Response:
    """Everything in a few numbers."""
    coordinator = api.coordinator
    cluster = await coordinator.view.recent()
    nodes = [node for node in cluster.nodes.values() if not node.removed and principal.may_touch(node.job_id)]
    sightings = [coordinator.seen.sighting(node) for node in nodes]
    beats = [sighting.heartbeat for sighting in sightings if sighting is not None]
    free = free_nodes(cluster, coordinator.seen, coordinator.settings)
    by_status = Counter(node.status for node in nodes)
    by_phase = await coordinator.queries.num_jobs_by_phase(principal.job_ids)
    job_ids = None if principal.job_ids is None else sorted(principal.job_ids)
    return answer(
        ClusterModel(
            is_leader=coordinator.leadership.held,
            num_nodes=len(nodes),
            num_nodes_by_status={status: by_status[status] for status in NodeStatus},
            num_free_nodes=sum(principal.may_touch(node.job_id) for node in free),
            num_cordoned_nodes=sum(node.cordoned for node in nodes),
            num_draining_nodes=sum(node.draining for node in nodes),
            num_jobs_by_phase={phase: by_phase.get(phase, 0) for phase in JobPhase},
            store_used_bytes=sum(beat.store_used_bytes for beat in beats),
            store_capacity_bytes=sum(beat.store_capacity_bytes for beat in beats),
            newest_event_id=await coordinator.queries.newest_event_id(),
            caller=CallerModel(name=principal.name, role=principal.role, job_ids=job_ids),
        )
    )
