"""`/v1/nodes`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from gemini_ft.contracts.api import LabelsRequest, NodeModel
from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.coordinator.api.access import Admin, Viewer
from gemini_ft.coordinator.api.answers import answer
from gemini_ft.coordinator.api.changes import CHANGED, READ, Change, RepeatableChange
from gemini_ft.coordinator.api.paging import BY_TIME_AND_ID, Cursor, Limit, Page, after, page_of
from gemini_ft.coordinator.api.problems import problems
from gemini_ft.coordinator.api.reading import node_of
from gemini_ft.coordinator.api.services import Api
from gemini_ft.coordinator.api.shapes import node_etag, node_model
from gemini_ft.coordinator.state import NodeStatus
from gemini_ft.coordinator.views import node_view
from gemini_ft.coordinator.wishes import unknown_node

__all__ = ["router"]

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])
_CHANGED: dict[str, Any] = {"response_model": NodeModel, "responses": CHANGED}
LabelFilter = Annotated[str, Query(max_length=130, pattern=r"^[^=\x00]+=[^\x00]*$")]


@router.get("", response_model=Page[NodeModel])
async def list_nodes(
    api: Api,
    principal: Viewer,
    status: NodeStatus | None = None,
    job_id: JobId | None = None,
    label: Annotated[list[LabelFilter], Query(max_length=20, description="NAME=VALUE; all must match")] = [],  # noqa: B006
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response:
    """The nodes, the longest known first. A token that is bound to jobs sees their nodes."""
    newest = after(cursor, BY_TIME_AND_ID)
    labels = [(name, value) for name, _, value in (pair.partition("=") for pair in label)]
    nodes = []
    for node in (await api.coordinator.view.recent()).nodes.values():
        if (
            not node.removed
            and (newest is None or (node.registered_at, node.node_id) > newest)
            and (status is None or node.status is status)
            and (job_id is None or node.job_id == job_id)
            and principal.may_touch(node.job_id)
            and all(node.labels.get(name) == value for name, value in labels)
        ):
            nodes.append(node)
            if len(nodes) > limit:
                break
    seen = api.coordinator.seen
    return answer(
        page_of(nodes, limit, lambda node: (node.registered_at, node.node_id), lambda node: node_model(node, seen))
    )


@router.get("/{node_id}", response_model=NodeModel, responses=READ)
async def get_node(node_id: NodeId, api: Api, principal: Viewer) -> Response:
    """One node."""
    node = await node_of(api.coordinator, node_id)
    if not principal.may_touch(node.job_id):
        raise unknown_node(node_id)
    return answer(node_model(node, api.coordinator.seen), etag=node_etag(node))


@router.patch("/{node_id}", **_CHANGED)
async def relabel_node(node_id: NodeId, request: LabelsRequest, change: Change, _: Admin) -> Response:
    """Set labels over those of the agent."""
    return await change.of_node(node_id, lambda wishes, by: wishes.relabel(node_id, request.labels, by))


@router.post("/{node_id}/cordon", **_CHANGED)
async def cordon_node(node_id: NodeId, change: RepeatableChange, _: Admin) -> Response:
    """Give a node no new slot and no standby's part."""
    return await change.of_node(node_id, lambda wishes, by: wishes.cordon(node_id, by))


@router.post("/{node_id}/uncordon", **_CHANGED)
async def uncordon_node(node_id: NodeId, change: RepeatableChange, _: Admin) -> Response:
    """Take cordon and drain back."""
    return await change.of_node(node_id, lambda wishes, by: wishes.uncordon(node_id, by))


@router.post("/{node_id}/drain", **_CHANGED)
async def drain_node(node_id: NodeId, change: RepeatableChange, _: Admin) -> Response:
    """Cordon a node, and let its job replace it without losing a step."""
    return await change.of_node(node_id, lambda wishes, by: wishes.drain(node_id, by))


@router.delete("/{node_id}", status_code=204, responses=problems(404, 409, 412))
async def remove_node(node_id: NodeId, api: Api, change: Change, _: Admin) -> Response:
    """Forget a node that serves no job, or that has failed or is silent. Its id is never issued again."""
    node = await node_of(api.coordinator, node_id)
    is_silent = api.coordinator.seen.is_silent(node, api.coordinator.settings.silence.total_seconds())
    return await change.gone(
        lambda wishes, by: wishes.remove(node_id, is_silent=is_silent, by=by), lambda row: node_etag(node_view(row))
    )
