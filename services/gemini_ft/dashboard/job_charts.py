"""Steps and step rate of a job over time, as a chart and as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nicegui import ui

from gemini_ft.dashboard.history import Sample, step_rates
from gemini_ft.dashboard.tables import PlainTable, plain_table
from gemini_ft.dashboard.words import step

__all__ = ["ProgressChart", "progress_options", "thinned"]

_NUM_POINTS = 180
_NUM_ROWS = 8
_TEXT = "#76839a"
_GRID = "#76839a40"
_COLOURS = ["#3b82c4", "#2a9d8f", "#b07a1e"]
"""These and the text are seen on light and on dark."""


class ProgressChart:
    """Shows samples of a job; what is drawn changes at most as often as they do."""

    def __init__(self) -> None:
        self._chart = ui.echart(progress_options([])).classes("chart")
        self._chart.props('role="img" aria-label="Finished step, committed version and step rate over time"')
        with ui.expansion("The same as numbers").props("dense"):
            self._table = PlainTable()
        self._shown: Sample | None = None

    def show(self, samples: Sequence[Sample]) -> None:
        """Show these samples, oldest first."""
        newest = samples[-1] if samples else None
        if newest == self._shown:
            return
        self._shown = newest
        self._chart.options.update(progress_options(samples))
        self._chart.update()
        rows = [
            (
                f"{sample.at_s - samples[-1].at_s:.0f} s",
                step(sample.finished_step),
                step(sample.committed_step),
                "unknown" if rate is None else f"{rate:.3g}",
            )
            for sample, rate in thinned(samples, _NUM_ROWS)
        ]
        self._table.show(plain_table("Newest last", ("when", "finished step", "committed version", "steps/s"), rows))


def thinned(samples: Sequence[Sample], most: int) -> list[tuple[Sample, float | None]]:
    """Return at most `most` samples with their step rates: the newest, and others at equal distances before it."""
    stride = max(1, -(-len(samples) // most))
    rated = list(zip(samples, step_rates(samples), strict=True))
    return rated[::-1][::stride][::-1]


def progress_options(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the chart of samples, for ECharts."""
    points = thinned(samples, _NUM_POINTS)
    newest_s = samples[-1].at_s if samples else 0.0
    finished = [[round(sample.at_s - newest_s, 1), sample.finished_step] for sample, _ in points]
    committed = [[round(sample.at_s - newest_s, 1), sample.committed_step] for sample, _ in points]
    rates = [[round(sample.at_s - newest_s, 1), None if rate is None else round(rate, 3)] for sample, rate in points]
    axis = {
        "type": "value",
        "scale": True,
        "axisLine": {"onZero": False},
        "axisLabel": {"color": _TEXT},
        "nameTextStyle": {"color": _TEXT},
        "splitLine": {"lineStyle": {"color": _GRID}},
    }
    line = {"type": "line", "showSymbol": False, "animation": False}
    return {
        "animation": False,
        "color": _COLOURS,
        "textStyle": {"color": _TEXT},
        "legend": {"top": 0, "textStyle": {"color": _TEXT}},
        "grid": {"left": 56, "right": 52, "top": 34, "bottom": 30},
        "tooltip": {"trigger": "axis"},
        "xAxis": {**axis, "max": 0, "axisLabel": {"color": _TEXT, "formatter": "{value} s"}},
        "yAxis": [{**axis, "name": "step"}, {**axis, "name": "steps/s", "min": 0, "splitLine": {"show": False}}],
        "series": [
            {**line, "name": "finished step", "data": finished, "lineStyle": {"width": 2}},
            {**line, "name": "committed version", "data": committed, "lineStyle": {"width": 2, "type": "dashed"}},
            {
                **line,
                "name": "step rate",
                "data": rates,
                "yAxisIndex": 1,
                "lineStyle": {"width": 1.5, "type": "dotted"},
            },
        ],
    }
