"""Figures 10, 14, 15a and 15b: what a failure costs, in closed form and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gemini_ft.planning.paper.comparison import Difference, Figure, Row, compare
from gemini_ft.planning.paper.values import PAPER
from gemini_ft.planning.plots import draw_bars, draw_lines
from gemini_ft.planning.simulation.closed_form import closed_form
from gemini_ft.planning.simulation.mechanics import mechanics_of
from gemini_ft.planning.simulation.presets import at_size, paper_p4d_100b, policies
from gemini_ft.planning.simulation.results import Cause, Summary
from gemini_ft.planning.simulation.run import run_scenario
from gemini_ft.planning.simulation.scenario import FailureKind, PoissonFailures, Scenario
from gemini_ft.planning.wasted_time import DAY_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["figure_10", "figure_14", "figure_15a", "figure_15b"]

_SYSTEMS = ("Strawman", "HighFreq", "GEMINI")
_PER_MACHINE_PER_DAY = 0.015
_KINDS: tuple[FailureKind, ...] = ("software", "hardware")
_LINEAR, _SIMULATED = "linear", "simulated"
_LINEAR_NOTE = (
    "Linear: the paper's account. Each failure costs the same, and costs add up until nothing is left. It counts work "
    "that was done again whole, and lets no failure hit a recovery or an unfinished checkpoint."
)
_SIMULATION_NOTE = "Simulated: discrete events, software failures at any time, recoveries included;"
_LESS_LOST = (
    "failures that come about as often as checkpoints lose less work each than equation 1 says, since no more can be "
    "lost than was trained since the failure before"
)


def figure_10() -> Figure:
    """Return Fig 10: average wasted time (equation 1)."""
    systems = _systems(paper_p4d_100b())
    forms = {name: closed_form(scenario, 0.0) for name, scenario in systems.items()}
    # GEMINI's uploads are most of the work of simulating; its wasted time varies least.
    simulated = {
        name: _mean_wasted_min(scenario, days)
        for (name, scenario), days in zip(systems.items(), (3650, 3650, 365), strict=True)
    }
    strawman, gemini = mechanics_of(systems["Strawman"]), mechanics_of(systems["GEMINI"])
    retrieval = Difference(
        8.02 + 180 / 2 + 8.02,
        "equation 1 has t_ckpt + 1/(2f) + t_rtvl = 8 + 90 + 8 min; the bar leaves the retrieval out, though the bar "
        "of HighFreq and both Strawman curves of Fig 15 fit only with it",
    )
    stall = Difference(
        (480 + 558 / 2 + 480) / 60,
        "equation 1 counts the 81 s in which the restored version was serialised, which need not be spent again",
    )
    peer_min = (forms["GEMINI"].average_s + gemini.hardware.retrieval_s) / 60
    rows = [
        compare("10 Strawman", (strawman.write_s + strawman.interval_s / 2) / 60, "without retrieval"),
        compare("10 Strawman", forms["Strawman"].average_s / 60, "equation 1", retrieval),
        compare("10 Strawman", simulated["Strawman"], _SIMULATED, retrieval),
        compare("10 HighFreq", forms["HighFreq"].average_s / 60, "equation 1"),
        compare("10 HighFreq", simulated["HighFreq"], _SIMULATED, stall),
        compare("10 GEMINI", forms["GEMINI"].average_s / 60, "equation 1"),
        compare("10 GEMINI", simulated["GEMINI"], _SIMULATED),
        compare("10 GEMINI peer", peer_min, "equation 1"),
        compare("10 ratio", forms["HighFreq"].average_s / forms["GEMINI"].average_s, "equation 1"),
        compare("10 ratio", simulated["HighFreq"] / simulated["GEMINI"], _SIMULATED),
    ]
    notes = [
        "Input: sizes, rates and intervals of section 7.1 to 7.3. HighFreq: 480 s to write and 81 s to serialise, "
        "every nine iterations; GEMINI: a checkpoint of every iteration, complete one iteration later, hence 1.5 "
        "iterations.",
        "Simulated: lost time and retrieval of a software failure, mean over 10 runs; failures come at random times.",
        f"Wasted time is not what a failure costs: detection, serialisation and warm-up add "
        f"{gemini.software.fixed_s:.0f} s to the {forms['GEMINI'].average_s:.0f} s of GEMINI (Figure 14).",
    ]
    ours = [forms[name].average_s / 60 for name in _SYSTEMS]
    series = {
        "ours": ours,
        "ours, simulated": [simulated[name] for name in _SYSTEMS],
        "paper": [PAPER[f"10 {name}"].value for name in _SYSTEMS],
    }
    return Figure(
        "10",
        "average wasted time",
        rows,
        notes,
        lambda axes: draw_bars(axes, _SYSTEMS, series, "wasted time (min)", log=True),
    )


def figure_14() -> Figure:
    """Return Fig 14: a recovery of GEMINI, in parts."""
    base = paper_p4d_100b().changed(duration_days=365)
    gemini = mechanics_of(base)
    software, hardware = gemini.software, gemini.hardware
    replacement_s = (240 + 420) / 2
    software_s = software.fixed_s + software.retrieval_s
    hardware_s = hardware.fixed_s + hardware.retrieval_s + replacement_s
    failing = {kind: base.changed(failures=(_poisson(kind, _PER_MACHINE_PER_DAY),)) for kind in _KINDS}
    simulated_s = {
        kind: _mean_recovery_s(run_scenario(scenario, 5, num_processes=1)) for kind, scenario in failing.items()
    }
    rows = [
        compare("14 serialization", software.serialization_s),
        compare("14 retrieval", hardware.retrieval_s),
        compare("14 software", software_s / 60),
        compare("14 software", simulated_s["software"] / 60, _SIMULATED),
        compare("14 hardware", hardware_s / 60),
        compare("14 hardware", simulated_s["hardware"] / 60, _SIMULATED),
    ]
    notes = [
        f"Input: {software.detection_s:g} s to detect, 81 s to serialise a replica, {software.warm_up_s:g} s of "
        "warm-up, a new machine in 4 to 7 min, all measured by the paper.",
        f"Of the {software_s:.0f} s, {100 * software.serialization_s / software_s:.0f} % are serialisation and "
        f"{100 * software.warm_up_s / software_s:.0f} % warm-up: the part that checkpoints in memory do not touch. "
        "`gemini-ft reproduce beyond` shows what shortens them.",
    ]
    parts = {
        "detection": (software.detection_s, hardware.detection_s),
        "serialisation": (software.serialization_s, hardware.serialization_s),
        "replacement": (0.0, replacement_s),
        "retrieval": (software.retrieval_s, hardware.retrieval_s),
        "warm-up": (software.warm_up_s, hardware.warm_up_s),
    }

    def draw(axes: Axes) -> None:
        left = [0.0, 0.0]
        for name, lengths_s in parts.items():
            axes.barh(("software", "hardware"), lengths_s, left=left, label=name)
            left = [start + length for start, length in zip(left, lengths_s, strict=True)]
        axes.set_xlabel("time from the failure (s)")
        axes.legend(frameon=False, fontsize=8, ncols=len(parts), loc="upper center")
        axes.set_ylim(-0.6, 2.1)

    return Figure("14", "a recovery, in parts", rows, notes, draw)


def figure_15a() -> Figure:
    """Return Fig 15a: effective training time against failures a day, 16 machines."""
    base = paper_p4d_100b().changed(duration_days=365)
    rows, simulated = _effective_time("15a", {rate: (base, rate) for rate in (1, 8)})
    notes = [_LINEAR_NOTE, f"{_SIMULATION_NOTE} 4 runs of 365 days each."]
    rates = [float(rate) for rate in range(1, 9)]
    return Figure(
        "15a",
        "effective training time, 16 machines",
        rows,
        notes,
        lambda axes: _draw_ratios(axes, "15a", rates, rates, simulated, "failures a day"),
    )


def figure_15b() -> Figure:
    """Return Fig 15b: effective training time against the number of machines."""
    base = paper_p4d_100b().changed(duration_days=120)
    rows, simulated = _effective_time(
        "15b", {size: (at_size(base, size), size * _PER_MACHINE_PER_DAY) for size in (200, 1000)}
    )
    forms = {name: closed_form(scenario, 1000 * _PER_MACHINE_PER_DAY) for name, scenario in _systems(base).items()}
    exact = forms["GEMINI"].renewal_ratio / forms["HighFreq"].renewal_ratio
    less = Difference(exact, "as for HighFreq above: the linear account understates it")
    rows += [
        compare("15b zero", DAY_S / forms["Strawman"].cost_s / _PER_MACHINE_PER_DAY, _LINEAR),
        compare("15b higher", forms["GEMINI"].linear_ratio / forms["HighFreq"].linear_ratio, _LINEAR),
        compare("15b higher", simulated["GEMINI"][1000] / simulated["HighFreq"][1000], _SIMULATED, less),
    ]
    notes = [
        "As in the paper, iteration, checkpoint and recovery take what they take on 16 machines, above which the paper "
        "ran nothing.",
        _LINEAR_NOTE,
        f"{_SIMULATION_NOTE} 4 runs of 120 days each.",
        f"At 1000 machines GEMINI is {100 * (exact - 1):.0f} % above HighFreq, not 54 %, and "
        f"{forms['GEMINI'].renewal_ratio / forms['Strawman'].renewal_ratio:.1f} times Strawman, which still trains.",
    ]
    sizes = [float(size) for size in range(100, 1001, 100)]
    rates = [_PER_MACHINE_PER_DAY * size for size in sizes]
    return Figure(
        "15b",
        "effective training time, 1.5 % of the machines fail a day",
        rows,
        notes,
        lambda axes: _draw_ratios(axes, "15b", sizes, rates, simulated, "machines"),
    )


def _systems(base: Scenario) -> dict[str, Scenario]:
    compared = policies(base)
    return {name: compared[name] for name in _SYSTEMS}


def _poisson(kind: FailureKind, per_machine_per_day: float) -> PoissonFailures:
    return PoissonFailures(failure=kind, per_machine_per_day=per_machine_per_day)


def _num_failures(summary: Summary) -> float:
    return sum(estimate.mean for estimate in summary.num_failures.values())


def _mean_wasted_min(scenario: Scenario, num_days: float) -> float:
    """T_wasted as it happened, in wall time: all time less recoveries and what the useful work takes undisturbed."""
    summary = run_scenario(scenario.changed(duration_days=num_days), 10, num_processes=1)
    mechanics = mechanics_of(scenario)
    undisturbed = summary.effective_time_ratio.mean * mechanics.interval_s / (mechanics.interval_s - mechanics.stall_s)
    recovering = sum(
        estimate.mean
        for cause, estimate in summary.wasted_shares.items()
        if cause not in (Cause.STALL, Cause.LOST_WORK, Cause.RETRIEVAL)
    )
    return (1 - undisturbed - recovering) * summary.duration_s / _num_failures(summary) / 60


def _mean_recovery_s(summary: Summary) -> float:
    """From a failure to training again."""
    lost = summary.wasted_shares[Cause.LOST_WORK].mean + summary.wasted_shares[Cause.STALL].mean
    wasted = sum(estimate.mean for estimate in summary.wasted_shares.values())
    return (wasted - lost) * summary.duration_s / _num_failures(summary)


def _effective_time(
    figure: str, points: Mapping[int, tuple[Scenario, float]]
) -> tuple[list[Row], dict[str, dict[int, float]]]:
    """Return the rows, and system -> x -> simulated ratio. `points`: x -> scenario and failures a day."""
    rows = []
    simulated: dict[str, dict[int, float]] = {name: {} for name in _SYSTEMS}
    for name in _SYSTEMS:
        for x, (base, failures_per_day) in points.items():
            failing = base.changed(failures=(_poisson("software", failures_per_day / base.num_machines),))
            scenario = _systems(failing)[name]
            form = closed_form(scenario, failures_per_day)
            ratio = run_scenario(scenario, 4, num_processes=1).effective_time_ratio.mean
            simulated[name][x] = ratio
            rows.append(compare(f"{figure} {name} {x}", form.linear_ratio, _LINEAR))
            rows.append(compare(f"{figure} {name} {x}", ratio, _SIMULATED, Difference(form.renewal_ratio, _LESS_LOST)))
    return rows, simulated


def _draw_ratios(
    axes: Axes,
    figure: str,
    x_values: Sequence[float],
    failures_per_day: Sequence[float],
    simulated: Mapping[str, Mapping[int, float]],
    x_label: str,
) -> None:
    systems = _systems(paper_p4d_100b())
    lines = {
        name: (x_values, [closed_form(systems[name], rate).linear_ratio for rate in failures_per_day])
        for name in _SYSTEMS
    }
    points = {}
    for name, ratios in simulated.items():
        points[f"{name}, simulated"] = (list(ratios), list(ratios.values()))
        points[f"{name}, paper"] = (list(ratios), [PAPER[f"{figure} {name} {x}"].value for x in ratios])
    draw_lines(axes, lines, points, x_label, "effective training time")
