"""`gemini-ft nodes`."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from gemini_ft.cli.config import ContextName, connect
from gemini_ft.cli.job_options import parse_pairs
from gemini_ft.cli.output import AsJson, Limit, Watch, show, tell
from gemini_ft.contracts.api import NodeModel, NodeStatus
from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["app"]

app = typer.Typer(help="Look at nodes, label, cordon, drain and remove them.", no_args_is_help=True)

NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Id of the node.")]


@app.command("list")
def list_nodes(
    status: Annotated[NodeStatus | None, typer.Option(help="Only nodes of this status.")] = None,
    job: Annotated[str | None, typer.Option(help="Only nodes of this job.", show_default=False)] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only nodes with this label, or with all of these.")
    ] = None,
    limit: Limit = 1000,
    watch: Watch = False,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """List nodes, the longest known first.

    \b
    Examples:
      gemini-ft nodes list --label rack=r1 --watch
      gemini-ft nodes list --job job-0123456789 --json
    """
    from gemini_ft.cli.render.nodes import nodes_table

    labels = parse_pairs(label or [], "--label")
    with connect(context, watch=watch) as client:
        show(
            lambda: list(islice(client.nodes(status=status, job_id=job, labels=labels), limit)),
            nodes_table,
            as_json=as_json,
            watch=watch,
        )


@app.command("get")
def get_node(node_id: NodeId, watch: Watch = False, context: ContextName = "", as_json: AsJson = False) -> None:
    """Show one node and its ranks.

    \b
    Example:
      gemini-ft nodes get node-0123456789
    """
    from gemini_ft.cli.render.nodes import node_details

    with connect(context, watch=watch) as client:
        show(lambda: client.node(node_id), node_details, as_json=as_json, watch=watch)


@app.command("label")
def label_node(
    node_id: NodeId,
    labels: Annotated[list[str], typer.Argument(metavar="NAME=VALUE|NAME-...", help="Labels to set, or to take back.")],
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Set labels over those of the agent; NAME- takes back what an operator has set.

    \b
    Examples:
      gemini-ft nodes label node-0123456789 zone=a rack=r1
      gemini-ft nodes label node-0123456789 rack-
    """
    with connect(context) as client:
        _changed(client.relabel_node(node_id, _labels(labels)), as_json=as_json)


@app.command("cordon")
def cordon_node(node_id: NodeId, context: ContextName = "", as_json: AsJson = False) -> None:
    """Give a node no new slot and no standby's part; what runs there stays.

    \b
    Example:
      gemini-ft nodes cordon node-0123456789
    """
    with connect(context) as client:
        _changed(client.cordon_node(node_id), as_json=as_json)


@app.command("uncordon")
def uncordon_node(node_id: NodeId, context: ContextName = "", as_json: AsJson = False) -> None:
    """Take cordon and drain back.

    \b
    Example:
      gemini-ft nodes uncordon node-0123456789
    """
    with connect(context) as client:
        _changed(client.uncordon_node(node_id), as_json=as_json)


@app.command("drain")
def drain_node(node_id: NodeId, context: ContextName = "", as_json: AsJson = False) -> None:
    """Cordon a node, and let its job replace it without losing a step.

    \b
    Example:
      gemini-ft nodes drain node-0123456789 && gemini-ft nodes get node-0123456789 --watch
    """
    with connect(context) as client:
        _changed(client.drain_node(node_id), as_json=as_json)


@app.command("remove")
def remove_node(node_id: NodeId, context: ContextName = "") -> None:
    """Forget a node that serves no job, or that has failed or is silent. Its id is never issued again.

    \b
    Example:
      gemini-ft nodes remove node-0123456789
    """
    with connect(context) as client:
        client.remove_node(node_id)
    tell(f"{node_id} was removed")


def _labels(given: list[str]) -> dict[str, str | None]:
    taken_back = [name.removesuffix("-") for name in given if name.endswith("-") and "=" not in name]
    if not all(taken_back):
        raise ConfigurationError("a label to be taken back has no name; give NAME-")
    pairs = [pair for pair in given if "=" in pair or not pair.endswith("-")]
    return {**dict.fromkeys(taken_back), **parse_pairs(pairs, "a label")}


def _changed(node: NodeModel, *, as_json: bool) -> None:
    from gemini_ft.cli.render.nodes import node_details

    show(lambda: node, node_details, as_json=as_json, watch=False)
