"""A figure of the paper beside what this project computes for it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemini_ft.planning.paper.values import PAPER, PaperValue

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Difference", "Figure", "Row", "Verdict", "compare"]


class Verdict(enum.StrEnum):
    """How a value of ours stands to the paper's."""

    WITHIN = "within"
    EXPLAINED = "differs"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Difference:
    """Why our value is not the paper's. `expected` is what it then has to be, found in another way than ours."""

    expected: float
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity, ours and the paper's."""

    quantity: str
    ours: float
    paper: PaperValue
    difference: Difference | None = None

    @property
    def verdict(self) -> Verdict:
        """WITHIN the paper's tolerance; else EXPLAINED if ours is, within the same, what the explanation expects."""
        if self.paper.agrees(self.ours):
            return Verdict.WITHIN
        if self.difference is not None and self.paper.is_near(self.ours, self.difference.expected):
            return Verdict.EXPLAINED
        return Verdict.OUTSIDE


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: `notes` say what is input, what is calibrated and what we found; `draw` fills a plot."""

    number: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str]
    draw: Callable[[Axes], None]

    @property
    def is_reproduced(self) -> bool:
        """No row is outside its tolerance without an explanation that holds."""
        return all(row.verdict is not Verdict.OUTSIDE for row in self.rows)


def compare(key: str, ours: float, how: str = "", difference: Difference | None = None) -> Row:
    """Return the row for the paper's value `key`; `how` is added to the quantity where several ways are compared."""
    paper = PAPER[key]
    return Row(f"{paper.quantity}, {how}" if how else paper.quantity, ours, paper, difference)
