"""`gemini-ft simulate`: presets, scenarios, policies, plots, progress, refusals."""

import json
from pathlib import Path

import pytest
from command_line import Terminal, assert_refused, gemini_ft

SCENARIO = Path(__file__).parents[3] / "examples" / "planning" / "scenario.yaml"
SHORT = ("--seeds", 2, "--days", 10, "--processes", 1)


def test_all_policies_are_compared_on_the_same_failures() -> None:
    found = json.loads(gemini_ft("simulate", "paper-p4d-100b", "--policy", "all", *SHORT, "--json").stdout)
    policies = found["policies"]
    assert list(policies) == ["Strawman", "HighFreq", "GEMINI", "Gemini-FT, cold", "Gemini-FT"]
    assert len({json.dumps(summary["num_failures"]) for summary in policies.values()}) == 1
    ratios = {name: summary["effective_time_ratio"]["mean"] for name, summary in policies.items()}
    assert ratios["HighFreq"] < ratios["GEMINI"] < ratios["Gemini-FT, cold"] < ratios["Gemini-FT"]
    for name, summary in policies.items():
        shares = sum(share["mean"] for share in summary["wasted_shares"].values())
        assert ratios[name] + shares == pytest.approx(1), name
    assert found["scenario"]["duration_days"] == 10


def test_two_runs_print_the_same_also_on_two_processes() -> None:
    arguments = ("simulate", "local-demo", "--seeds", 4, "--days", 0.1)
    first = gemini_ft(*arguments, "--processes", 1)
    assert first.code == 0
    assert gemini_ft(*arguments, "--processes", 2).stdout == first.stdout
    assert "local-demo: 4 machines, 0.1 days, 4 runs, means and 95 % intervals" in first.stdout
    assert "Gemini-FT" in first.stdout


def test_the_example_scenario_runs_with_a_policy_of_its_own() -> None:
    done = gemini_ft("simulate", SCENARIO, *SHORT)
    assert done.code == 0, done.stderr
    assert "racks of 16: 128 machines, 10 days, 2 runs" in done.stdout
    rows = [line.split("  ")[1] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert rows == ["policy", "Gemini-FT, cold", "policy", "Gemini-FT, cold"]


def test_a_policy_of_the_scenario_stays_as_it_is_there(tmp_path: Path) -> None:
    scenario = tmp_path / "rare.yaml"
    scenario.write_text("preset: paper-p4d-100b\npolicy: {kind: strawman, interval_s: 86400}\n")
    found = json.loads(gemini_ft("simulate", scenario, "--policy", "strawman", *SHORT, "--json").stdout)
    assert found["scenario"]["policy"]["interval_s"] == 86400
    usual = json.loads(gemini_ft("simulate", "paper-p4d-100b", "--policy", "strawman", *SHORT, "--json").stdout)
    assert _ratio(found, "Strawman") < _ratio(usual, "Strawman")


def test_measured_phases_of_a_demo_are_used(tmp_path: Path) -> None:
    report = tmp_path / "demo.json"
    slow = {"phases_ms": {"detect": 60_000, "set_up": 600_000}, "step_after_ms": 0, "whole_again_ms": 0}
    drills = [{"key": key, **slow} for key in ("a", "c")]
    report.write_text(json.dumps({"drills": drills, "stall": {"mean_ms": 1, "step_ms": 1}}))
    arguments = ("simulate", "paper-p4d-100b", "--policy", "gemini-ft", *SHORT, "--json")
    usual, slowed = (json.loads(gemini_ft(*arguments, *more).stdout) for more in ((), ("--phases", report)))
    assert _ratio(slowed, "Gemini-FT") < _ratio(usual, "Gemini-FT")
    assert_refused(gemini_ft("simulate", "paper-p4d-100b", "--phases", report), "add --policy gemini-ft")


def test_plots_are_svg_and_png(tmp_path: Path) -> None:
    done = gemini_ft("simulate", "local-demo", *SHORT[:2], "--days", 0.1, "--processes", 1, "--plots", tmp_path / "new")
    assert done.code == 0, done.stderr
    assert (tmp_path / "new" / "local-demo-wasted.svg").read_text().startswith("<?xml")
    assert (tmp_path / "new" / "local-demo-wasted.png").read_bytes().startswith(b"\x89PNG")


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    arguments = ("simulate", "local-demo", "--seeds", 2, "--days", 0.1, "--processes", 1, "--json")
    quiet = gemini_ft(*arguments)
    assert quiet.stderr == ""
    shown = gemini_ft(*arguments, stderr=Terminal())
    assert "100%" in shown.stderr
    assert shown.stdout == quiet.stdout


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    assert_refused(
        gemini_ft("simulate", "paper-p3dn"), "no preset 'paper-p3dn'; choose from paper-p3dn-40b, paper-p4d-100b"
    )
    assert_refused(gemini_ft("simulate", "locl-demo"), "choose from local-demo, ")
    assert_refused(gemini_ft("simulate", tmp_path / "none.yaml"), "none.yaml cannot be read")
    assert_refused(gemini_ft("simulate", "local-demo", "--policy", "hifreq"), "'hifreq'; choose from highfreq, ")
    assert_refused(gemini_ft("simulate", "local-demo", "--seeds", 0), "num_seeds is 0")
    assert_refused(gemini_ft("simulate", "local-demo", "--processes", 0), "num_processes is 0")
    assert_refused(gemini_ft("simulate", "local-demo", "--days", -1), "--days is -1", "more than 0")
    trace = tmp_path / "failures.csv"
    trace.write_text("time_s,failure,machines\n20,software,1\n10,software,1\n")
    scenario = tmp_path / "trace.yaml"
    scenario.write_text(f"preset: local-demo\nfailures: [{{kind: trace, path: {trace.name}}}]\n")
    assert_refused(gemini_ft("simulate", scenario), "line 3", "sort by time_s")
    scenario.write_text("preset: local-demo\niteration_s: -1\n")
    assert_refused(gemini_ft("simulate", scenario), "iteration_s")


def _ratio(found: dict, policy: str) -> float:
    return found["policies"][policy]["effective_time_ratio"]["mean"]
