"""Text for terminals: tables, numbers, and names that somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["closest_first", "format_bytes", "format_percent", "text_table"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Return an aligned table; columns of numbers, except the first, are aligned to the right."""
    body = [list(row) for row in rows]
    columns = list(zip(header, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_numeric = [
        index > 0 and all(cell[:1] in "0123456789+-><." for cell in column[1:]) for index, column in enumerate(columns)
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(cells, widths, is_numeric, strict=True)
        ]
        return (indent + "  ".join(padded)).rstrip()

    return "\n".join([line(header), *map(line, body)])


def format_percent(probability: float) -> str:
    """Return a percentage with three decimals, which says 100 % or 0 % only of what is certain."""
    if probability in (0, 1):
        return f"{100 * probability:.0f} %"
    percent = 100 * probability
    if percent > 99.999:
        return "> 99.999 %"
    return f"{percent:.3f} %" if percent >= 0.001 else "< 0.001 %"


def format_bytes(size_bytes: float) -> str:
    """Return a size in decimal units."""
    size, unit = float(size_bytes), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def closest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names, those that are most like `name` first."""
    return sorted(known, key=lambda one: -difflib.SequenceMatcher(None, name.lower(), one.lower()).ratio())
