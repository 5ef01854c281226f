"""The simulator: what each policy would waste, for the presets of `gemini_ft.planning`."""

from __future__ import annotations

import base64
import html

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from nicegui import ui

from gemini_ft.contracts.errors import GeminiError
from gemini_ft.dashboard.dashboard import Dashboard
from gemini_ft.dashboard.frame import frame
from gemini_ft.dashboard.parts import heading, panel
from gemini_ft.dashboard.simulation import MOST_SEEDS, SimulatedPreset, Simulations, missing_package
from gemini_ft.dashboard.tables import PlainTable, plain_table

__all__ = ["install"]

_NUM_SEEDS = 20


def install(dashboard: Dashboard) -> None:
    """Add the page."""

    @ui.page("/simulator")
    def simulator(request: Request) -> Response | None:
        visit = dashboard.visit(request)
        if visit is None:
            return RedirectResponse("/login", 303)
        with frame(visit, "/simulator", "Simulator"):
            heading("Simulator", 1)
            missing = missing_package()
            if missing is None:
                _SimulatorPage(dashboard.simulations)
            else:
                ui.label(
                    f"The simulator is not installed where the dashboard runs: {missing} is missing. "
                    "Install gemini-ft[planning] there."
                ).classes("notice")
        return None


class _SimulatorPage:
    def __init__(self, simulations: Simulations) -> None:
        from gemini_ft.planning.simulation.presets import PRESETS

        self._simulations = simulations
        with panel("Which"), ui.row():
            self._preset = ui.select(list(PRESETS), value=next(iter(PRESETS)), label="preset")
            self._preset.props("dense outlined").style("min-width: 14em")
            self._num_seeds = ui.number("runs", value=_NUM_SEEDS, min=1, max=MOST_SEEDS, precision=0)
            self._num_seeds.props("dense outlined")
            self._button = ui.button("Simulate", on_click=self._run).props("outline no-caps")
        self._says = ui.label().props('role="status"')
        self._plots = PlainTable()
        with panel("As numbers"):
            self._table = PlainTable()

    async def _run(self) -> None:
        num_seeds = int(self._num_seeds.value or 1)
        self._button.disable()
        self._says.text = f"simulating {self._preset.value} ..."
        try:
            found = await self._simulations.run(self._preset.value, min(MOST_SEEDS, max(1, num_seeds)))
        except GeminiError as error:
            self._says.text = str(error)
        else:
            self._show(found)
        finally:
            self._button.enable()

    def _show(self, found: SimulatedPreset) -> None:
        self._says.text = found.sentence
        self._plots.show("".join(_image(title, svg) for title, svg in found.plots.items()))
        self._table.show(plain_table("Means over the runs; shares of all time", found.header, found.rows))


def _image(title: str, svg: str) -> str:
    # As an image, a picture runs nothing.
    source = base64.b64encode(svg.encode()).decode()
    alternative = html.escape(f"{title}; the numbers are in the table below")
    return (
        f'<figure class="plots"><img src="data:image/svg+xml;base64,{source}" alt="{alternative}">'
        f"<figcaption>{html.escape(title)}</figcaption></figure>"
    )
