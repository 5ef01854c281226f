"""Nodes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from gemini_ft.cli._text import format_bytes
from gemini_ft.cli.render.cells import NONE, facts, moment, number, pairs, printable, status, table
from gemini_ft.contracts.api import NodeModel

__all__ = ["node_details", "nodes_table"]


def nodes_table(nodes: Sequence[NodeModel]) -> Table:
    """One line a node."""
    shown = table("node", "name", "status", "heard", "job", ">slot", "memory", "labels")
    for node in nodes:
        shown.add_row(
            node.node_id,
            printable(node.name if node.name != node.node_id else node.hostname),
            status(node.status) + _orders(node),
            _heard(node),
            node.job_id or NONE,
            _seat(node),
            _memory(node),
            pairs(node.labels),
        )
    return shown


def node_details(node: NodeModel) -> Group:
    """Everything about one node."""
    head = facts(
        {
            "node": node.node_id,
            "host": printable(node.hostname),
            "address": f"{node.address.host}:{node.address.port}",
            "status": status(node.status) + _orders(node),
            "heard": _heard(node),
            "job": node.job_id or "",
            "slot": _seat(node) if node.job_id else "",
            "memory": _memory(node),
            "labels": pairs(node.labels),
            "registered": moment(node.registered_at),
        }
    )
    ranks = table(">rank", ">generation", ">pid", "state", ">finished", ">committed")
    for rank in node.ranks:
        ranks.add_row(
            number(rank.rank),
            number(rank.generation),
            number(rank.pid),
            rank.state,
            number(rank.finished_step),
            number(rank.committed_step),
        )
    return Group(head, "", ranks) if node.ranks else Group(head)


def _orders(node: NodeModel) -> str:
    if node.draining:
        return ", drained" if node.job_id is None else ", draining"
    return ", cordoned" if node.cordoned else ""


def _heard(node: NodeModel) -> str:
    return NONE if node.heard_s_ago is None else f"{node.heard_s_ago:.1f} s ago"


def _seat(node: NodeModel) -> str:
    if node.slot is not None:
        return str(node.slot)
    return NONE if node.job_id is None else "standby"


def _memory(node: NodeModel) -> str:
    if not node.store_capacity_bytes:
        return NONE
    return f"{format_bytes(node.store_used_bytes)} of {format_bytes(node.store_capacity_bytes)}"
