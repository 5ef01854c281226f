"""Fault points: quiet unless armed, and then only the one that is named, at the passage that is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemini_ft.agent.replicas
from gemini_ft import faults
from gemini_ft.contracts.errors import ConfigurationError

PROGRAM = (
    "from gemini_ft.faults import fault_point\nfor _ in range(3): fault_point('sender.before_seal')\nprint('alive')"
)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm(None)


def test_an_armed_point_strikes_once_at_its_passage() -> None:
    faults.arm("sender.before_seal:2=raise")
    faults.fault_point("sender.before_seal")
    faults.fault_point("sender.after_seal")
    with pytest.raises(faults.FaultInjectedError, match=r"sender\.before_seal"):
        faults.fault_point("sender.before_seal")
    faults.fault_point("sender.before_seal")


def test_a_process_armed_by_its_environment_kills_itself() -> None:
    environment = os.environ | {faults.FAULT_VARIABLE: "sender.before_seal:3=kill"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize(
    "specification", ["sender.before_seal", "sender.before_seal=explode", "sender.before_seal:0=kill"]
)
def test_a_malformed_specification_is_refused(specification: str) -> None:
    with pytest.raises(ConfigurationError, match="NAME"):
        faults.arm(specification)


def test_an_unknown_point_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"owner\.before_ack_recorded"):
        faults.arm("owner.lunch=kill")


def test_the_registry_is_exactly_what_the_replica_code_passes() -> None:
    folder = Path(gemini_ft.agent.replicas.__path__[0])
    used = {
        name for path in folder.glob("*.py") for name in re.findall(r'fault_point\("([a-z_.]+)"\)', path.read_text())
    }
    assert used == {name for name in faults.FAULT_POINTS if not name.startswith("rank.")}
