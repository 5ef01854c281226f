"""What happens, as it happens, and what happened before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from nicegui import ui

from gemini_ft.contracts.api import EventModel
from gemini_ft.contracts.errors import GeminiError
from gemini_ft.dashboard.dashboard import Dashboard, Visit
from gemini_ft.dashboard.feed import collect
from gemini_ft.dashboard.feed_state import FeedState
from gemini_ft.dashboard.frame import frame
from gemini_ft.dashboard.parts import heading, panel
from gemini_ft.dashboard.tables import DataTable
from gemini_ft.dashboard.words import time_of_day

__all__ = ["install", "matching"]

_PAGE = 500


def install(dashboard: Dashboard) -> None:
    """Add the page."""

    @ui.page("/events")
    def events(request: Request, job: str = "") -> Response | None:
        visit = dashboard.visit(request)
        if visit is None:
            return RedirectResponse("/login", 303)
        with frame(visit, "/events", "Events"):
            visit.shows.append(_EventsPage(visit, job).show)
        return None


def matching(events: Sequence[EventModel], *, kind: str, job: str, text: str) -> list[EventModel]:
    """Return the events of a kind and job (empty: any) in which `text` appears, the newest first."""
    wanted = text.casefold()
    return [
        event
        for event in reversed(events)
        if (not kind or event.kind == kind)
        and (not job or event.job_id == job)
        and wanted in f"{event.kind} {event.job_id or ''} {event.node_id or ''} {event.message}".casefold()
    ]


class _EventsPage:
    def __init__(self, visit: Visit, job: str) -> None:
        self._visit = visit
        self._earlier: list[EventModel] = []
        self._begin: int | None = None
        heading("Events", 1)
        with panel("Which"), ui.row():
            self._kind = ui.select({"": "all kinds"}, value="", on_change=visit.again)
            self._kind.props('dense outlined aria-label="Kind"').style("min-width: 14em")
            self._job = ui.select({"": "all jobs", **({job: job} if job else {})}, value=job, on_change=visit.again)
            self._job.props('dense outlined aria-label="Job"').style("min-width: 18em")
            self._text = ui.input(placeholder="text", on_change=visit.again)
            self._text.props('dense outlined clearable debounce="200" aria-label="Text in the event"')
            self._more = ui.button("Load earlier events", on_click=self._load).props("flat no-caps")
        with panel("What happened, newest first"):
            self._says = ui.label().props('role="status"').classes("faint")
            columns = {"id": "id", "at": "at (UTC)", "kind": "kind", "job": "job", "node": "node"}
            columns |= {"generation": "generation", "message": "what"}
            self._table = DataTable("Events", columns, rows_per_page=25)

    def show(self, state: FeedState) -> None:
        events = [*self._earlier, *state.events]
        self._offer(self._kind, {"": "all kinds"} | {kind: kind for kind in sorted({one.kind for one in events})})
        jobs = {job_id: f"{job.spec.name} ({job_id})" for job_id, job in state.jobs.items()}
        self._offer(self._job, {"": "all jobs"} | jobs)
        found = matching(events, kind=self._kind.value, job=self._job.value, text=self._text.value or "")
        self._says.text = f"{len(found)} of the {len(events)} events that were read"
        self._more.visible = bool(events) and self._begin != 0 and events[0].id > 1
        self._table.show([_row(event) for event in found])

    async def _load(self) -> None:
        known = self._visit.feed.state.events
        begin = self._begin if self._begin is not None else known[0].id - 1 if known else 0
        try:
            before = await collect(self._visit.api.events(after=max(0, begin - _PAGE), page_size=_PAGE), _PAGE)
        except GeminiError as error:
            ui.notify(str(error), type="negative", close_button="Close")
            return
        self._begin = max(0, begin - _PAGE)
        self._earlier = [event for event in before if event.id <= begin] + self._earlier
        self._visit.again()

    @staticmethod
    def _offer(choice: ui.select, options: dict[str, str]) -> None:
        options.setdefault(choice.value, choice.value)
        if choice.options != options:
            choice.set_options(options)


def _row(event: EventModel) -> dict[str, Any]:
    return {
        "id": event.id,
        "at": time_of_day(event.at),
        "kind": event.kind,
        "job": event.job_id or "",
        "node": event.node_id or "",
        "generation": "" if event.generation is None else event.generation,
        "message": event.summary,
    }
