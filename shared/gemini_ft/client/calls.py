"""Every operation of the API as the request that asks for it.

Changes take `if_match`, the ETag that the job or node must still have, and POSTs take `idempotency_key`; without one
they get a key of their own, so that a request that was cut off can be repeated without being done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from gemini_ft.client.call import Call, ListCall, Query, Reply, StreamCall, new_key, query
from gemini_ft.contracts.api import (
    ClusterModel,
    Decision,
    DecisionRequest,
    EventModel,
    Health,
    JobModel,
    JobPhase,
    JobRankModel,
    LabelsRequest,
    LogModel,
    NewTokenModel,
    NewTokenRequest,
    NodeModel,
    NodeStatus,
    Page,
    PlacementModel,
    Readiness,
    RecoveryDetailModel,
    RecoveryModel,
    Role,
    StopRequest,
    TokenModel,
    VersionDetailModel,
    VersionModel,
)
from gemini_ft.contracts.messages import JobSpec

__all__ = [
    "checkpoint_job",
    "cluster",
    "cordon_node",
    "create_job",
    "create_token",
    "decide_job",
    "delete_job",
    "drain_node",
    "events",
    "follow_events",
    "follow_log",
    "health",
    "job",
    "job_and_etag",
    "jobs",
    "log",
    "node",
    "node_and_etag",
    "nodes",
    "placement",
    "ranks",
    "readiness",
    "recoveries",
    "recovery",
    "relabel_node",
    "remove_node",
    "resume_job",
    "revoke_token",
    "stop_job",
    "tokens",
    "uncordon_node",
    "version",
    "versions",
]

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

# ---- jobs


def create_job(spec: JobSpec, *, idempotency_key: str | None = None) -> Call[JobModel]:
    """Create a job; it is `pending` until enough nodes are free."""
    return _post("/v1/jobs", JobModel, spec, idempotency_key)


def jobs(
    *, phases: Sequence[JobPhase] = (), name: str | None = None, page_size: int | None = None
) -> ListCall[JobModel]:
    """The newest jobs first; no `phases`: in any."""
    return _list("/v1/jobs", JobModel, page_size, phase=list(phases), name=name)


def job(job_id: str) -> Call[JobModel]:
    """One job."""
    return _get(_path("jobs", job_id), JobModel)


def job_and_etag(job_id: str) -> Call[tuple[JobModel, str]]:
    """One job and its ETag, for `if_match`."""
    return Call("GET", _path("jobs", job_id), _tagged(JobModel))


def stop_job(
    job_id: str, *, now: bool = False, if_match: str | None = None, idempotency_key: str | None = None
) -> Call[JobModel]:
    """Let a job come to rest at a committed step, to be resumed from there; or end it at once with `now`."""
    return _post(_path("jobs", job_id, "stop"), JobModel, StopRequest(now=now), idempotency_key, if_match)


def resume_job(job_id: str, *, if_match: str | None = None, idempotency_key: str | None = None) -> Call[JobModel]:
    """Let a suspended job go on from its final step."""
    return _post(_path("jobs", job_id, "resume"), JobModel, None, idempotency_key, if_match)


def checkpoint_job(job_id: str, *, if_match: str | None = None, idempotency_key: str | None = None) -> Call[JobModel]:
    """Ask for a version newer than the newest step that was finished."""
    return _post(_path("jobs", job_id, "checkpoint"), JobModel, None, idempotency_key, if_match)


def decide_job(
    job_id: str, decision: Decision, *, if_match: str | None = None, idempotency_key: str | None = None
) -> Call[JobModel]:
    """Decide what becomes of a blocked job."""
    body = DecisionRequest(decision=decision)
    return _post(_path("jobs", job_id, "decision"), JobModel, body, idempotency_key, if_match)


def delete_job(job_id: str, *, force: bool = False, if_match: str | None = None) -> Call[None]:
    """Hide a job and free its memory; `force` ends it first."""
    return _delete(_path("jobs", job_id), query(force=True) if force else (), if_match)


# ---- what a job consists of


def placement(job_id: str) -> Call[PlacementModel]:
    """Who holds whose shards."""
    return _get(_path("jobs", job_id, "placement"), PlacementModel)


def versions(job_id: str, *, page_size: int | None = None) -> ListCall[VersionModel]:
    """The newest committed versions that were recorded."""
    return _list(_path("jobs", job_id, "versions"), VersionModel, page_size)


def version(job_id: str, step: int) -> Call[VersionDetailModel]:
    """Who holds what of a version."""
    return _get(_path("jobs", job_id, "versions", str(step)), VersionDetailModel)


def recoveries(job_id: str, *, page_size: int | None = None) -> ListCall[RecoveryModel]:
    """The newest recoveries, with their phases."""
    return _list(_path("jobs", job_id, "recoveries"), RecoveryModel, page_size)


def recovery(job_id: str, generation: int) -> Call[RecoveryDetailModel]:
    """One recovery: where every shard came from."""
    return _get(_path("jobs", job_id, "recoveries", str(generation)), RecoveryDetailModel)


def ranks(job_id: str, *, page_size: int | None = None) -> ListCall[JobRankModel]:
    """The ranks as their agents saw them last."""
    return _list(_path("jobs", job_id, "ranks"), JobRankModel, page_size)


def log(
    job_id: str,
    rank: int,
    *,
    generation: int | None = None,
    offset: int | None = None,
    tail_lines: int | None = None,
    max_bytes: int | None = None,
) -> Call[LogModel]:
    """A part of what a rank has written: from `offset` on, or else the last lines."""
    wanted = query(generation=generation, offset=offset, tail_lines=tail_lines, max_bytes=max_bytes)
    return _get(_path("jobs", job_id, "ranks", str(rank), "log"), LogModel, wanted)


def follow_log(
    job_id: str, rank: int, *, generation: int | None = None, tail_lines: int | None = None
) -> StreamCall[LogModel]:
    """What a rank writes, until the job ends; with `generation` until that one does."""

    def is_over(reply: Reply) -> bool:
        found = JobModel.model_validate_json(reply.content)
        return found.outcome is not None or (generation is not None and found.generation > generation)

    return StreamCall(
        _path("jobs", job_id, "ranks", str(rank), "log"),
        LogModel.model_validate_json,
        query(follow=True, generation=generation, tail_lines=tail_lines),
        is_over=Call("GET", _path("jobs", job_id), is_over),
    )


# ---- nodes


def nodes(
    *,
    status: NodeStatus | None = None,
    job_id: str | None = None,
    labels: Mapping[str, str] | None = None,
    page_size: int | None = None,
) -> ListCall[NodeModel]:
    """The nodes, the longest known first; all `labels` must match."""
    pairs = [f"{name}={value}" for name, value in (labels or {}).items()]
    return _list("/v1/nodes", NodeModel, page_size, status=status, job_id=job_id, label=pairs)


def node(node_id: str) -> Call[NodeModel]:
    """One node."""
    return _get(_path("nodes", node_id), NodeModel)


def node_and_etag(node_id: str) -> Call[tuple[NodeModel, str]]:
    """One node and its ETag, for `if_match`."""
    return Call("GET", _path("nodes", node_id), _tagged(NodeModel))


def relabel_node(node_id: str, labels: Mapping[str, str | None], *, if_match: str | None = None) -> Call[NodeModel]:
    """Set labels over those of the agent; None takes back what an operator has set."""
    body = LabelsRequest(labels=dict(labels))
    headers = _if_match(if_match)
    return Call("PATCH", _path("nodes", node_id), _of(NodeModel), body=body, headers=headers, repeatable=not headers)


def cordon_node(node_id: str, *, if_match: str | None = None, idempotency_key: str | None = None) -> Call[NodeModel]:
    """Give a node no new slot and no standby's part."""
    return _post(_path("nodes", node_id, "cordon"), NodeModel, None, idempotency_key, if_match)


def uncordon_node(node_id: str, *, if_match: str | None = None, idempotency_key: str | None = None) -> Call[NodeModel]:
    """Take cordon and drain back."""
    return _post(_path("nodes", node_id, "uncordon"), NodeModel, None, idempotency_key, if_match)


def drain_node(node_id: str, *, if_match: str | None = None, idempotency_key: str | None = None) -> Call[NodeModel]:
    """Cordon a node, and let its job replace it without losing a step."""
    return _post(_path("nodes", node_id, "drain"), NodeModel, None, idempotency_key, if_match)


def remove_node(node_id: str, *, if_match: str | None = None) -> Call[None]:
    """Forget a node that serves no job, or that has failed or is silent."""
    return _delete(_path("nodes", node_id), (), if_match)


# ---- events


def events(
    *, after: int = 0, job_id: str | None = None, kind: str | None = None, page_size: int | None = None
) -> ListCall[EventModel]:
    """What happened after the event with id `after`, oldest first."""

    def page(cursor: str | None) -> Call[Page[EventModel]]:
        wanted = query(after=after if cursor is None else cursor, job_id=job_id, kind=kind, limit=page_size)
        return _get("/v1/events", Page[EventModel], wanted)

    return ListCall(page)


def follow_events(
    *, after: int | None = None, job_id: str | None = None, kind: str | None = None
) -> StreamCall[EventModel]:
    """What happens after the event with id `after`, or else from now on."""

    def newest(reply: Reply) -> str:
        return str(ClusterModel.model_validate_json(reply.content).newest_event_id)

    return StreamCall(
        "/v1/events/stream",
        EventModel.model_validate_json,
        query(job_id=job_id, kind=kind),
        last_event_id="" if after is None else str(after),
        begin=Call("GET", "/v1/cluster", newest) if after is None else None,
    )


# ---- tokens


def create_token(
    name: str,
    role: Role,
    *,
    job_ids: Sequence[str] | None = None,
    lifetime: timedelta | None = None,
    idempotency_key: str | None = None,
) -> Call[NewTokenModel]:
    """Make a token. Its secret is in the first answer only: if that was lost on its way, it is None."""
    lifetime_s = None if lifetime is None else int(lifetime.total_seconds())
    wanted = None if job_ids is None else list(job_ids)
    body = NewTokenRequest(name=name, role=role, job_ids=wanted, lifetime_s=lifetime_s)
    return _post("/v1/tokens", NewTokenModel, body, idempotency_key)


def tokens(*, page_size: int | None = None) -> ListCall[TokenModel]:
    """All tokens that were made, oldest first."""
    return _list("/v1/tokens", TokenModel, page_size)


def revoke_token(token_id: str) -> Call[None]:
    """Revoke a token, from now on."""
    return _delete(_path("tokens", token_id), (), None)


# ---- the cluster


def cluster() -> Call[ClusterModel]:
    """Everything in a few numbers."""
    return _get("/v1/cluster", ClusterModel)


def health() -> Call[Health]:
    """The coordinator's process lives."""
    return _get("/healthz", Health)


def readiness() -> Call[Readiness]:
    """The coordinator can serve; raises UnavailableError, which is asked for and therefore not tried again."""
    return Call("GET", "/readyz", _of(Readiness), repeatable=False)


# ---- how they are made


def _path(*parts: str) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in ("v1", *parts))


def _of(model: type[Model]) -> Callable[[Reply], Model]:
    return lambda reply: model.model_validate_json(reply.content)


def _tagged(model: type[Model]) -> Callable[[Reply], tuple[Model, str]]:
    return lambda reply: (model.model_validate_json(reply.content), reply.headers.get("etag", ""))


def _get(path: str, model: type[Model], wanted: Query = ()) -> Call[Model]:
    return Call("GET", path, _of(model), wanted)


def _list(path: str, model: type[Model], page_size: int | None, **filters: object) -> ListCall[Model]:
    page_model = Page[model]  # type: ignore[valid-type]  # a model that is made at run time
    return ListCall(lambda cursor: _get(path, page_model, query(**filters, limit=page_size, cursor=cursor)))


def _post(
    path: str, model: type[Model], body: BaseModel | None, key: str | None, if_match: str | None = None
) -> Call[Model]:
    headers = {"Idempotency-Key": key or new_key(), **_if_match(if_match)}
    return Call("POST", path, _of(model), body=body, headers=headers)


def _delete(path: str, wanted: Query, if_match: str | None) -> Call[None]:
    return Call("DELETE", path, lambda _: None, wanted, headers=_if_match(if_match), repeatable=False)


def _if_match(etag: str | None) -> dict[str, str]:
    return {} if etag is None else {"If-Match": etag}
