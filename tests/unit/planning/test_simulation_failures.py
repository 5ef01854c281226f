"""Failure processes have the rates they promise, and traces say which line is wrong."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.simulation.failures import Failure, generate_failures
from gemini_ft.planning.simulation.policies import Gemini, Strawman
from gemini_ft.planning.simulation.presets import preset
from gemini_ft.planning.simulation.scenario import (
    DomainFailures,
    Domains,
    FailureProcess,
    PoissonFailures,
    Scenario,
    TraceFailure,
    TraceFailures,
    WeibullFailures,
)
from gemini_ft.planning.simulation.trace import read_trace

DAY_US = 86_400 * 10**6


def scenario(*failures: FailureProcess, num_machines: int = 1000, rack: int = 32) -> Scenario:
    return preset("paper-p4d-100b").changed(
        num_machines=num_machines, failures=failures, domains=Domains(num_machines=rack), duration_days=30
    )


def within_noise(count: int, mean: float) -> bool:
    """A Poisson count is within four standard deviations of its mean."""
    return abs(count - mean) < 4 * math.sqrt(mean)


def test_poisson_failures_have_their_rate_and_spread_over_time_and_machines() -> None:
    failures = generate_failures(scenario(PoissonFailures(failure="hardware", per_machine_per_day=0.1)), seed=1)
    assert within_noise(len(failures), 3000)
    assert within_noise(sum(failure.at_us < 10 * DAY_US for failure in failures), 1000)
    assert within_noise(sum(failure.machines[0] < 500 for failure in failures), 1500)
    assert all(failure.is_hardware and 0 <= failure.at_us < 30 * DAY_US for failure in failures)


@pytest.mark.parametrize("shape", [0.6, 1.0, 3.0])
def test_weibull_failures_of_old_machines_have_a_constant_rate(shape: float) -> None:
    process = WeibullFailures(failure="software", shape=shape, mean_days=10)
    failures = [failure for seed in range(4) for failure in generate_failures(scenario(process), seed)]
    # Counts of renewals vary more than Poisson's by the squared variation of a life, here at most 3.1.
    spread = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1
    for first_day in (0, 10, 20):
        count = sum(first_day * DAY_US <= failure.at_us < (first_day + 10) * DAY_US for failure in failures)
        assert abs(count - 4000) < 4 * math.sqrt(4000 * max(1.0, spread))


def test_new_machines_fail_early_or_late_by_shape() -> None:
    for shape, low, high in ((0.6, 1.3, 2.5), (3.0, 0.0, 0.1)):
        process = WeibullFailures(failure="software", shape=shape, mean_days=10, are_new=True)
        failures = generate_failures(scenario(process), seed=0)
        in_first_days = sum(failure.at_us < 3 * DAY_US for failure in failures)
        assert low < in_first_days / (1000 * 3 / 10) < high


def test_weibull_of_shape_one_is_exponential() -> None:
    process = WeibullFailures(failure="software", shape=1, mean_days=10, are_new=True)
    failures = generate_failures(scenario(process, num_machines=10_000), seed=0)
    per_machine = Counter(failure.machines[0] for failure in failures)
    num_spared = 10_000 - len(per_machine)
    assert within_noise(num_spared, 10_000 * math.exp(-3))


def test_a_domain_fails_as_a_whole_or_by_its_share() -> None:
    whole = generate_failures(scenario(DomainFailures(per_domain_per_day=0.1), num_machines=100, rack=10), seed=0)
    assert within_noise(len(whole), 30)
    racks = set(map(tuple, Domains(num_machines=10).members(100)))
    assert {failure.machines for failure in whole} <= racks
    process = DomainFailures(per_domain_per_day=1, share=0.25)
    part = generate_failures(scenario(process, num_machines=100, rack=10), seed=0)
    assert within_noise(sum(len(failure.machines) for failure in part), 10 * 30 * 2.5)


def test_the_mean_number_of_failures_is_known_beforehand() -> None:
    made = scenario(
        PoissonFailures(failure="software", per_machine_per_day=0.01),
        WeibullFailures(failure="hardware", shape=0.7, mean_days=100),
        DomainFailures(per_domain_per_day=0.5),
        TraceFailures(failures=(TraceFailure(time_s=5, failure="software", machines=(0,)),) * 15),
    )
    assert made.failures_per_day == pytest.approx(10 + 10 + 16 + 0.5)
    assert abs(len(generate_failures(made, seed=0)) - 30 * 36.5) < 4 * math.sqrt(30 * (10 + 3.1 * 10 + 16))


@pytest.mark.parametrize(("num_machines", "size"), [(100, 10), (100, 7), (5, 8), (17, 16)])
def test_domains_hold_every_machine_once(num_machines: int, size: int) -> None:
    for are_spread in (True, False):
        members = Domains(num_machines=size, are_spread=are_spread).members(num_machines)
        assert sorted(machine for rack in members for machine in rack) == list(range(num_machines))
        assert max(map(len, members)) <= size
        assert min(map(len, members)) > 0


def test_spread_neighbours_are_in_different_domains() -> None:
    rack_of = {
        machine: rack for rack, members in enumerate(Domains(num_machines=10).members(95)) for machine in members
    }
    assert all(len({rack_of[first + step] for step in range(4)}) == 4 for first in range(95 - 3))


def test_processes_are_merged_in_order_of_time_and_do_not_disturb_each_other() -> None:
    first = PoissonFailures(failure="software", per_machine_per_day=0.01)
    second = PoissonFailures(failure="hardware", per_machine_per_day=0.01)
    both = generate_failures(scenario(first, second), seed=7)
    assert [failure.at_us for failure in both] == sorted(failure.at_us for failure in both)
    assert [failure for failure in both if not failure.is_hardware] == generate_failures(scenario(first), seed=7)


def test_policies_meet_the_same_failures() -> None:
    made = scenario(PoissonFailures(failure="software", per_machine_per_day=0.01))
    assert generate_failures(made.changed(policy=Strawman()), 3) == generate_failures(made.changed(policy=Gemini()), 3)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_replayed_up_to_the_end_of_the_run(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "time_s, failure, machines\n60.5,software,3\n\n120,hardware,1;2;1\n120,software,0\n2592000,software,1\n",
    )
    trace = read_trace(path, num_machines=4)
    assert trace == TraceFailures(
        failures=(
            TraceFailure(time_s=60.5, failure="software", machines=(3,)),
            TraceFailure(time_s=120, failure="hardware", machines=(1, 2)),
            TraceFailure(time_s=120, failure="software", machines=(0,)),
            TraceFailure(time_s=2_592_000, failure="software", machines=(1,)),
        )
    )
    assert generate_failures(scenario(trace), seed=0) == [
        Failure(60_500_000, False, (3,)),
        Failure(120_000_000, True, (1, 2)),
        Failure(120_000_000, False, (0,)),
    ]


HEADER = "time_s,failure,machines\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "has no failures"),
        (HEADER, "has no failures"),
        ("60,software,3\n", r"line 1 of the failure trace .* the header is '60,software,3'"),
        (HEADER + "60,software\n", "line 2 .* 2 columns instead of 3"),
        (HEADER + "60,software,3\n50,software,3\n", "line 3 .* time_s is 50, before 60 in the line above"),
        (HEADER + "soon,software,3\n", "line 2 .* time_s is 'soon'"),
        (HEADER + "\n-1,software,3\n", "line 3 .* time_s is '-1'"),
        (HEADER + "nan,software,3\n", "line 2 .* time_s is 'nan'"),
        (HEADER + "60,cosmic,3\n", "line 2 .* failure is 'cosmic'; give software or hardware"),
        (HEADER + "60,software,4\n", "line 2 .* machines is '4'; give numbers from 0 to 3"),
        (HEADER + "60,software,1;\n", "line 2 .* machines is '1;'"),
        (HEADER + '60,software,"3\n', "line 2 .* unexpected end of data"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_trace(write(tmp_path, text), num_machines=4)


def test_a_trace_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.csv cannot be read: No such file"):
        read_trace(tmp_path / "absent.csv", num_machines=4)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not a text file"):
        read_trace(tmp_path / "binary.csv", num_machines=4)
