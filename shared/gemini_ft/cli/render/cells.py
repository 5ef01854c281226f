"""Tables and the cells in them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from gemini_ft.contracts.api import JobPhase, NodeStatus

__all__ = ["NONE", "facts", "moment", "number", "pairs", "phase", "printable", "status", "table"]

NONE = "-"
_STYLE_OF_PHASE = {
    JobPhase.RUNNING: "green",
    JobPhase.SUCCEEDED: "green",
    JobPhase.BLOCKED: "bold red",
    JobPhase.FAILED: "red",
    JobPhase.FENCING: "yellow",
    JobPhase.STOPPING: "yellow",
}
_STYLE_OF_STATUS = {NodeStatus.ALIVE: "green", NodeStatus.SUSPECTED: "yellow", NodeStatus.FAILED: "red"}


def table(*headings: str, title: str | None = None) -> Table:
    """Return an empty table; a heading that begins with `>` is that of a column of numbers."""
    empty = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for heading in headings:
        is_number = heading.startswith(">")
        empty.add_column(heading.removeprefix(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return empty


def facts(values: Mapping[str, str | Text]) -> Table:
    """Return names beside values; empty ones are left out."""
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in values.items():
        if value:
            shown.add_row(name, value)
    return shown


def printable(text: str) -> str:
    """Return text without what a terminal would obey."""
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def number(value: float | None) -> str:
    """Return a number, or a dash."""
    return NONE if value is None else f"{value:g}"


def moment(at: datetime | None) -> str:
    """Return a moment to the second, in UTC."""
    return NONE if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def pairs(values: Mapping[str, str]) -> str:
    """Return labels as people type them."""
    return printable(" ".join(f"{name}={value}" for name, value in sorted(values.items())))


def phase(value: JobPhase) -> Text:
    """Return a phase in its colour."""
    return Text(value, style=_STYLE_OF_PHASE.get(value, ""))


def status(value: NodeStatus) -> Text:
    """Return a status in its colour."""
    return Text(value, style=_STYLE_OF_STATUS[value])
