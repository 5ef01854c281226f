"""Tables: plain ones, and ones whose rows have links and buttons. Both send nothing while nothing changes."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

__all__ = ["DataTable", "Markup", "PlainTable", "figures", "plain_table"]


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that was made here; everything else is text."""

    source: str

    @classmethod
    def link(cls, target: str, text: str) -> Markup:
        """A link; `target` is a path of this dashboard."""
        return cls(f'<a href="{html.escape(target)}">{html.escape(text)}</a>')

    @classmethod
    def bar(cls, begun_share: float, length_share: float, kind: str) -> Markup:
        """A bar within a strip that stands for the whole; what it says is beside it in words."""
        place = f"left:{100 * begun_share:.2f}%;width:{100 * length_share:.2f}%"
        return cls(f'<div class="strip" aria-hidden="true"><i class="{html.escape(kind)}" style="{place}"></i></div>')


Cell = str | int | float | Markup


def plain_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[Cell]], empty: str = "none yet") -> str:
    """Return a table as HTML; the first cell of a row names it."""
    heads = "".join(f'<th scope="col">{_html(name)}</th>' for name in header)
    lines = [
        f'<tr><th scope="row">{_html(first)}</th>{"".join(f"<td>{_html(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    ]
    body = "".join(lines) or f'<tr><td colspan="{len(header)}">{_html(empty)}</td></tr>'
    return (
        f'<div class="scroll"><table class="plain-table"><caption>{_html(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def figures(values: Mapping[str, Cell]) -> str:
    """Return a few values with their names as HTML."""
    pairs = "".join(f"<div><dt>{_html(name)}</dt><dd>{_html(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="figures">{pairs}</dl>'


def _html(cell: Cell) -> str:
    return cell.source if isinstance(cell, Markup) else html.escape(str(cell))


class PlainTable:
    """HTML of `plain_table` or `figures`, at one place of a page."""

    def __init__(self) -> None:
        self._element = ui.html("", sanitize=False)

    def show(self, source: str) -> None:
        """Show this instead of what was there."""
        if self._element.content != source:
            self._element.content = source


class DataTable:
    """A table of which the browser gets one page of rows at a time.

    Rows are mappings with `id`, a value for each column, and perhaps `href`, to which the first column then leads, and
    `actions`, the labels of the row's buttons.
    """

    _LINK = """
        <q-td :props="props">
            <a v-if="props.row.href" :href="props.row.href">{{ props.value }}</a>
            <q-btn v-else-if="props.row.picks" flat dense no-caps size="sm" color="primary" :label="props.value"
                @click="() => $parent.$emit('act', ['', props.row.id])" />
            <span v-else>{{ props.value }}</span>
        </q-td>
    """
    _ACTIONS = """
        <q-td :props="props">
            <q-btn v-for="action in props.row.actions" :key="action" flat dense no-caps size="sm" color="primary"
                :label="action" :aria-label="action + ' ' + props.row.name"
                @click="() => $parent.$emit('act', [action, props.row.id])" />
        </q-td>
    """

    def __init__(
        self,
        label: str,
        columns: Mapping[str, str],
        *,
        rows_per_page: int = 15,
        on_act: Callable[[str, str], Any] | None = None,
    ) -> None:
        """`columns`: name -> heading. `on_act` gets a button's label and the row's id; "" is the first column's."""
        first = next(iter(columns))
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._page = {"page": 1, "rowsPerPage": rows_per_page, "rowsNumber": 0}
        headings = [
            {"name": name, "label": heading, "field": name, "align": "left"} for name, heading in columns.items()
        ]
        self._table = ui.table(columns=headings, rows=[], row_key="id", pagination=dict(self._page))
        self._table.props(
            f'flat dense :rows-per-page-options="[{rows_per_page}, 50, 200]" aria-label="{html.escape(label)}" '
            'no-data-label="none"'
        )
        self._table.add_slot(f"body-cell-{first}", self._LINK)
        if "actions" in columns:
            self._table.add_slot("body-cell-actions", self._ACTIONS)
        self._table.on("request", self._turn)
        # At first the browser says how many rows it has: none yet.
        self._table.on("update:pagination", self._send)
        if on_act is not None:
            act = on_act
            self._table.on("act", lambda event: act(*event.args))

    def show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show these rows; the reader stays on the page where he is."""
        self._rows = rows
        self._send()

    def begin_again(self) -> None:
        """Go to the first page."""
        self._page["page"] = 1

    def _turn(self, event: GenericEventArguments) -> None:
        wanted = event.args["pagination"]
        self._page |= {"page": int(wanted["page"]), "rowsPerPage": int(wanted["rowsPerPage"])}
        self._send()

    def _send(self) -> None:
        length = self._page["rowsPerPage"] or len(self._rows)
        last = max(1, -(-len(self._rows) // max(1, length)))
        page = self._page | {"page": min(self._page["page"], last), "rowsNumber": len(self._rows)}
        begin = (page["page"] - 1) * length
        shown = [dict(row) for row in self._rows[begin : begin + length]]
        self._page = page
        if self._table.rows != shown:
            self._table.rows = shown
        if self._table.pagination != page:
            self._table.pagination = page
