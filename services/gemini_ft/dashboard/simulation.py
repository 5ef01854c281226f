"""A preset of the simulator under every policy, in a process beside the one that serves pages."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemini_ft.contracts.errors import UnavailableError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gemini_ft.planning.simulation.results import Summary

__all__ = ["MOST_SEEDS", "SimulatedPreset", "Simulations", "missing_package", "simulate_preset"]

MOST_SEEDS = 1000
_NEEDED = ("simpy", "numpy", "matplotlib")


@dataclass(frozen=True, slots=True)
class SimulatedPreset:
    """What came out: a scenario's sentence, SVG pictures by what they show, and the same as rows of text."""

    sentence: str
    plots: Mapping[str, str]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def missing_package() -> str | None:
    """Return a package of the extra `planning` that is not installed; None: all are there."""
    return next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)


def simulate_preset(name: str, num_seeds: int) -> SimulatedPreset:
    """Simulate a preset under each policy.

    Raises:
        ConfigurationError: there is no such preset.
    """
    from gemini_ft.planning.simulation.presets import policies, preset
    from gemini_ft.planning.simulation.results import Cause
    from gemini_ft.planning.simulation.run import run_scenario

    scenario = preset(name)
    summaries = {
        policy: run_scenario(compared, num_seeds, num_processes=1) for policy, compared in policies(scenario).items()
    }
    rows = []
    for policy, summary in summaries.items():
        cost_s = summary.wasted_s_per_failure
        wasted = (f"{100 * summary.wasted_shares[cause].mean:.3f}" for cause in Cause)
        ratio = f"{100 * summary.effective_time_ratio.mean:.2f}"
        rows.append((policy, ratio, "none failed" if cost_s is None else f"{cost_s:.1f}", *wasted))
    size = f"{scenario.num_machines} machines, {scenario.duration_days:g} days"
    return SimulatedPreset(
        sentence=f"{scenario.name}: {size}, {num_seeds} runs",
        plots={
            "Wasted time by cause": _svg("wasted", lambda axes: _draw_wasted(axes, summaries)),
            "What one failure costs": _svg("cost", lambda axes: _draw_costs(axes, summaries)),
        },
        header=("policy", "effective time (%)", "a failure costs (s)", *(f"{_words(cause)} (%)" for cause in Cause)),
        rows=tuple(rows),
    )


class Simulations:
    """Runs one preset at a time, in a process of its own that is started when it is first needed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, name: str, num_seeds: int) -> SimulatedPreset:
        """Return what `simulate_preset` does.

        Raises:
            GeminiError: it was refused, or the process has ended.
        """
        if self._pool is None:
            # A forked child of a process with threads may hang.
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, simulate_preset, name, num_seeds)
        except BrokenExecutor as error:
            self.close()
            raise UnavailableError("the process that simulates has ended; run the preset again") from error

    def close(self) -> None:
        """End the process; what it was doing is lost."""
        if self._pool is not None:
            for process in multiprocessing.active_children():
                process.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _svg(name: str, draw: Callable[[Axes], None]) -> str:
    from gemini_ft.planning.plots import save_plot

    with tempfile.TemporaryDirectory() as folder:
        (path,) = save_plot(Path(folder), name, draw, ("svg",))
        return path.read_text()


def _draw_wasted(axes: Axes, summaries: Mapping[str, Summary]) -> None:
    from gemini_ft.planning.simulation.results import Cause

    below = [0.0] * len(summaries)
    hatches = ("", "//", "..", "xx", "--", "\\\\", "oo", "++")
    for cause, hatch in zip(Cause, hatches, strict=True):
        shares = [100 * summary.wasted_shares[cause].mean for summary in summaries.values()]
        if any(shares):
            axes.bar(list(summaries), shares, bottom=below, label=_words(cause), hatch=hatch, edgecolor="white")
            below = [start + share for start, share in zip(below, shares, strict=True)]
    axes.set_ylabel("wasted time (% of all time)")
    axes.legend(frameon=False, fontsize=8)


def _draw_costs(axes: Axes, summaries: Mapping[str, Summary]) -> None:
    from gemini_ft.planning.plots import draw_bars

    costs = [summary.wasted_s_per_failure for summary in summaries.values()]
    draw_bars(axes, list(summaries), {"ours, simulated": costs}, "wasted for each failure (s)", log=True)


def _words(cause: str) -> str:
    return cause.replace("_", " ")
