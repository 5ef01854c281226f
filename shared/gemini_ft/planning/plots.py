"""Plots without a display, the same bytes each time: SVG with text as text, and PNG. Needs the extra `planning`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemini_ft.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FORMATS", "draw_bars", "draw_lines", "save_plot"]

FORMATS = ("svg", "png")
_SIZE_INCHES = (6.0, 3.4)
_COLOURS = {"ours": "#1f6fb4", "ours, simulated": "#7fb2dc", "paper": "#d9822b"}


def save_plot(directory: Path, name: str, draw: Callable[[Axes], None], formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write what `draw` draws to `directory`/`name` in each of `formats`; return the files.

    Raises:
        ConfigurationError: the directory cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for kind in formats:
                path = directory / f"{name}.{kind}"
                metadata = {"Date": None} if kind == "svg" else {"Software": None}
                figure.savefig(path, format=kind, dpi=150, metadata=metadata)
                written.append(path)
        except OSError as error:
            raise ConfigurationError(f"plots cannot be written to {directory}: {error.strerror}") from None
    return written


def draw_bars(
    axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], y_label: str, *, log: bool = False
) -> None:
    """Draw a group of bars for each label, one bar of each series; None leaves a gap."""
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        shown = {place + (index + 0.5) * width - 0.4: value for place, value in enumerate(values) if value is not None}
        bars = axes.bar(list(shown), list(shown.values()), width=width, label=name, color=_COLOURS.get(name))
        axes.bar_label(bars, fmt=_short, fontsize=7)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(y_label)
    if log:
        axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.legend(frameon=False, fontsize=8, ncols=len(series), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_lines(
    axes: Axes,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
) -> None:
    """Draw curves, and points in the colour of the curve whose name the point's name begins with."""
    colours = {}
    for name, (x, y) in lines.items():
        colours[name] = axes.plot(x, y, label=name)[0].get_color()
    for number, (name, (x, y)) in enumerate(points.items()):
        colour = next((colour for line, colour in colours.items() if name.startswith(line)), None)
        marker = "x" if name.endswith("paper") else "o"
        axes.plot(x, y, marker, color=colour, label=name, markersize=5, zorder=3 + number, fillstyle="none")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False, fontsize=7)


def _short(value: float) -> str:
    return f"{value:.3g}"
