"""Two real ranks agree: a failure of one is the same error on both, at the same step; lag makes both skip alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gemini_ft.worker import Checkpointer
from gemini_ft.worker.testing import SoloAgent


@pytest.fixture
def agent() -> Iterator[SoloAgent]:
    with tempfile.TemporaryDirectory(prefix="gft") as folder, SoloAgent(Path(folder), world_size=2) as agent:
        yield agent


def _run(agent: SoloAgent, tmp_path: Path, scenario: str) -> list[dict[str, Any]]:
    ranks = []
    for rank in range(2):
        with (tmp_path / f"log{rank}").open("wb") as log:
            command = [sys.executable, __file__, scenario, str(tmp_path / "rendezvous"), str(tmp_path / f"out{rank}")]
            environment = os.environ | agent.environment(rank) | {"OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [rank.wait(timeout=110) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    assert codes == [0, 0], "\n".join((tmp_path / f"log{rank}").read_text()[-3000:] for rank in range(2))
    return [json.loads((tmp_path / f"out{rank}").read_text()) for rank in range(2)]


def test_a_failure_on_one_rank_is_the_same_error_on_both_at_the_same_step(agent: SoloAgent, tmp_path: Path) -> None:
    reports = _run(agent, tmp_path, "failure")
    assert reports[0] == reports[1]
    assert reports[0]["error"] == "rank 1: the fault point rank.before_sealed was armed to raise here"
    assert reports[0]["staged"] == [True, True, True]


def test_one_rank_that_lags_makes_both_skip_alike(agent: SoloAgent, tmp_path: Path) -> None:
    reports = _run(agent, tmp_path, "lag")
    assert reports[0] == reports[1]
    assert reports[0]["staged"] == [True, False, True, False, True]


def test_a_state_that_one_rank_cannot_keep_refuses_both(agent: SoloAgent, tmp_path: Path) -> None:
    reports = _run(agent, tmp_path, "refusal")
    assert reports[0] == reports[1]
    assert reports[0]["error"].startswith("rank 0: state odd/x is a builtins.object")


def _hide_or_show_the_seal(checkpointer: Checkpointer, *, hide: bool) -> None:
    """Let this rank's page say what an agent would that lags by one step, or does not."""
    page, last_begun = checkpointer._client.rank_page, checkpointer._last_begun
    deadline = time.monotonic() + 20
    checkpointer._stager.wait()  # type: ignore[union-attr]
    while hide and page.sealed_everywhere_step != last_begun:
        assert time.monotonic() < deadline, f"step {last_begun} was never sealed"
        time.sleep(0.001)
    page.sealed_everywhere_step = None if hide else last_begun


def _main(scenario: str, rendezvous: str, out: str) -> None:
    import torch
    import torch.distributed as dist

    from gemini_ft import faults
    from gemini_ft.contracts.errors import GeminiError

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"x": object() if scenario == "refusal" and dist.get_rank() == 0 else 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    weight = torch.nn.Parameter(torch.ones(100_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    checkpointer = Checkpointer(
        {"model": torch.nn.ParameterList([weight]), "optimizer": optimizer, "odd": Odd()},
        on_lag="skip" if scenario == "lag" else "wait",
        commit_wait=timedelta(seconds=20),
    )
    if scenario == "failure" and rank == 1:
        faults.arm("rank.before_sealed:3=raise")
    staged, error = [], ""
    try:
        checkpointer.restore()
        for step in range(5):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            staged.append(checkpointer.step(step))
            if scenario == "lag":
                _hide_or_show_the_seal(checkpointer, hide=rank == 1 and staged[-1])
    except GeminiError as raised:
        error = str(raised)
    Path(out).write_text(json.dumps({"staged": staged, "error": error}))
    dist.barrier()
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
