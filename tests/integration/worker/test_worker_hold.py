"""Ranks stage at the job's interval and on request, and a held job stops after one committed step, alike on all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_ft.contracts.errors import FencedError, UnavailableError
from gemini_ft.contracts.local_protocol import Sealed
from gemini_ft.faults import FAULT_VARIABLE
from gemini_ft.worker import Checkpointer
from gemini_ft.worker.testing import SoloAgent

PATIENCE_S = 60.0


def eventually(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


class Run:
    """A training whose every step depends on the state and on the random generator."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.weight = torch.nn.Parameter(torch.ones(30_000))
        self.optimizer = torch.optim.Adam([self.weight], lr=0.1)

    def train_step(self) -> None:
        self.weight.grad = torch.randn_like(self.weight) * self.weight
        self.optimizer.step()

    def checkpointer(self, **options: Any) -> Checkpointer:
        return Checkpointer({"weight": torch.nn.ParameterList([self.weight]), "optimizer": self.optimizer}, **options)

    def go(self, last: int, **options: Any) -> list[int]:
        """Train through step `last`, from wherever memory says; return the steps that were staged."""
        staged = []
        with self.checkpointer(**options) as checkpointer:
            start = checkpointer.restore()
            for step in range(0 if start is None else start + 1, last + 1):
                self.train_step()
                if checkpointer.step(step):
                    staged.append(step)
        return staged


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SoloAgent]:
    with tempfile.TemporaryDirectory(prefix="gft") as folder, SoloAgent(Path(folder)) as agent:
        for name, value in agent.environment().items():
            monkeypatch.setenv(name, value)
        yield agent


@pytest.fixture
def in_background() -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    with ThreadPoolExecutor(1) as executor:
        yield executor.submit


# ---- interval and request


def test_every_third_step_is_staged_and_counts_from_the_restored_one(agent: SoloAgent) -> None:
    agent.checkpoint_interval_steps = 3
    assert Run().go(7) == [0, 3, 6]
    assert agent.recover() == 6
    os.environ.update(agent.environment())
    assert Run().go(13) == [9, 12]


def test_a_request_is_served_once_and_restarts_the_interval(agent: SoloAgent) -> None:
    agent.checkpoint_interval_steps = 10
    run, staged = Run(), []
    with run.checkpointer() as checkpointer:
        checkpointer.restore()
        for step in range(20):
            if step in (4, 7):
                agent.request_checkpoint(2 if step == 4 else 1)
            run.train_step()
            if checkpointer.step(step):
                staged.append(step)
        assert checkpointer.num_skipped == 0
    assert staged == [0, 4, 14]


def test_a_version_that_is_due_but_cannot_be_begun_is_tried_again(agent: SoloAgent) -> None:
    agent.checkpoint_interval_steps = 3
    agent.acknowledging = False
    run = Run()
    with run.checkpointer(on_lag="skip") as checkpointer:
        checkpointer.restore()
        staged = []
        for step in range(7):
            if step == 5:
                # Its next life hears again of what is sealed.
                agent.stop()
                agent.acknowledging = True
                agent.received.clear()
                agent.start()
                agent.wait_for(Sealed, 0)
            run.train_step()
            staged.append(checkpointer.step(step))
        assert checkpointer.num_skipped == 2, "steps 3 and 4 were due, 1 and 2 were not"
    assert staged == [True, False, False, False, False, True, False]


# ---- holding


@pytest.mark.parametrize("interval_steps", [1, 1000])
def test_a_held_run_resumes_bit_identical_with_no_step_lost(
    agent: SoloAgent, in_background: Callable[[Callable[[], Any]], Future[Any]], interval_steps: int
) -> None:
    agent.checkpoint_interval_steps = interval_steps
    run = Run()
    training = in_background(lambda: run.go(sys.maxsize))
    agent.wait_for(Sealed, 0, PATIENCE_S)
    agent.hold()
    eventually("the rank to be held", lambda: agent.held_step(0) is not None or training.done())
    held_step = agent.held_step(0)
    assert held_step in agent.sealed_steps(0)
    assert agent.recover() == held_step
    with pytest.raises(FencedError):
        training.result(PATIENCE_S)
    assert held_step is not None
    os.environ.update(agent.environment())
    resumed = Run()
    resumed.go(held_step + 3)
    expected = Run()
    for _ in range(held_step + 4):
        expected.train_step()
    assert torch.equal(resumed.weight, expected.weight)


def test_an_agent_that_is_restarted_hears_that_its_rank_is_held(
    agent: SoloAgent, in_background: Callable[[Callable[[], Any]], Future[Any]]
) -> None:
    training = in_background(lambda: Run().go(sys.maxsize))
    agent.wait_for(Sealed, 0, PATIENCE_S)
    agent.hold()
    eventually("the rank to be held", lambda: agent.held_step(0) is not None)
    held_step = agent.held_step(0)
    agent.stop()
    agent.received.clear()
    agent.start()
    agent.wait_for(Sealed, held_step or 0)
    eventually("the rank to say again that it is held", lambda: agent.held_step(0) == held_step)
    agent.recover()
    with pytest.raises(FencedError):
        training.result(PATIENCE_S)


def test_a_version_that_lags_is_waited_for_before_the_held_one(
    agent: SoloAgent, in_background: Callable[[Callable[[], Any]], Future[Any]]
) -> None:
    agent.acknowledging = False
    run = Run()
    with run.checkpointer(on_lag="skip") as checkpointer:
        checkpointer.restore()
        for step in (0, 1):
            run.train_step()
            assert checkpointer.step(step) is (step == 0)
        agent.hold()
        run.train_step()
        training = in_background(lambda: checkpointer.step(2))
        eventually("the rank to hold step 2", lambda: checkpointer._client.rank_page.finished_step == 2)
        assert agent.held_step(0) is None
        assert sorted(agent.sealed_steps(0)) == [0]
        agent.stop()
        agent.acknowledging = True
        agent.start()
        eventually("the rank to be held", lambda: agent.held_step(0) == 2)
        assert sorted(agent.sealed_steps(0)) == [0, 2]
        agent.recover()
        with pytest.raises(FencedError):
            training.result(PATIENCE_S)


def test_a_step_that_cannot_be_committed_is_not_waited_for_without_end(agent: SoloAgent) -> None:
    agent.acknowledging = False
    agent.hold()
    with pytest.raises(UnavailableError, match=r"waited 0\.2 s in vain for step 0 to be sealed on all its holders"):
        Run().go(sys.maxsize, hold_timeout=timedelta(milliseconds=200))
    assert agent.held_step(0) is None


def test_a_held_rank_does_not_wait_without_end(agent: SoloAgent) -> None:
    agent.hold()
    with pytest.raises(UnavailableError, match=r"rank 0 was held at step 0, and nobody resumed the job within 2 s"):
        Run().go(sys.maxsize, hold_timeout=timedelta(seconds=2))


# ---- two ranks


class Pair:
    """Two ranks under one agent, which tell how they ended."""

    def __init__(self, agent: SoloAgent, folder: Path) -> None:
        self.agent = agent
        self.ranks: list[subprocess.Popen[bytes]] = []
        self._folder = folder

    def start(self, fault_of_rank_1: str = "") -> None:
        for rank in range(2):
            fault = {FAULT_VARIABLE: fault_of_rank_1} if rank and fault_of_rank_1 else {}
            environment = os.environ | self.agent.environment(rank) | {"OMP_NUM_THREADS": "1"} | fault
            command = [sys.executable, __file__, str(self._folder / "rendezvous"), str(self._folder / f"out{rank}")]
            with (self._folder / f"log{rank}").open("wb") as log:
                self.ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def error(self, rank: int) -> dict[str, Any]:
        """What a rank ended with, which it has to by itself."""
        code = self.ranks[rank].wait(PATIENCE_S)
        assert code == 0, (self._folder / f"log{rank}").read_text()[-3000:]
        found: dict[str, Any] = json.loads((self._folder / f"out{rank}").read_text())
        return found

    def close(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gft"))
        pair = Pair(stack.enter_context(SoloAgent(Path(folder), world_size=2)), tmp_path)
        stack.callback(pair.close)
        yield pair


def test_a_rank_that_dies_while_both_are_held_leaves_the_other_one_held(pair: Pair) -> None:
    pair.start()
    pair.agent.wait_for(Sealed, 0, PATIENCE_S)
    pair.agent.hold()
    for rank in range(2):
        eventually(f"rank {rank} to be held", lambda rank=rank: pair.agent.held_step(rank) is not None)  # type: ignore[misc]
    assert pair.agent.held_step(0) == pair.agent.held_step(1)
    pair.ranks[1].kill()
    assert pair.ranks[1].wait() == -signal.SIGKILL
    assert pair.ranks[0].poll() is None
    assert pair.agent.recover() == pair.agent.held_step(0)
    assert pair.error(0)["code"] == "fenced"


def test_a_rank_that_dies_before_the_step_is_committed_ends_the_other_one(pair: Pair) -> None:
    pair.agent.hold()
    pair.start("rank.before_sealed=kill")
    assert pair.ranks[1].wait(PATIENCE_S) == -signal.SIGKILL
    error = pair.error(0)
    assert error["code"] == "unavailable"
    assert "could not agree" in error["message"]
    assert pair.agent.held_step(0) is None


def test_a_rank_that_cannot_stage_the_held_step_fails_both_alike(pair: Pair) -> None:
    pair.agent.hold()
    pair.start("rank.before_sealed=raise")
    assert pair.error(0) == pair.error(1)
    assert pair.error(0)["message"].startswith("rank 1: the fault point rank.before_sealed")


def _main(rendezvous: str, out: str) -> None:
    import torch.distributed as dist

    from gemini_ft.contracts.errors import GeminiError

    dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(os.environ["RANK"]), world_size=2)
    try:
        Run().go(sys.maxsize)
    except GeminiError as error:
        Path(out).write_text(json.dumps({"code": error.code, "message": str(error)}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
