"""The simulator's presets, as the page shows them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from gemini_ft.contracts.errors import ConfigurationError, UnavailableError
from gemini_ft.dashboard.simulation import Simulations, missing_package, simulate_preset
from gemini_ft.planning.simulation.presets import PRESETS, policies


@pytest.fixture
def simulations() -> Iterator[Simulations]:
    found = Simulations()
    yield found
    found.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_has_plots_and_the_same_as_numbers(name: str) -> None:
    found = simulate_preset(name, 2)
    assert [row[0] for row in found.rows] == list(policies(PRESETS[name]()))
    assert {len(row) for row in found.rows} == {len(found.header)}
    for svg in found.plots.values():
        assert svg.startswith("<?xml")
        assert all(f">{policy}<" in svg for policy in ("Strawman", "GEMINI"))


async def test_a_preset_is_simulated_in_a_process_beside_this_one(simulations: Simulations) -> None:
    assert missing_package() is None
    assert await simulations.run("local-demo", 2) == simulate_preset("local-demo", 2)
    with pytest.raises(ConfigurationError, match="there is no preset 'nothing'"):
        await simulations.run("nothing", 1)


async def test_a_process_that_was_killed_is_replaced(simulations: Simulations) -> None:
    await simulations.run("local-demo", 1)
    for process in multiprocessing.active_children():
        process.kill()
        process.join(10)
    with pytest.raises(UnavailableError, match="run the preset again"):
        await simulations.run("local-demo", 1)
    assert (await simulations.run("local-demo", 1)).rows
