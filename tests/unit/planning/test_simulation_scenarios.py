"""Scenario files and demo reports: what they may say, and the sentence when they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.localstack.demo.records import DemoRecord, DrillRecord, StallRecord
from gemini_ft.planning.simulation.demo_report import MeasuredPhases, MeasuredRecovery, read_demo_report
from gemini_ft.planning.simulation.loading import load_scenario
from gemini_ft.planning.simulation.policies import GeminiFT, HighFreq
from gemini_ft.planning.simulation.presets import PRESETS, preset
from gemini_ft.planning.simulation.scenario import (
    CodedGroups,
    ExponentialDelay,
    PoissonFailures,
    Scenario,
    TraceFailures,
    UniformDelay,
)

WHOLE = """
num_machines: 8
iteration_s: 10
shard_bytes: 1.0e9
network_bytes_per_s: 1e9
serialization_bytes_per_s: 1e9
detection_s: 5
warm_up_s: 60
failures:
  - {kind: poisson, failure: software, per_machine_per_day: 0.1}
machines: {num_standbys: 1, lead_time_s: {mean_s: 300}}
persistent: {bandwidth_bytes_per_s: 1e9}
redundancy: {kind: coded}
policy: {kind: high_freq}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_file_may_give_every_value(tmp_path: Path) -> None:
    loaded = load_scenario(write(tmp_path, WHOLE))
    assert loaded.name == "mine"
    assert loaded.machines.lead_time_s == ExponentialDelay(mean_s=300)
    assert loaded.redundancy == CodedGroups()
    assert loaded.policy == HighFreq()
    assert loaded.total_bytes == 8e9


def test_a_file_may_start_from_a_preset(tmp_path: Path) -> None:
    loaded = load_scenario(write(tmp_path, "{preset: paper-p4d-100b, num_machines: 32, name: twice}"))
    assert loaded == preset("paper-p4d-100b").changed(name="twice", num_machines=32)
    assert loaded.machines.lead_time_s == UniformDelay(low_s=240, high_s=420)


def test_a_file_may_name_a_trace_and_a_report_beside_it(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time_s,failure,machines\n60,software,15\n")
    (tmp_path / "demo.json").write_text(record().model_dump_json())
    loaded = load_scenario(
        write(
            tmp_path,
            "preset: paper-p4d-100b\n"
            "failures: [{kind: trace, path: trace.csv}]\n"
            "policy: {kind: gemini_ft, report: demo.json}\n",
        )
    )
    (trace,) = loaded.failures
    assert isinstance(trace, TraceFailures)
    assert loaded.policy == GeminiFT(measured=read_demo_report(tmp_path / "demo.json"))


@pytest.mark.parametrize("name", PRESETS)
def test_scenarios_survive_json(name: str) -> None:
    made = preset(name)
    assert Scenario.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: [1", "line 1 of the scenario .* is no YAML"),
        ("a: 1\nb: *nobody\n", "line 2 of the scenario .* undefined alias"),
        ("3", "must be a mapping"),
        ("preset: paper-p5", "no preset 'paper-p5'; choose from paper-p4d-100b, paper-p3dn-40b, local-demo"),
        (WHOLE.replace("iteration_s: 10", "iteration_s: -10"), "iteration_s: Input should be greater than 0"),
        (WHOLE.replace("iteration_s: 10", "iteration_s: .inf"), "iteration_s: Input should be a finite number"),
        (WHOLE.replace("iteration_s", "iterations"), "iteration_s: Field required"),
        (WHOLE + "speed: 3\n", "speed: Extra inputs are not permitted"),
        (
            WHOLE.replace("per_machine_per_day: 0.1", "per_machine_per_day: -1"),
            r"failures\.0\.poisson\.per_machine_per_day: Input should be greater than or equal to 0",
        ),
        (WHOLE.replace("day: 0.1", "day: 1e9"), r"failures: about 2.4e\+11 of them"),
        (WHOLE.replace("{mean_s: 300}", "{low_s: 9, high_s: 3}"), "high_s is 3, below low_s 9"),
        (WHOLE.replace("{mean_s: 300}", "-1"), "lead_time_s.*greater than or equal to 0"),
        (WHOLE.replace("num_machines: 8", "num_machines: 3"), "redundancy: an erasure code of 4 members"),
        (
            WHOLE.replace("kind: poisson, failure: software, per_machine_per_day", "kind: domain, per_domain_per_day"),
            "failures.0 hits domains, but domains is missing",
        ),
        (WHOLE.replace("kind: high_freq", "kind: gemini_3"), "policy: Input tag 'gemini_3'"),
        ("{preset: local-demo, failures: [{kind: trace, path: absent.csv}]}", "absent.csv cannot be read"),
        ("{preset: local-demo, policy: {kind: gemini_ft, report: absent.json}}", "absent.json cannot be read"),
        (
            "{preset: local-demo, failures: "
            "[{kind: trace, failures: [{time_s: 1, failure: software, machines: [4]}]}]}",
            "failures.0 names machine 4, but machines are numbered 0 to 3",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load_scenario(write(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.yaml cannot be read: No such file"):
        load_scenario(tmp_path / "absent.yaml")


def test_a_changed_scenario_is_checked_again() -> None:
    with pytest.raises(ValueError, match="num_machines"):
        preset("paper-p4d-100b").changed(num_machines=0)
    trace = {"kind": "trace", "failures": [{"time_s": 1, "failure": "software", "machines": [16]}]}
    with pytest.raises(ValueError, match="numbered 0 to 15"):
        preset("paper-p4d-100b").changed(failures=[trace])
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        PoissonFailures(failure="software", per_machine_per_day=-1)


def drill(key: str, set_up: float, whole_again: float, **phases_ms: float) -> DrillRecord:
    phases_ms |= {"set_up": set_up}
    total = sum(phases_ms.values())
    return DrillRecord(
        key=key,
        title="",
        what="",
        at_step=3,
        step_after_ms=total,
        whole_again_ms=total + whole_again,
        phases_ms=phases_ms,
    )


def record(**values: Any) -> DemoRecord:
    common = {"fence": 10.0, "plan": 20.0, "re_rendezvous": 30.0, "reserve": 1.0, "fetch": 2.0, "load": 3.0}
    made = DemoRecord(
        version="0.1.0",
        machine={},
        num_steps=100,
        seed=0,
        num_ranks=4,
        num_replicas=2,
        drills=(
            drill("a", 1000, 100, detect=50, first_step=700, **common),
            DrillRecord(key="b", title="", what="", at_step=4, whole_again_ms=9),
            drill("c", 2000, 20, detect=800, first_step=500, **common),
            drill("a'", 3000, 100, detect=70, first_step=900, **common),
        ),
        num_steps_redone=0,
        differing_steps=(),
        digests={},
        reference_digests={},
        stall=StallRecord(mean_ms=7, max_ms=8, step_ms=600, step_without_ms=450),
        memory=(),
        duration_s=100,
    )
    return made.model_copy(update=values)


def test_a_report_of_the_demo_gives_the_phases(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    path.write_text(record().model_dump_json())
    measured = read_demo_report(path)
    # The first step counts only beyond the usual 600 ms.
    assert measured.software.model_dump() == pytest.approx(
        {"detection_s": 0.060, "coordination_s": 0.060, "retrieval_s": 0.006, "warm_up_s": (1.1 + 3.3) / 2}
    )
    assert measured.hardware.detection_s == pytest.approx(0.8)
    assert measured.hardware.warm_up_s == pytest.approx(2.0)
    assert measured.stall_s == pytest.approx(0.007)
    assert measured.re_replication_s == pytest.approx(0.020)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"stall": None}, "no report of .* stall: "),
        ({"drills": []}, r"no recovery of drill \(c\)"),
        ({"drills": [{"key": "c", "phases_ms": {"fence": 1}}]}, r"when drill \(c\) had all copies again"),
        (
            {"drills": [{"key": "c", "phases_ms": {"fence": 1}, "step_after_ms": 1, "whole_again_ms": 2}]},
            r"no recovery of drill \(a\) or \(a'\)",
        ),
    ],
)
def test_a_report_that_lacks_something_is_refused_with_a_sentence(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    path = tmp_path / "demo.json"
    path.write_text(json.dumps(json.loads(record().model_dump_json()) | changed))
    with pytest.raises(ConfigurationError, match=named):
        read_demo_report(path)


def test_what_is_no_report_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"demo\.json is no report of `gemini-ft demo --json`"):
        read_demo_report(tmp_path / "demo.json")


def test_measured_phases_are_not_negative() -> None:
    with pytest.raises(ValueError, match="stall_s"):
        MeasuredRecovery(
            software=MeasuredPhases(detection_s=1, coordination_s=1, retrieval_s=1, warm_up_s=1),
            hardware=MeasuredPhases(detection_s=1, coordination_s=1, retrieval_s=1, warm_up_s=1),
            stall_s=-1,
            re_replication_s=0,
        )
