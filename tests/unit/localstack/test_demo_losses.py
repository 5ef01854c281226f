"""Losses are compared bit for bit, repetitions included, and nothing missing counts as equal."""

import json
from pathlib import Path

import pytest

from gemini_ft.contracts.errors import ProtocolError
from gemini_ft.localstack.demo.losses import LossLogs, differing_steps


def _line(step: int, rank: int, loss: float | None = None, generation: int = 1, **more: object) -> str:
    value = (10.0 - step - rank / 8) if loss is None else loss
    entry = {"step": step, "rank": rank, "generation": generation, "loss": value.hex(), "at": float(step)}
    return json.dumps(entry | more) + "\n"


def _logs(path: Path, *lines: str, num_ranks: int = 2) -> LossLogs:
    for line in lines:
        rank = json.loads(line)["rank"]
        with path.with_name(f"{path.name}.{rank}").open("a") as file:
            file.write(line)
    logs = LossLogs(path, num_ranks)
    logs.poll()
    return logs


@pytest.fixture
def reference(tmp_path: Path) -> LossLogs:
    return _logs(tmp_path / "reference", *(_line(step, rank) for step in range(4) for rank in range(2)))


def test_a_run_with_equal_repetitions_is_the_same(tmp_path: Path, reference: LossLogs) -> None:
    first = [_line(step, rank) for step in range(3) for rank in range(2)]
    again = [_line(step, rank, generation=2) for step in range(1, 4) for rank in range(2)]
    run = _logs(tmp_path / "run", *first, *again)

    assert differing_steps(run, reference, 4) == ()
    assert (run.last_step, run.num_redone) == (3, 2)


def test_the_last_bit_counts_even_in_a_repetition(tmp_path: Path, reference: LossLogs) -> None:
    lines = [_line(step, rank) for step in range(4) for rank in range(2)]
    off = float.fromhex("0x1.2000000000001p+3")  # step 1 on rank 0, one bit up
    run = _logs(tmp_path / "run", *lines, _line(1, 0, off, generation=2))

    assert differing_steps(run, reference, 4) == (1,)


def test_a_missing_step_differs(tmp_path: Path, reference: LossLogs) -> None:
    run = _logs(tmp_path / "run", *(_line(step, rank) for step in (0, 1, 3) for rank in range(2)))

    assert differing_steps(run, reference, 5) == (2, 4)


def test_a_step_that_only_one_rank_could_write_down_is_compared_on_that_rank(
    tmp_path: Path, reference: LossLogs
) -> None:
    lines = [_line(step, rank) for step in range(4) for rank in range(2) if (step, rank) != (2, 1)]

    assert differing_steps(_logs(tmp_path / "run", *lines), reference, 4) == ()


def test_growing_files_are_followed_and_a_line_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    logs = LossLogs(tmp_path / "run", 2)
    assert logs.poll() == []
    assert logs.last_step == -1
    line = _line(0, 0, committed_step=None)
    (tmp_path / "run.0").write_text(line + line[:10])
    assert [entry.step for entry in logs.poll()] == [0]
    (tmp_path / "run.0").write_text(line + _line(1, 0, committed_step=0))
    (tmp_path / "run.1").write_text(_line(0, 1))

    assert [(entry.step, entry.rank) for entry in logs.poll()] == [(1, 0), (0, 1)]
    assert (logs.last_step, logs.committed_step) == (0, 0)
    assert logs.first_finished_at(1) == 0.0
    assert logs.first_finished_at(2) is None


def test_a_generation_has_begun_to_train_when_its_last_rank_has_finished_a_step(tmp_path: Path) -> None:
    lines = [_line(0, 0), _line(0, 1), _line(1, 0, generation=2, at=5.0), _line(1, 1, generation=3, at=6.5)]

    assert _logs(tmp_path / "run", *lines, _line(2, 0, generation=2, at=9.0)).first_finished_at(2) == 6.5


def test_a_line_that_is_no_loss_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.0").write_text("segmentation fault\n")

    with pytest.raises(ProtocolError, match=r"run\.0 holds a line that is no loss"):
        LossLogs(tmp_path / "run", 1).poll()


def test_step_times_are_taken_within_a_generation_only(tmp_path: Path) -> None:
    lines = [_line(step, 0, at=at) for step, at in enumerate((0.0, 0.5, 1.0, 1.6))]
    run = _logs(tmp_path / "run", *lines, _line(4, 0, generation=2, at=60.0), num_ranks=1)

    assert run.median_step_s() == pytest.approx(0.5)
    assert LossLogs(tmp_path / "none", 1).median_step_s() is None
