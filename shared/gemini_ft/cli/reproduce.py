"""`gemini-ft reproduce`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemini_ft.cli._progress import progress
from gemini_ft.cli._text import closest_first, text_table
from gemini_ft.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from gemini_ft.planning.paper.beyond import Beyond
    from gemini_ft.planning.paper.comparison import Figure

__all__ = ["reproduce"]

_BEYOND = "beyond"
_EXIT_DIFFERENT = 1


def reproduce(
    figures: Annotated[
        list[str] | None, typer.Argument(metavar="FIGURE", help="Numbers such as 9 or 15a, or beyond; default: all.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw each figure into this folder.")] = None,
    plot_format: Annotated[str, typer.Option(help="svg, png or both.")] = "both",
    markdown: Annotated[Path | None, typer.Option(help="Write all figures as one Markdown page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON.")] = False,
) -> None:
    """Compute the figures of the GEMINI paper and compare them with the paper's own numbers.

    Ends with status 1 if a value is not within its tolerance and no known reason explains it.

    \b
    Examples:
      gemini-ft reproduce
      gemini-ft reproduce 15a 15b --plots figures
      gemini-ft reproduce beyond --json
      gemini-ft reproduce --markdown page.md --plots figures --plot-format svg
    """
    from gemini_ft.planning.paper.beyond import beyond
    from gemini_ft.planning.paper.figures import FIGURES
    from gemini_ft.planning.paper.report import plot_name, render_page
    from gemini_ft.planning.plots import FORMATS, save_plot

    if plot_format not in (*FORMATS, "both"):
        raise ConfigurationError(f"there is no plot format {plot_format!r}; choose from both, {', '.join(FORMATS)}")
    chosen = _chosen(figures or [], [*FIGURES, _BEYOND])
    if markdown is not None and len(chosen) <= len(FIGURES):
        raise ConfigurationError("--markdown writes the page with all figures; leave the numbers of figures out")
    found, further = [], None
    with progress(len(chosen)) as report:
        for number in chosen:
            report(f"figure {number}", 0)
            if number == _BEYOND:
                further = beyond(lambda label: report(label, 0))
            else:
                figure = FIGURES[number]()
                found.append(figure)
                if plots is not None:
                    formats = FORMATS if plot_format == "both" else (plot_format,)
                    save_plot(plots, plot_name(figure), figure.draw, formats)
            report("", 1)
    if markdown is not None and further is not None:
        images = None if plots is None else Path(os.path.relpath(plots, markdown.parent)).as_posix()
        _write(markdown, render_page(found, further, images))
    if as_json:
        typer.echo(json.dumps(_as_json(found, further), indent=2))
    else:
        typer.echo("\n".join(_text(found, further)))
    if not all(figure.is_reproduced for figure in found):
        raise typer.Exit(_EXIT_DIFFERENT)


def _chosen(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    chosen = set[str]()
    for name in wanted or known:
        # Figure 15 has two parts here.
        named = [one for one in known if name in (one, one.rstrip("ab"))]
        if not named:
            raise ConfigurationError(
                f"there is no figure {name!r}; choose from {', '.join(closest_first(name, known))}"
            )
        chosen.update(named)
    return [one for one in known if one in chosen]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def _text(figures: Sequence[Figure], further: Beyond | None) -> Iterator[str]:
    from gemini_ft.planning.paper.report import (
        COMPARISON_HEADER,
        REDUNDANCY_HEADER,
        SIMULATED_HEADER,
        beyond_tables,
        comparison_rows,
    )

    for figure in figures:
        cells, reasons = comparison_rows(figure.rows)
        yield f"Figure {figure.number}: {figure.title}"
        yield text_table(COMPARISON_HEADER, cells)
        yield from (f"  ({number}) {reason}" for number, reason in enumerate(reasons, 1))
        yield ""
    if further is not None:
        simulated, redundancy = beyond_tables(further)
        for axis, cells in simulated:
            yield f"Beyond the paper: {axis}"
            yield text_table(SIMULATED_HEADER, cells)
            yield ""
        yield "Beyond the paper: redundancy, exactly"
        yield text_table(REDUNDANCY_HEADER, redundancy)


def _as_json(figures: Sequence[Figure], further: Beyond | None) -> dict[str, Any]:
    return {
        "figures": [
            {
                "figure": figure.number,
                "title": figure.title,
                "is_reproduced": figure.is_reproduced,
                "rows": [{**asdict(row), "verdict": row.verdict} for row in figure.rows],
                "notes": list(figure.notes),
            }
            for figure in figures
        ],
        "beyond": None
        if further is None
        else {
            "simulated": [
                {
                    "axis": row.axis,
                    "label": row.label,
                    "num_days": row.num_days,
                    "summary": row.summary.model_dump(mode="json"),
                }
                for row in further.simulated
            ],
            "redundancy": [asdict(row) for row in further.redundancy],
        },
    }
