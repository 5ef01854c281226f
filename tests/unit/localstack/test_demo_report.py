"""The demo's verdict: success only if everything is identical, and a sentence that says what is not."""

import io
from typing import Any

import pytest
from rich.console import Console

from gemini_ft.contracts.api import RankModel
from gemini_ft.localstack.demo.observe import Stalls
from gemini_ft.localstack.demo.records import ALL_RANKS, DemoRecord, DrillRecord, MemoryRecord, StallRecord
from gemini_ft.localstack.demo.report import render_report

DIGESTS = {ALL_RANKS: "ab" * 16, "rank 0": "cd" * 16}


def _record(**changes: Any) -> DemoRecord:
    killed = DrillRecord(
        key="a",
        title="one rank is killed",
        what="SIGKILL of rank 1",
        at_step=9,
        step_after_ms=2100.4,
        phases_ms={"detect": 90.0, "fence": 40.0, "re_rendezvous": 800.0, "fetch": 1.0, "load": 30.0},
        restored_step=8,
        num_steps_lost=1,
        whole_again_ms=2300.0,
    )
    outage = DrillRecord(
        key="d",
        title="the whole control plane is killed",
        what="SIGKILL of coordinator",
        at_step=40,
        whole_again_ms=12000.0,
        num_steps_meanwhile=21,
        num_commits_meanwhile=20,
    )
    values = {
        "version": "0.1.0",
        "machine": {"num_cores": 2},
        "num_steps": 100,
        "seed": 0,
        "num_ranks": 4,
        "num_replicas": 2,
        "drills": (killed, outage),
        "num_steps_redone": 1,
        "differing_steps": (),
        "digests": DIGESTS,
        "reference_digests": DIGESTS,
        "stall": StallRecord(mean_ms=7.3, max_ms=7.6, step_ms=480.0, step_without_ms=470.0),
        "memory": (MemoryRecord(node="n0", used_bytes=101 << 20, bound_bytes=100 << 20),),
        "duration_s": 123.0,
    }
    return DemoRecord(**(values | changes))


def _text(record: DemoRecord) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(render_report(record))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_success_shows_costs_both_digests_and_figures() -> None:
    text = _text(_record())

    assert _record().success
    assert "Success: 100 losses and the final state are bit-identical" in text
    assert text.count("ab" * 16) == 2
    for part in (
        "re-rendezvous",
        "2100",
        "21 steps and 20 commits meanwhile",
        "7.3 ms a step",
        "101.0% of 2 x m x shard",
    ):
        assert part in text
    assert "first step" not in text, "a phase that nobody measured has no column"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"differing_steps": (17, 18)}, "the losses of 2 steps differ (first: 17, 18)"),
        ({"reference_digests": {ALL_RANKS: "00" * 16}}, "the final states differ"),
        ({"digests": {}, "reference_digests": {}}, "the final states differ"),
        ({"memory": (MemoryRecord(node="n3", used_bytes=106, bound_bytes=100),)}, "n3 took 106.0% of its memory"),
    ],
)
def test_any_difference_is_a_failure_that_is_named(changes: dict[str, Any], reason: str) -> None:
    record = _record(**changes)

    assert not record.success
    assert f"Failure: {reason}" in _text(record)


def test_a_record_survives_json() -> None:
    assert DemoRecord.model_validate_json(_record().model_dump_json()) == _record()


def test_stalls_are_added_over_generations_and_divided_by_steps_that_were_done() -> None:
    stalls = Stalls()
    silent = dict.fromkeys(RankModel.model_fields)
    known = silent | {"rank": 0, "pid": 1, "state": "running", "restore_source": "", "num_skipped": 0, "stall_us": 0}
    stalls.add(RankModel(**known | {"generation": 1}))
    for generation, restored_step, finished_step, stall_us in (
        (1, None, 4, 5000),
        (1, None, 9, 20_000),
        (2, 8, 18, 40_000),
    ):
        told = {
            "generation": generation,
            "restored_step": restored_step,
            "finished_step": finished_step,
            "stall_us": stall_us,
        }
        stalls.add(RankModel(**known | told))

    assert stalls.per_step_ms() == {0: pytest.approx(60 / 20)}
