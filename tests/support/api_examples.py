"""Answers of the API, of which a test says only what it is about."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from gemini_ft.contracts.api import ClusterModel, EventModel, JobModel, NodeModel, RankModel, RecoveryModel

__all__ = ["BEGIN", "cluster", "event", "job", "node", "rank", "recovery"]

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def cluster(**values: Any) -> ClusterModel:
    """A cluster of nothing."""
    empty = {name: 0 for name, field in ClusterModel.model_fields.items() if field.annotation is int}
    counts = {"num_nodes_by_status": {}, "num_jobs_by_phase": {}}
    return ClusterModel.model_validate({"is_leader": True, **empty, **counts, **values})


def node(number: int, **values: Any) -> NodeModel:
    """A free node that is alive."""
    known = {
        "node_id": f"node-{number:010x}",
        "hostname": f"host{number}",
        "labels": {},
        "address": {"host": "127.0.0.1", "port": 1000 + number},
        "status": "alive",
        "cordoned": False,
        "draining": False,
        "job_id": None,
        "slot": None,
        "registered_at": BEGIN,
        "heard_s_ago": 0.1,
    }
    return NodeModel.model_validate(known | values)


def rank(number: int, generation: int = 1, **values: Any) -> RankModel:
    """A rank that runs and has finished no step."""
    unknown = {name: None for name in RankModel.model_fields}
    known = {"rank": number, "generation": generation, "pid": 1, "state": "running", "restore_source": ""}
    return RankModel.model_validate({**unknown, **known, "num_skipped": 0, "stall_us": 0, **values})


def job(number: int = 1, *, num_nodes: int = 2, **values: Any) -> JobModel:
    """A running job of generation 1."""
    known = {
        "job_id": f"job-{number:010x}",
        "spec": {"name": f"job {number}", "num_nodes": num_nodes, "num_ranks_per_node": 1},
        "phase": "running",
        "generation": 1,
        "hold_reason": "",
        "waiting_for": "",
        "cause": "",
        "committed_step": None,
        "finished_step": None,
        "restored_step": None,
        "final_step": None,
        "checkpoint_requests": 0,
        "num_recoveries_without_progress": 0,
        "slots": {},
        "standbys": [],
        "created_at": BEGIN,
    }
    return JobModel.model_validate(known | values)


def event(number: int, kind: str, *, at_s: float = 0.0, generation: int | None = None, **values: Any) -> EventModel:
    """An event of job 1, `at_s` after BEGIN."""
    known = {
        "id": number,
        "at": BEGIN + timedelta(seconds=at_s),
        "kind": kind,
        "job_id": job().job_id,
        "node_id": None,
        "generation": generation,
        "message": kind,
    }
    return EventModel.model_validate(known | values)


def recovery(generation: int, **values: Any) -> RecoveryModel:
    """A completed recovery."""
    known = {
        "generation": generation,
        "cause": "a rank ended",
        "outcome": "completed",
        "finished_step": 10,
        "restored_step": 9,
        "num_steps_lost": 1,
        "phases_ms": {},
        "started_at": BEGIN,
    }
    return RecoveryModel.model_validate(known | values)
