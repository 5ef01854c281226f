"""How far a job has come, as the newest heartbeats of the nodes in its slots tell."""

from __future__ import annotations

from collections.abc import Iterator

from gemini_ft.contracts.ids import NodeId
from gemini_ft.contracts.messages import Heartbeat
from gemini_ft.coordinator.observations import Observations
from gemini_ft.coordinator.state import Cluster, JobView

__all__ = ["committed_step", "finished_step", "heartbeats", "held_step", "newest_commit"]


def committed_step(job: JobView, cluster: Cluster, seen: Observations) -> int | None:
    """The newest version known to be committed since the last start from zero."""
    newest = newest_commit(job, cluster, seen)
    known = [step for step in (job.committed_step, newest[1] if newest else None) if step is not None]
    return max(known, default=None)


def finished_step(job: JobView, cluster: Cluster, seen: Observations) -> int | None:
    """The newest step that any rank of the job's generation has finished."""
    steps = [
        status.finished_step
        for _, heartbeat in heartbeats(job, cluster, seen)
        for status in heartbeat.ranks
        if status.generation == job.generation and status.finished_step is not None
    ]
    return max(steps, default=None)


def held_step(job: JobView, cluster: Cluster, seen: Observations) -> int | None:
    """The committed step at which all ranks of the job's generation are held; None unless all of them tell the same."""
    held = {
        status.rank: status.held_step if status.held_step == status.committed_step else None
        for _, heartbeat in heartbeats(job, cluster, seen)
        for status in heartbeat.ranks
        if status.generation == job.generation
    }
    steps = set(held.values())
    return steps.pop() if len(held) == job.geometry.num_ranks and len(steps) == 1 else None


def heartbeats(job: JobView, cluster: Cluster, seen: Observations) -> Iterator[tuple[NodeId, Heartbeat]]:
    """Newest heartbeats about the job from the nodes in its slots."""
    for node_id in job.slots.values():
        sighting = seen.sighting(cluster.nodes[node_id])
        if sighting is not None and sighting.heartbeat.job_id == job.job_id:
            yield node_id, sighting.heartbeat


def newest_commit(job: JobView, cluster: Cluster, seen: Observations) -> tuple[int, int] | None:
    """(generation, step) of the newest commit that ranks tell of."""
    commits = [
        (status.generation, status.committed_step)
        for _, heartbeat in heartbeats(job, cluster, seen)
        for status in heartbeat.ranks
        if status.committed_step is not None and status.generation >= max(1, job.zero_generation)
    ]
    return max(commits, key=lambda commit: commit[1], default=None)
