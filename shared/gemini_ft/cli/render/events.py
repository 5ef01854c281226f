"""Events."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from gemini_ft.cli.render.cells import moment, printable
from gemini_ft.contracts.api import EventModel

__all__ = ["event_line", "events_text"]


def event_line(event: EventModel) -> Text:
    """One event; the details of its message, which may be the end of a log, are left out."""
    return Text.assemble(
        (moment(event.at), "dim"),
        f" {event.id:>6} ",
        (f"{event.kind} ", "bold"),
        f"{event.job_id or event.node_id or ''} ",
        printable(event.summary),
    )


def events_text(events: Sequence[EventModel]) -> Text:
    """One line an event."""
    return Text("\n").join(map(event_line, events))
