"""`gemini-ft simulate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemini_ft.cli._progress import progress
from gemini_ft.cli._text import closest_first, text_table
from gemini_ft.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gemini_ft.planning.simulation.results import Estimate, Summary
    from gemini_ft.planning.simulation.scenario import Scenario

__all__ = ["simulate"]

_MAX_DAYS = 3650
_POLICIES = {
    "strawman": "Strawman",
    "highfreq": "HighFreq",
    "gemini": "GEMINI",
    "gemini-ft-cold": "Gemini-FT, cold",
    "gemini-ft": "Gemini-FT",
}
"""What is typed -> what tables show."""


def simulate(
    scenario: Annotated[str, typer.Argument(metavar="PRESET|SCENARIO.yaml", help="A preset, or a file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(_POLICIES)} or all; repeat to compare. Default: the scenario's own."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each policy, on the same failures.")] = 20,
    days: Annotated[float | None, typer.Option(help="Simulated days of a run; default: the scenario's.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes to use; default: one for each processor.")] = None,
    phases: Annotated[
        Path | None, typer.Option(help="Report of `gemini-ft demo --json`: restarts take what it measured.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw the results into this folder, as SVG and PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Simulate a training run with failures: how much of the time is useful, and where the rest goes.

    Presets: paper-p4d-100b, paper-p3dn-40b, local-demo.

    \b
    Examples:
      gemini-ft simulate paper-p4d-100b --policy all
      gemini-ft simulate examples/planning/scenario.yaml --seeds 50 --plots out
      gemini-ft demo --json demo.json
      gemini-ft simulate local-demo --phases demo.json
    """
    from gemini_ft.planning.plots import save_plot
    from gemini_ft.planning.simulation.run import run_scenario

    loaded = _load(scenario)
    if days is not None:
        if not 0 < days <= _MAX_DAYS:
            raise ConfigurationError(f"--days is {days:g}; give more than 0 and at most {_MAX_DAYS}")
        loaded = loaded.changed(duration_days=days)
    compared = _compared(loaded, policy or [], phases)
    summaries = {}
    with progress(len(compared) * seeds) as report:
        for label, one in compared.items():
            summaries[label] = run_scenario(one, seeds, num_processes=processes, on_progress=partial(report, label))
    if plots is not None:
        save_plot(plots, f"{Path(scenario).stem}-wasted", lambda axes: _draw(axes, summaries))
    if as_json:
        found = {label: summary.model_dump(mode="json") for label, summary in summaries.items()}
        typer.echo(json.dumps({"scenario": loaded.model_dump(mode="json"), "policies": found}, indent=2))
    else:
        typer.echo("\n".join(_text(loaded, seeds, summaries)))


def _load(name: str) -> Scenario:
    from gemini_ft.planning.simulation.loading import load_scenario
    from gemini_ft.planning.simulation.presets import PRESETS, preset

    if name in PRESETS:
        return preset(name)
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json") or path.exists():
        return load_scenario(path)
    names = ", ".join(closest_first(name, PRESETS))
    raise ConfigurationError(f"there is no preset {name!r}; choose from {names}, or give a file that ends in .yaml")


def _compared(scenario: Scenario, policies_wanted: Sequence[str], phases: Path | None) -> dict[str, Scenario]:
    """Label -> scenario; a policy that the scenario has itself stays as it is there."""
    from gemini_ft.planning.simulation.demo_report import read_demo_report
    from gemini_ft.planning.simulation.policies import GeminiFT
    from gemini_ft.planning.simulation.presets import policies

    own = _label(scenario)
    known = {**policies(scenario), own: scenario}
    if "all" in policies_wanted:
        wanted = list(_POLICIES.values())
    else:
        for name in policies_wanted:
            if name not in _POLICIES:
                names = ", ".join(closest_first(name, [*_POLICIES, "all"]))
                raise ConfigurationError(f"there is no policy {name!r}; choose from {names}")
        wanted = [_POLICIES[name] for name in policies_wanted] or [own]
    compared = {label: known[label] for label in wanted}
    if phases is not None:
        warm = _POLICIES["gemini-ft"]
        if warm not in compared:
            raise ConfigurationError(
                f"--phases says what a restart of Gemini-FT takes, but {', '.join(compared)} is simulated; "
                "add --policy gemini-ft"
            )
        compared[warm] = scenario.changed(policy=GeminiFT(measured=read_demo_report(phases)))
    return compared


def _label(scenario: Scenario) -> str:
    from gemini_ft.planning.simulation.policies import Gemini, GeminiFT, HighFreq

    match scenario.policy:
        case GeminiFT(measured=None):
            return _POLICIES["gemini-ft-cold"]
        case GeminiFT():
            return _POLICIES["gemini-ft"]
        case Gemini():
            return _POLICIES["gemini"]
        case HighFreq():
            return _POLICIES["highfreq"]
        case _:
            return _POLICIES["strawman"]


def _text(scenario: Scenario, num_seeds: int, summaries: Mapping[str, Summary]) -> Iterator[str]:
    from gemini_ft.planning.simulation.results import Cause, Tier

    runs = "1 run" if num_seeds == 1 else f"{num_seeds} runs, means and 95 % intervals"
    yield f"{scenario.name}: {scenario.num_machines} machines, {scenario.duration_days:g} days, {runs}"
    yield ""
    header = ["policy", "effective time", "failures", "one costs (s)", *(f"from {tier}" for tier in Tier), "sets lost"]
    rows = [
        [
            label,
            _interval(summary.effective_time_ratio, 4),
            f"{sum(estimate.mean for estimate in summary.num_failures.values()):.1f}",
            "-" if summary.wasted_s_per_failure is None else f"{summary.wasted_s_per_failure:.0f}",
            *(_interval(summary.recoveries[tier], 1) for tier in Tier),
            _interval(summary.num_lost_sets, 1),
        ]
        for label, summary in summaries.items()
    ]
    yield text_table(header, rows)
    yield ""
    yield "wasted time, % of all time"
    rows = [
        [label, *(f"{100 * summary.wasted_shares[cause].mean:.3f}" for cause in Cause)]
        for label, summary in summaries.items()
    ]
    yield text_table(["policy", *(cause.replace("_", " ") for cause in Cause)], rows)


def _interval(estimate: Estimate, num_decimals: int) -> str:
    mean = f"{estimate.mean:.{num_decimals}f}"
    return mean if estimate.high is None else f"{mean} +- {estimate.high - estimate.mean:.{num_decimals}f}"


def _draw(axes: Axes, summaries: Mapping[str, Summary]) -> None:
    from gemini_ft.planning.simulation.results import Cause

    labels = list(summaries)
    below = [0.0] * len(labels)
    for cause in Cause:
        shares = [100 * summary.wasted_shares[cause].mean for summary in summaries.values()]
        if any(shares):
            axes.bar(labels, shares, bottom=below, label=cause.replace("_", " "))
            below = [start + share for start, share in zip(below, shares, strict=True)]
    axes.set_ylabel("wasted time (% of all time)")
    axes.legend(frameon=False, fontsize=8)
