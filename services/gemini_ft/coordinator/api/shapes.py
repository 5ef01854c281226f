"""Makes what the API shows from what the coordinator knows."""

from __future__ import annotations

import hashlib
from typing import Any

from gemini_ft.contracts.api import (
    EventModel,
    JobModel,
    JobRankModel,
    NodeModel,
    RankModel,
    RecoveryModel,
    VersionModel,
)
from gemini_ft.contracts.messages import Heartbeat, RankStatus
from gemini_ft.coordinator.observations import Observations
from gemini_ft.coordinator.progress import committed_step, finished_step
from gemini_ft.coordinator.state import Cluster, JobView, NodeView

__all__ = [
    "event_model",
    "heartbeats",
    "job_etag",
    "job_model",
    "job_ranks",
    "node_etag",
    "node_model",
    "recovery_model",
    "version_model",
]

_RANK_FIELDS = set(RankModel.model_fields)


def job_model(job: JobView, cluster: Cluster, seen: Observations) -> JobModel:
    """Show a job; its nodes must be in `cluster`."""
    return JobModel.model_construct(
        job_id=job.job_id,
        spec=job.spec,
        phase=job.phase,
        generation=job.generation,
        hold_reason=job.hold_reason,
        waiting_for=job.waiting_for,
        cause=job.cause,
        committed_step=committed_step(job, cluster, seen),
        finished_step=finished_step(job, cluster, seen),
        restored_step=job.plan.restore_step if job.plan is not None else None,
        final_step=job.final_step,
        checkpoint_requests=job.checkpoint_requests,
        num_recoveries_without_progress=job.num_fruitless_recoveries,
        slots=dict(job.slots),
        standbys=list(job.standbys),
        created_at=job.created_at,
    )


def job_etag(job: Any) -> str:
    """Name the state of a job, a view or a row, that people's wishes depend on; heartbeats do not change it."""
    return _etag(job.phase, job.generation, job.hold_reason, job.checkpoint_requests, job.final_step)


def heartbeats(job: JobView, cluster: Cluster, seen: Observations) -> dict[int, tuple[NodeView, Heartbeat]]:
    """Return slot -> the newest heartbeat about the job from the node in that slot."""
    found = {}
    for slot, node_id in sorted(job.slots.items()):
        node = cluster.nodes[node_id]
        sighting = seen.sighting(node)
        if sighting is not None and sighting.heartbeat.job_id == job.job_id:
            found[slot] = (node, sighting.heartbeat)
    return found


def job_ranks(job: JobView, cluster: Cluster, seen: Observations) -> list[JobRankModel]:
    """Show the ranks of a job, in their order."""
    ranks = [
        JobRankModel.model_construct(node_id=node.node_id, slot=slot, **_rank_values(status))
        for slot, (node, heartbeat) in heartbeats(job, cluster, seen).items()
        for status in heartbeat.ranks
    ]
    return sorted(ranks, key=lambda rank: (rank.rank, rank.generation))


def node_model(node: NodeView, seen: Observations) -> NodeModel:
    """Show a node."""
    told: dict[str, Any] = {}
    sighting = seen.sighting(node)
    if sighting is not None:
        heartbeat = sighting.heartbeat
        told = {
            "heard_s_ago": round(seen.age_s(sighting), 3),
            "ordered_generation": heartbeat.ordered_generation,
            "assigned_generation": heartbeat.assigned_generation,
            "launcher_pid": heartbeat.launcher_pid,
            "finished": heartbeat.finished,
            "redundancy_whole": heartbeat.redundancy_whole,
            "store_used_bytes": heartbeat.store_used_bytes,
            "store_capacity_bytes": heartbeat.store_capacity_bytes,
            "ranks": [RankModel.model_construct(**_rank_values(status)) for status in heartbeat.ranks],
        }
    return NodeModel.model_construct(
        node_id=node.node_id,
        hostname=node.hostname,
        labels=dict(node.labels),
        address=node.address,
        status=node.status,
        cordoned=node.cordoned,
        draining=node.draining,
        job_id=node.job_id,
        slot=node.slot,
        registered_at=node.registered_at,
        **told,
    )


def node_etag(node: NodeView) -> str:
    """Name the state of a node that people's wishes depend on; heartbeats do not change it."""
    return _etag(node.status, node.job_id, node.cordoned, node.draining, sorted(node.labels.items()))


def version_model(row: Any) -> VersionModel:
    """Show a recorded version."""
    return VersionModel(generation=row.generation, step=row.step, committed_at=row.committed_at)


def recovery_model(row: Any) -> RecoveryModel:
    """Show a recovery."""
    return RecoveryModel(**{name: getattr(row, name) for name in RecoveryModel.model_fields})


def event_model(row: Any) -> EventModel:
    """Show an event."""
    return EventModel.model_construct(**{name: getattr(row, name) for name in EventModel.model_fields})


def _rank_values(status: RankStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in _RANK_FIELDS}


def _etag(*parts: object) -> str:
    text = repr([str(part) for part in parts])
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:20]}"'
