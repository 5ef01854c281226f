"""README's five-minute tour, word for word: every line of its shell blocks is run by bash, with a browser open."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Visitor, chromium, visitor

from gemini_ft.cli.config import access_to
from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import JobModel, JobPhase
from gemini_ft.localstack.waiting import wait_until

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


def blocks() -> list[list[str]]:
    """The lines of each shell block of the tour."""
    readme = (ROOT / "README.md").read_text()
    tour = readme.partition("## Five-minute tour\n")[2].partition("\n## ")[0]
    return [block.strip().splitlines() for block in re.findall(r"```sh\n(.*?)```", tour, re.DOTALL)]


class Reader:
    """Somebody who types the lines, and looks each time what has come of it."""

    def __init__(self, variables: dict[str, str], api: ApiClient) -> None:
        self.api = api
        self._variables = variables

    @property
    def job(self) -> JobModel:
        return self.api.job(self._variables["JOB"])

    @property
    def node_id(self) -> str:
        return self._variables["NODE"]

    def type(self, line: str) -> str:
        """Run a line; what it assigns is known to the lines after it."""
        name = line.partition("=$(")[0] if "=$(" in line else ""
        shown = f'{line}\nprintf %s "${name}"' if name else line
        done = subprocess.run(
            ["bash", "-euc", shown], cwd=ROOT, env=self._variables, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if name:
            self._variables[name] = done.stdout
        return done.stdout

    def wait_recovered(self, generation: int) -> None:
        def has_recovered() -> bool:
            recoveries = {found.generation: found.outcome for found in self.api.recoveries(self.job.job_id)}
            return self.job.phase is JobPhase.RUNNING and recoveries.get(generation) == "completed"

        wait_until(has_recovered, f"generation {generation} to run", PATIENCE_S)


@contextmanager
def up(line: str, variables: dict[str, str]) -> Iterator[dict[str, str]]:
    """The first terminal; yields what `gemini-ft up` tells, and ends it by Ctrl-C."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {line}"], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
    ) as terminal:
        try:
            assert terminal.stdout is not None
            told = {}
            for printed in terminal.stdout:
                if printed.startswith("Ctrl-C"):
                    break
                name, _, value = printed.rpartition(" ")
                told[name.strip()] = value.strip()
            yield told
            terminal.send_signal(signal.SIGINT)
            assert terminal.wait(PATIENCE_S) == 0
            assert terminal.stdout.read() == "everything has been ended and removed\n"
        finally:
            terminal.kill()


def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    variables = dict(os.environ)
    (start,), submit, kill, drain, stop = blocks()
    with chromium() as browser, up(start, variables) as told:
        access = access_to()
        token = Path(told["token file"]).read_text().strip()
        assert access.token == token
        with ApiClient(access.url, access.token) as api, visitor(browser, told["dashboard"]) as guest:
            guest.log_in(token)
            walk(Reader(variables, api), guest, submit, kill, drain, stop)
    assert list(tmp_path.rglob("contexts.json")) != []
    assert not Path(told["logs"]).exists()


def walk(reader: Reader, guest: Visitor, *parts: list[str]) -> None:
    """The second terminal and the browser."""
    (submit, until_running, placement), (kill, recoveries), (name_node, drain, nodes), stopping = parts
    reader.type(submit)
    reader.type(until_running)
    assert all(node_id in reader.type(placement) for node_id in reader.job.slots.values())
    guest.go(f"/jobs/{reader.job.job_id}")
    guest.sees(guest.panel("State"), "running, generation 1")

    reader.type(kill)
    reader.wait_recovered(2)
    guest.sees(guest.panel("State"), "running, generation 2")
    guest.keep("tour")
    assert "rank 2" in reader.type(recoveries)

    reader.type(name_node)
    assert reader.job.slots[1] == reader.node_id
    reader.type(drain)
    reader.wait_recovered(3)
    assert reader.node_id not in reader.job.slots.values()
    assert [found.num_steps_lost for found in reader.api.recoveries(reader.job.job_id) if found.generation == 3] == [0]
    assert re.search(rf"{reader.node_id} .* drain(ing|ed) ", reader.type(nodes))

    stop, until_suspended, resume, until_running_again, delete = stopping
    reader.type(stop)
    reader.type(until_suspended)
    final = reader.job.final_step
    reader.type(resume)
    reader.type(until_running_again)
    assert reader.job.restored_step == final is not None
    reader.type(delete)
    assert list(reader.api.jobs()) == []
