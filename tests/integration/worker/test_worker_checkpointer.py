"""A script with the three lines survives: restart, a dead agent, bad copies, a newer generation, misuse."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gemini_ft import faults
from gemini_ft.agent.launcher.learning import read_names
from gemini_ft.contracts.buffer_format import HEADER_PAGE_BYTES
from gemini_ft.contracts.errors import (
    CapacityError,
    ConfigurationError,
    FencedError,
    GeminiError,
    IntegrityError,
    NoVersionError,
    StateError,
    UnavailableError,
)
from gemini_ft.contracts.local_protocol import BadCopy, FillBegun, Restored, Sealed
from gemini_ft.worker import Checkpointer
from gemini_ft.worker.testing import SoloAgent


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[SoloAgent]:
    with tempfile.TemporaryDirectory(prefix="gft") as folder, SoloAgent(Path(folder)) as agent:
        for name, value in agent.environment().items():
            monkeypatch.setenv(name, value)
        yield agent


class Run:
    """One life of a training script; everything random and host-side decides its losses."""

    def __init__(self, width: int = 90) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))
        self.model[3].weight.data = self.model[3].weight.data.t().contiguous().t()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.losses: list[str] = []

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def checkpointer(self, **options: Any) -> Checkpointer:
        return Checkpointer(self.parts, **({"commit_wait": timedelta(seconds=5)} | options))

    def train_step(self) -> None:
        inputs = torch.randn(16, 8) * random.random() + float(np.random.standard_normal())
        loss = self.model(inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item().hex())

    def go(self, last: int, **options: Any) -> Run:
        """Train through step `last`, from wherever memory says."""
        with self.checkpointer(**options) as checkpointer:
            start = checkpointer.restore()
            for step in range(0 if start is None else start + 1, last + 1):
                self.train_step()
                checkpointer.step(step)
        return self

    def bits(self) -> list[bytes]:
        state = [*self.model.state_dict().values()]
        state += [v for one in self.optimizer.state.values() for v in one.values()]
        return [tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in state]


def _undisturbed(num_steps: int) -> Run:
    run = Run()
    for _ in range(num_steps):
        run.train_step()
    return run


def test_two_restarts_end_bit_identical(agent: SoloAgent) -> None:
    expected = _undisturbed(9)
    first = Run().go(2)
    assert agent.recover() == 2
    os.environ.update(agent.environment())
    second = Run().go(5)
    assert agent.recover() == 5
    os.environ.update(agent.environment())
    third = Run().go(8)
    assert first.losses + second.losses + third.losses == expected.losses
    assert third.bits() == expected.bits()
    assert [m.step for m in agent.received if isinstance(m, Restored)] == [None, 2, 5]


def test_checkpointing_changes_no_bit_of_training(agent: SoloAgent) -> None:
    assert Run().go(4).bits() == _undisturbed(5).bits()


def test_restoring_keeps_parameters_where_they_are(agent: SoloAgent) -> None:
    Run().go(1)
    agent.recover()
    os.environ.update(agent.environment())
    run = Run()
    before = [(id(p), p.data_ptr(), p.stride(), p.requires_grad) for p in run.model.parameters()]
    with run.checkpointer() as checkpointer:
        assert checkpointer.restore() == 1
    assert [(id(p), p.data_ptr(), p.stride(), p.requires_grad) for p in run.model.parameters()] == before


def test_versions_alternate_and_commit_by_the_next_step(agent: SoloAgent) -> None:
    run = Run()
    with run.checkpointer() as checkpointer:
        assert checkpointer.restore() is None
        for step in range(4):
            run.train_step()
            assert checkpointer.step(step)
            assert checkpointer.committed_step == (step - 1 if step else None)
        assert checkpointer.num_skipped == 0
        assert checkpointer.stall > timedelta(0)
    begun = [(m.step, m.buffer, m.base_step) for m in agent.received if isinstance(m, FillBegun)]
    assert begun == [(0, 0, None), (1, 1, 0), (2, 0, 1), (3, 1, 2)]


@pytest.mark.parametrize("on_lag", ["skip", "wait"])
def test_the_committed_version_is_kept_while_nothing_newer_commits(agent: SoloAgent, on_lag: str) -> None:
    run = Run()
    with run.checkpointer(on_lag=on_lag, commit_wait=timedelta(milliseconds=20)) as checkpointer:
        checkpointer.restore()
        for step in range(2):
            run.train_step()
            assert checkpointer.step(step)
            agent.wait_for(Sealed, step)
        agent.acknowledging = False
        run.train_step()
        assert checkpointer.step(2)
        for step in range(3, 6):
            run.train_step()
            assert not checkpointer.step(step)
        assert (checkpointer.committed_step, checkpointer.num_skipped) == (1, 3)
    assert sorted(agent.sealed_steps(0)) == [1, 2]


def test_training_goes_on_without_the_agent_and_commits_resume_with_its_next_life(agent: SoloAgent) -> None:
    expected = _undisturbed(12)
    run = Run()
    with run.checkpointer() as checkpointer:
        checkpointer.restore()
        for step in range(3):
            run.train_step()
            checkpointer.step(step)
        agent.wait_for(Sealed, 2)
        agent.stop()
        staged = []
        for step in range(3, 7):
            run.train_step()
            staged.append(checkpointer.step(step))
        assert staged == [True, False, False, False]
        agent.received.clear()
        agent.start()
        agent.wait_for(Sealed, 3)  # repeated to the new life, as it stands
        for step in range(7, 12):
            run.train_step()
            assert checkpointer.step(step)
        assert checkpointer.committed_step == 10
    assert run.bits() == expected.bits()


def _flip(agent: SoloAgent, step: int) -> None:
    path = agent.buffer_path(0, agent.sealed_steps(0)[step])
    with path.open("r+b") as file:
        file.seek(HEADER_PAGE_BYTES + 100)
        byte = file.read(1)
        file.seek(HEADER_PAGE_BYTES + 100)
        file.write(bytes([byte[0] ^ 1]))


def test_a_flipped_bit_is_reported_and_never_loaded(agent: SoloAgent) -> None:
    Run().go(3)
    agent.recover()
    os.environ.update(agent.environment())
    _flip(agent, 3)
    run = Run()
    before = run.bits()
    with (
        run.checkpointer() as checkpointer,
        pytest.raises(NoVersionError, match="no verified copy of rank 0 at step 3"),
    ):
        checkpointer.restore()
    (report,) = [m for m in agent.received if isinstance(m, BadCopy)]
    assert "does not match its digest" in report.detail
    assert run.bits() == before
    assert agent.recover() == 2
    os.environ.update(agent.environment())
    resumed = Run().go(5)
    assert resumed.bits() == _undisturbed(6).bits()


def test_another_model_is_refused_with_the_names(agent: SoloAgent) -> None:
    Run().go(1)
    agent.recover()
    os.environ.update(agent.environment())
    run = Run()
    run.model.append(nn.Linear(1, 1))
    run.optimizer.add_param_group({"params": run.model[4].parameters()})
    with (
        run.checkpointer() as checkpointer,
        pytest.raises(StateError, match=r"missing in the kept state: model/4\.weight, model/4\.bias;"),
    ):
        checkpointer.restore()


def test_another_width_is_refused_and_nothing_half_loaded_trains(agent: SoloAgent) -> None:
    Run().go(1)
    agent.recover()
    os.environ.update(agent.environment())
    with Run(91).checkpointer() as checkpointer, pytest.raises(GeminiError, match=r"size mismatch|were reserved"):
        checkpointer.restore()


def test_a_rank_of_an_old_generation_must_stop(agent: SoloAgent) -> None:
    run = Run()
    with run.checkpointer() as checkpointer:
        checkpointer.restore()
        run.train_step()
        checkpointer.step(0)
        agent.recover()
        run.train_step()
        with pytest.raises(FencedError, match="rank 0 belongs to generation 1, but the job is at generation 2"):
            checkpointer.step(1)
    with Run().checkpointer() as late, pytest.raises(FencedError):
        late.restore()


def test_a_failure_of_the_staging_thread_reaches_the_loop(agent: SoloAgent) -> None:
    run = Run(width=20_000)
    with run.checkpointer() as checkpointer:
        checkpointer.restore()
        run.train_step()
        faults.arm("rank.before_sealed=raise")
        try:
            checkpointer.step(0)
            run.train_step()
        finally:
            faults.arm(None)
        with pytest.raises(GeminiError, match=r"rank\.before_sealed was armed to raise"):
            checkpointer.step(1)
    assert agent.sealed_steps(0) == {}


def test_too_little_memory_is_refused_before_the_first_step(agent: SoloAgent) -> None:
    agent.capacity_bytes = 1000
    with Run().checkpointer() as checkpointer, pytest.raises(CapacityError, match=r"needs \d+ bytes") as refused:
        checkpointer.restore()
    assert refused.value.code == "capacity"


def test_what_is_reserved_is_what_the_first_step_needs(agent: SoloAgent) -> None:
    Run().go(0)
    (begun,) = [m for m in agent.received if isinstance(m, FillBegun)]
    (reserved,) = [m for m in agent.received if m.kind == "reserve"]
    assert begun.data_bytes == reserved.data_bytes


def test_imports_are_learned_after_the_first_finished_step(
    agent: SoloAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GEMINI_FT_LEARNED_IMPORTS", str(tmp_path / "learned"))
    run = Run()
    with run.checkpointer() as checkpointer:
        checkpointer.restore()
        assert read_names(tmp_path / "learned") is None
        run.train_step()
        checkpointer.step(0)
        assert "torch.optim.adamw" in (read_names(tmp_path / "learned") or [])


MISUSES: list[tuple[Callable[[Checkpointer], object], str]] = [
    (lambda c: c.step(0), r"step\(\) was called before restore\(\)"),
    (lambda c: (c.restore(), c.restore()), r"restore\(\) was called twice"),
    (lambda c: (c.restore(), c.step(3), c.step(3)), r"step\(3\) was called after step\(3\)"),
]


@pytest.mark.parametrize(("misuse", "sentence"), MISUSES)
def test_misuse_gets_a_sentence(agent: SoloAgent, misuse: Callable[[Checkpointer], object], sentence: str) -> None:
    with Run().checkpointer() as checkpointer, pytest.raises(ConfigurationError, match=sentence):
        misuse(checkpointer)


def test_arguments_are_checked(agent: SoloAgent) -> None:
    with pytest.raises(ConfigurationError, match="on_lag is 'never'"):
        Checkpointer({}, on_lag="never")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"stateful\['epoch'\] is a int without state_dict"):
        Checkpointer({"epoch": 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=r"stateful\['rng'\] is taken"):
        Checkpointer({"rng": Run().model})


def test_without_a_launcher_the_sentence_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"GEMINI_FT_AGENT_SOCKET is not set.*gemini-ft run"):
        Checkpointer({})


def test_an_agent_that_is_not_there_is_named(agent: SoloAgent) -> None:
    agent.stop()
    with (
        Run().checkpointer(connect_timeout=timedelta(milliseconds=200)) as checkpointer,
        pytest.raises(UnavailableError, match=r"was not reached at .*/socket within 0\.2 s"),
    ):
        checkpointer.restore()


def test_a_state_that_cannot_be_kept_is_refused_before_the_first_step(agent: SoloAgent) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"when": object()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    with (
        Checkpointer({"odd": Odd()}) as checkpointer,
        pytest.raises(StateError, match=r"state odd/when is a builtins\.object"),
    ):
        checkpointer.restore()


def test_a_copy_that_rots_before_it_is_sent_ends_the_rank_and_not_the_version_before(agent: SoloAgent) -> None:
    run = Run()
    with run.checkpointer() as checkpointer:
        checkpointer.restore()
        for step in (0, 1):
            run.train_step()
            assert checkpointer.step(step)
        agent.wait_for(Sealed, 1)
        agent.refuse(0, 1)
        run.train_step()
        with pytest.raises(IntegrityError, match="step 1 was damaged in memory"):
            checkpointer.step(2)
        assert checkpointer.committed_step == 0
    assert 0 in agent.sealed_steps(0)
