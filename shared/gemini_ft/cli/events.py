"""`gemini-ft events`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from gemini_ft.cli.config import ContextName, connect
from gemini_ft.cli.output import AsJson, Limit, console, ended_by_interrupt, print_json_line, show

if TYPE_CHECKING:
    from gemini_ft.client.api_client import ApiClient
    from gemini_ft.contracts.api import EventModel

__all__ = ["events"]


def events(
    job: Annotated[str | None, typer.Option(help="Only events of this job.", show_default=False)] = None,
    kind: Annotated[str | None, typer.Option(help="Only events of this kind.", show_default=False)] = None,
    after: Annotated[
        int | None, typer.Option(min=0, help="The events after this id; default: the newest.", show_default=False)
    ] = None,
    limit: Limit = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens, until Ctrl-C.")] = False,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Show what happened, oldest first; with `--follow --json` one JSON object a line.

    \b
    Examples:
      gemini-ft events --job job-0123456789
      gemini-ft events --kind node_failed --limit 10
      gemini-ft events --follow
    """
    from gemini_ft.cli.render.events import event_line, events_text

    with connect(context) as client, ended_by_interrupt():
        if after is None:
            newest = client.cluster().newest_event_id
            found = newest_events(client, newest, limit, job, kind)
        else:
            newest = after
            found = list(islice(client.events(after=after, job_id=job, kind=kind), limit))
        if not follow:
            show(lambda: found, events_text, as_json=as_json, watch=False)
            return
        out = console()
        begin = found[-1].id if found else newest
        for event in _then(found, client.follow_events(after=begin, job_id=job, kind=kind)):
            if as_json:
                print_json_line(event)
            else:
                out.print(event_line(event))


def newest_events(
    client: ApiClient, newest_id: int, num_events: int, job_id: str | None, kind: str | None
) -> list[EventModel]:
    """Return the newest events that match, oldest first: looks through ever more of the past until it has enough."""
    span = 2 * num_events
    while True:
        after = max(0, newest_id - span)
        found = list(client.events(after=after, job_id=job_id, kind=kind, page_size=1000))
        if len(found) >= num_events or after == 0:
            return found[-num_events:]
        span *= 4


def _then(first: list[EventModel], rest: Iterator[EventModel]) -> Iterator[EventModel]:
    yield from first
    yield from rest
