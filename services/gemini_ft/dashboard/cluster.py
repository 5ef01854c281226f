"""The cluster: its nodes by rack, its jobs, and for a node or rank who holds its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from nicegui import ui

from gemini_ft.contracts.api import JobModel, NodeModel, NodeStatus, PlacementModel, VersionDetailModel
from gemini_ft.contracts.errors import GeminiError
from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.dashboard.actions import node_actions
from gemini_ft.dashboard.cluster_map import ClusterMap, Legend
from gemini_ft.dashboard.dashboard import Dashboard, Visit
from gemini_ft.dashboard.feed_state import FeedState
from gemini_ft.dashboard.frame import frame
from gemini_ft.dashboard.map_model import Arc, arcs_of_node, arcs_of_rank, cluster_picture, look_of
from gemini_ft.dashboard.parts import ActionBar, Rebuilt, heading, panel
from gemini_ft.dashboard.tables import DataTable, Markup, PlainTable, figures, plain_table
from gemini_ft.dashboard.words import memory, node_name, phase_text, size, step

__all__ = ["install"]


def install(dashboard: Dashboard) -> None:
    """Add the page."""

    @ui.page("/")
    def cluster(request: Request, node: str = "") -> Response | None:
        visit = dashboard.visit(request)
        if visit is None:
            return RedirectResponse("/login", 303)
        with frame(visit, "/", "Cluster"):
            visit.shows.append(_ClusterPage(visit, node or None).show)
        return None


class _ClusterPage:
    def __init__(self, visit: Visit, picked: NodeId | None) -> None:
        self._visit = visit
        self._filter = ""
        state = visit.feed.state
        heading("Cluster", 1)
        with panel("In numbers"):
            self._numbers = PlainTable()
        with panel("Nodes by rack", "w8"):
            self._map = ClusterMap(
                cluster_picture(state.nodes.values(), state.jobs),
                "Nodes by rack; arrow keys move, Enter shows details",
                self.pick,
            )
            Legend()
        self._details = _Details(visit, self._map, picked)
        with panel("Jobs"):
            columns = {"name": "job", "phase": "phase", "generation": "generation", "finished": "finished step"}
            columns |= {"committed": "committed version", "nodes": "nodes", "says": "what it says", "id": "id"}
            self._jobs = DataTable("Jobs", columns)
        with panel("All nodes"):
            search = ui.input(
                placeholder="name, id, rack, state or job", on_change=lambda event: self.find(event.value)
            )
            search.props('dense outlined clearable aria-label="Find nodes"')
            columns = {"name": "node", "state": "state", "where": "rack", "job": "job", "slot": "slot"}
            columns |= {"memory": "checkpoint memory", "heard": "heard", "id": "id"}
            self._nodes = DataTable("All nodes", columns, on_act=lambda _, node_id: self.pick(node_id))

    def pick(self, node_id: NodeId) -> None:
        self._details.pick(node_id)
        self._visit.again()

    def find(self, text: str | None) -> None:
        self._filter = (text or "").casefold()
        self._nodes.begin_again()
        self._show_nodes(self._visit.feed.state)

    async def show(self, state: FeedState) -> None:
        self._numbers.show(figures(_numbers(state)))
        self._map.show(cluster_picture(state.nodes.values(), state.jobs))
        self._jobs.show([_job_row(job) for job in state.jobs.values()])
        self._show_nodes(state)
        await self._details.show(state)

    def _show_nodes(self, state: FeedState) -> None:
        rows = [_node_row(node, state) for node in state.nodes.values()]
        self._nodes.show([row for row in rows if self._filter in " ".join(map(str, row.values())).casefold()])


class _Details:
    """What is known of the node that was picked, and of the rank among its ranks."""

    def __init__(self, visit: Visit, cluster_map: ClusterMap, picked: NodeId | None) -> None:
        self._visit = visit
        self._map = cluster_map
        self._node_id = picked
        self._rank: int | None = None
        self._placements: dict[tuple[JobId, int], PlacementModel] = {}
        self._version: tuple[JobId, int, VersionDetailModel] | None = None
        with panel("Details", "w4"):
            with ui.element("div").props('aria-live="polite"'):
                self._title = ui.label()
                self._facts = PlainTable()
            self._actions = ActionBar(visit)
            self._ranks = Rebuilt("actions")
            self._holders = PlainTable()

    def pick(self, node_id: NodeId) -> None:
        if node_id != self._node_id:
            self._node_id, self._rank = node_id, None

    def pick_rank(self, rank: int | None) -> None:
        self._rank = rank
        self._visit.again()

    async def show(self, state: FeedState) -> None:
        node = state.nodes.get(self._node_id or "")
        if node is None:
            what = "Pick a node in the picture or in the table." if self._node_id is None else "This node is gone."
            self._title.text = what
            self._facts.show("")
            self._holders.show("")
            self._actions.show("", [], allowed=False)
            self._ranks.show(None, lambda: None)
            self._map.show_arcs(None, [])
            return
        self._title.text = f"{node_name(node)}: {look_of(node)}"
        self._facts.show(plain_table("What it says of itself", ("what", "value"), _facts(node, state)))
        self._actions.show(node.node_id, node_actions(node), allowed=self._visit.session.may_change_nodes)
        ranks = tuple(rank.rank for rank in node.ranks if rank.generation == node.assigned_generation)
        self._ranks.show((node.node_id, ranks, self._rank), partial(self._build_ranks, ranks))
        try:
            arcs, caption = await self._arcs(node, state)
        except GeminiError as error:
            self._holders.show(plain_table(f"Who holds its replicas is not known: {error}", ("node",), ()))
            self._map.show_arcs(node.node_id, [])
            return
        self._map.show_arcs(node.node_id, arcs)
        self._holders.show(plain_table(caption, ("node", "keeps", "of"), [_arc_row(arc, state) for arc in arcs]))

    def _build_ranks(self, ranks: Sequence[int]) -> None:
        for rank in (None, *ranks) if ranks else ():
            name = "All its shards" if rank is None else f"Rank {rank}"
            button = ui.button(name, on_click=lambda _, rank=rank: self.pick_rank(rank))
            pressed = "true" if rank == self._rank else "false"
            button.props(f'no-caps dense flat aria-pressed="{pressed}"').classes(
                "pressed" if rank == self._rank else ""
            )

    async def _arcs(self, node: NodeModel, state: FeedState) -> tuple[list[Arc], str]:
        job = state.jobs.get(node.job_id or "")
        if job is None or node.slot is None:
            return [], "It keeps no shards: it is in no slot of a job."
        if self._rank is not None and job.committed_step is not None:
            if self._version is None or self._version[:2] != (job.job_id, job.committed_step):
                found = await self._visit.api.version(job.job_id, job.committed_step)
                self._version = (job.job_id, job.committed_step, found)
            caption = f"Who holds rank {self._rank} of version {job.committed_step}"
            return arcs_of_rank(self._rank, node.node_id, self._version[2]), caption
        key = (job.job_id, job.generation)
        if key not in self._placements:
            self._placements = {key: await self._visit.api.placement(job.job_id)}
        return arcs_of_node(node, self._placements[key]), "Who holds whose replicas"


def _numbers(state: FeedState) -> dict[str, str]:
    cluster = state.cluster
    if cluster is None:
        return {}
    alive = cluster.num_nodes_by_status.get(NodeStatus.ALIVE, 0)
    unwell = cluster.num_nodes - alive
    running = {phase_text(phase): number for phase, number in cluster.num_jobs_by_phase.items() if number}
    return {
        "nodes": str(cluster.num_nodes),
        "alive": str(alive),
        "suspected or failed": str(unwell),
        "free": str(cluster.num_free_nodes),
        "cordoned": str(cluster.num_cordoned_nodes),
        "jobs": ", ".join(f"{number} {phase}" for phase, number in running.items()) or "none",
        "checkpoint memory": f"{size(cluster.store_used_bytes)} of {size(cluster.store_capacity_bytes)}",
        "coordinator": "leads" if cluster.is_leader else "stands by",
    }


def _job_row(job: JobModel) -> dict[str, Any]:
    says = f"waiting for {job.waiting_for}" if job.waiting_for else job.cause.partition("\n")[0]
    return {
        "id": job.job_id,
        "href": f"/jobs/{job.job_id}",
        "name": job.spec.name,
        "phase": phase_text(job.phase),
        "generation": job.generation,
        "finished": step(job.finished_step),
        "committed": step(job.committed_step),
        "nodes": f"{len(job.slots)} of {job.spec.num_nodes}, {len(job.standbys)} standby",
        "says": says,
    }


def _node_row(node: NodeModel, state: FeedState) -> dict[str, Any]:
    job = state.jobs.get(node.job_id or "")
    return {
        "id": node.node_id,
        "picks": True,
        "name": node_name(node),
        "state": look_of(node).value,
        "where": " / ".join(node.labels[kind] for kind in ("zone", "rack") if kind in node.labels),
        "job": "" if job is None else job.spec.name,
        "slot": "" if node.slot is None else node.slot,
        "memory": memory(node),
        "heard": "no"
        if node.heard_s_ago is None
        else "now"
        if node.heard_s_ago < 3
        else f"{node.heard_s_ago:.0f} s ago",
    }


def _facts(node: NodeModel, state: FeedState) -> list[tuple[str, str | Markup]]:
    job = state.jobs.get(node.job_id or "")
    facts: list[tuple[str, str | Markup]] = [
        ("id", node.node_id),
        ("machine", node.hostname),
        ("data plane", f"{node.address.host}:{node.address.port}"),
        ("labels", ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items())) or "none"),
        ("checkpoint memory", memory(node)),
    ]
    if job is not None:
        facts.append(("job", Markup.link(f"/jobs/{job.job_id}", job.spec.name)))
        facts.append(("part", "standby" if node.slot is None else f"slot {node.slot}"))
        facts.append(("newest version on all holders", "yes" if node.redundancy_whole else "not yet"))
    for rank in node.ranks:
        said = f"{rank.state}, step {step(rank.finished_step)}, committed {step(rank.committed_step)}"
        facts.append((f"rank {rank.rank}", said))
    return facts


def _arc_row(arc: Arc, state: FeedState) -> tuple[str, str, str]:
    names = {node_id: node_name(node) for node_id, node in state.nodes.items() if node_id in (arc.source, arc.target)}
    keeps = "replica" if arc.is_whole else "replica, not complete"
    return names.get(arc.target, arc.target), keeps, names.get(arc.source, arc.source)
