"""The recoveries of a job, each as a waterfall of its phases."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from nicegui import ui

from gemini_ft.contracts.api import RecoveryDetailModel, RecoveryModel
from gemini_ft.contracts.errors import GeminiError
from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.dashboard.dashboard import Dashboard, Visit
from gemini_ft.dashboard.feed import collect
from gemini_ft.dashboard.feed_state import FeedState
from gemini_ft.dashboard.frame import frame
from gemini_ft.dashboard.parts import Rebuilt, heading, panel
from gemini_ft.dashboard.recovery_model import PHASE_WORDS, waterfall
from gemini_ft.dashboard.tables import Markup, PlainTable, figures, plain_table
from gemini_ft.dashboard.words import duration, node_name, step, time_of_day

__all__ = ["install"]

_NUM_SHOWN = 20


def install(dashboard: Dashboard) -> None:
    """Add the page."""

    @ui.page("/recoveries")
    def recoveries(request: Request, job: str = "") -> Response | None:
        visit = dashboard.visit(request)
        if visit is None:
            return RedirectResponse("/login", 303)
        with frame(visit, "/recoveries", "Recoveries"):
            visit.shows.append(_RecoveriesPage(visit, job or None).show)
        return None


class _RecoveriesPage:
    def __init__(self, visit: Visit, job_id: JobId | None) -> None:
        self._visit = visit
        self._job_id = job_id
        self._details: dict[tuple[JobId, int], RecoveryDetailModel] = {}
        self._asked_for: tuple[JobId, int] | None = None
        self._places: dict[int, PlainTable] = {}
        self._recoveries: list[RecoveryModel] = []
        heading("Recoveries", 1)
        with panel("Of which job"):
            self._choice = ui.select({}, label="job", on_change=lambda event: self._choose(event.value))
            self._choice.props('dense outlined aria-label="Job"').style("min-width: 20em")
            self._says = ui.label().props('role="status"')
        self._list = Rebuilt("w12 recoveries")

    def _choose(self, job_id: JobId | None) -> None:
        if job_id is not None and job_id != self._job_id:
            self._job_id = job_id
            self._visit.again()

    async def show(self, state: FeedState) -> None:
        options = {job_id: f"{job.spec.name} ({job_id})" for job_id, job in state.jobs.items()}
        if self._job_id is None:
            recovered = [job_id for job_id, job in state.jobs.items() if job.generation > 1]
            self._job_id = next(iter(recovered or options), None)
        if self._job_id is not None:
            options.setdefault(self._job_id, self._job_id)
        if options != self._choice.options or self._choice.value != self._job_id:
            self._choice.set_options(options, value=self._job_id)
        if self._job_id is None:
            self._says.text = "There is no job."
            return
        try:
            await self._ask(self._job_id, state.newest_event_id)
        except GeminiError as error:
            self._says.text = str(error)
            return
        shown = self._recoveries
        self._says.text = "The newest first." if shown else "This job has not recovered yet."
        self._list.show((self._job_id, tuple(one.generation for one in shown)), self._build)
        names = {node_id: node_name(node) for node_id, node in state.nodes.items()}
        for recovery in shown:
            detail = self._details.get((self._job_id, recovery.generation))
            self._places[recovery.generation].show(recovery_html(recovery, detail, names))

    async def _ask(self, job_id: JobId, newest_event_id: int) -> None:
        wanted = (job_id, newest_event_id)
        if wanted == self._asked_for and not any(recovery.outcome == "open" for recovery in self._recoveries):
            return
        self._recoveries = await collect(self._visit.api.recoveries(job_id, page_size=_NUM_SHOWN), _NUM_SHOWN)
        for recovery in self._recoveries:
            key = (job_id, recovery.generation)
            if key not in self._details or not self._details[key].sources:
                self._details[key] = await self._visit.api.recovery(job_id, recovery.generation)
        self._asked_for = wanted

    def _build(self) -> None:
        self._places = {}
        for recovery in self._recoveries:
            with panel(f"Generation {recovery.generation}"):
                self._places[recovery.generation] = PlainTable()


def recovery_html(recovery: RecoveryModel, detail: RecoveryDetailModel | None, names: Mapping[NodeId, str]) -> str:
    """Return everything about one recovery."""
    lost = recovery.num_steps_lost
    bars = waterfall(recovery)
    known = figures(
        {
            "outcome": recovery.outcome,
            "took": duration(sum(bar.length_ms for bar in bars) / 1000),
            "steps lost": "unknown" if lost is None else lost,
            "finished before": step(recovery.finished_step),
            "started from": "zero" if recovery.restored_step is None else f"step {recovery.restored_step}",
            "began": f"{time_of_day(recovery.started_at)} UTC",
        }
    )
    phases = plain_table(
        f"Cause: {recovery.cause.partition(chr(10))[0]}",
        ("phase", "what happens", "when", "begins after", "takes"),
        [
            (
                bar.phase,
                PHASE_WORDS.get(bar.phase, ""),
                Markup.bar(bar.begun_share, bar.length_share, bar.phase),
                duration(bar.begun_ms / 1000),
                duration(bar.length_ms / 1000),
            )
            for bar in bars
        ],
        empty="no phase has ended yet",
    )
    if detail is None:
        return known + phases
    sources = plain_table(
        "Where every shard came from, and where else a verified copy was",
        ("shard", "source", "other copies"),
        [
            (
                f"rank {rank}",
                names.get(nodes[0], nodes[0]) if nodes else "nowhere",
                ", ".join(names.get(node, node) for node in nodes[1:]) or "none",
            )
            for rank, nodes in sorted(detail.sources.items())
        ],
        empty="started from zero, or not planned yet",
    )
    return known + phases + sources
