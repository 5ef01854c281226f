"""What people see of what the API shows."""

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console, RenderableType

from gemini_ft.cli.render.cells import printable
from gemini_ft.cli.render.events import events_text
from gemini_ft.cli.render.jobs import job_details, jobs_table, placement_table, ranks_table
from gemini_ft.cli.render.nodes import node_details, nodes_table
from gemini_ft.cli.render.recoveries import recoveries_table, recovery_details, waterfall
from gemini_ft.cli.render.tokens import tokens_table
from gemini_ft.cli.render.versions import version_details, versions_table
from gemini_ft.contracts.api import (
    EventModel,
    HolderModel,
    JobModel,
    JobRankModel,
    NodeModel,
    PlacementModel,
    RankVersionModel,
    RecoveryDetailModel,
    TokenModel,
    VersionDetailModel,
    VersionModel,
)
from gemini_ft.contracts.messages import JobSpec

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def shown(what: RenderableType) -> list[str]:
    """The lines, without the white space at their ends."""
    console = Console(file=io.StringIO(), width=300, markup=False, highlight=False, emoji=False)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def words(line: str) -> str:
    return " ".join(line.split())


def job(**changes: Any) -> JobModel:
    spec = JobSpec(name="gpt [red]", command=("train.py", "--lr", "1 e"), num_nodes=2, num_ranks_per_node=4)
    values: dict[str, Any] = dict.fromkeys(JobModel.model_fields) | {
        "job_id": "job-1",
        "spec": spec,
        "phase": "running",
        "generation": 2,
        "hold_reason": "",
        "waiting_for": "",
        "cause": "rank 3 exited: signal 9\nits log",
        "committed_step": 40,
        "finished_step": 41,
        "checkpoint_requests": 0,
        "num_recoveries_without_progress": 0,
        "slots": {1: "node-b", 0: "node-a"},
        "standbys": ["node-c"],
        "created_at": AT,
    }
    return JobModel(**values | changes)


def test_jobs_have_a_line_each_with_what_matters_most_as_the_remark() -> None:
    lines = shown(
        jobs_table([job(), job(waiting_for="2 free nodes; 0 are ready"), job(phase="suspended", final_step=7)])
    )
    assert words(lines[0]) == "job name phase generation nodes committed finished created remark"
    assert words(lines[1]) == "job-1 gpt [red] running 2 2 40 41 2026-01-02 03:04:05Z rank 3 exited: signal 9"
    assert lines[2].endswith("waiting for 2 free nodes; 0 are ready")
    assert lines[3].endswith("holds step 7")


def test_a_job_in_full_shows_its_command_as_it_is_typed_and_who_sits_where() -> None:
    lines = shown(job_details(job()))
    assert "command     train.py --lr '1 e'" in lines
    assert "world       2 nodes with 4 ranks each, 2 replicas" in lines
    assert not any(line.startswith("waiting for") for line in lines), "what is empty is left out"
    assert [line.split() for line in lines[-4:]] == [
        ["slot", "node"],
        ["0", "node-a"],
        ["1", "node-b"],
        ["standby", "node-c"],
    ]


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    evil = "\x1b]0;owned\x07 \N{RIGHT-TO-LEFT OVERRIDE}fine\nnext"
    assert (
        printable(evil)
        == "\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}fine\nnext"
    )
    text = "".join(shown(jobs_table([job(cause=evil)])))
    assert "\x1b" not in text
    event = EventModel(id=1, at=AT, kind="k", job_id=None, node_id=None, generation=None, message=evil)
    assert "\x1b" not in "".join(shown(events_text([event])))


def test_ranks_tell_their_state_and_how_long_they_waited() -> None:
    silent = dict.fromkeys(JobRankModel.model_fields)
    known = {"node_id": "node-a", "slot": 0, "generation": 2, "pid": 9, "restore_source": "peer", "num_skipped": 0}
    ranks = [
        JobRankModel(**silent | known | {"rank": 0, "state": "running", "stall_us": 1500, "held_step": 41}),
        JobRankModel(**silent | known | {"rank": 1, "state": "exited", "stall_us": 0, "exit_code": -9}),
    ]
    lines = shown(ranks_table(ranks))
    assert "running, held" in lines[1]
    assert lines[1].endswith("1.5")
    assert "exited (-9)" in lines[2]


def test_a_placement_names_the_holders() -> None:
    lines = shown(placement_table(PlacementModel(placement={0: (0, 1), 1: (1, 0)}, slots={0: "node-a"})))
    assert [line.split(maxsplit=2) for line in lines[1:]] == [
        ["0", "node-a", "0 (node-a), 1 (-)"],
        ["1", "-", "1 (-), 0 (node-a)"],
    ]


def node(**changes: Any) -> NodeModel:
    values: dict[str, Any] = {
        "node_id": "node-a",
        "hostname": "host-7",
        "labels": {"rack": "r1", "local-node": "n0"},
        "address": {"host": "10.0.0.1", "port": 7},
        "status": "alive",
        "cordoned": False,
        "draining": False,
        "job_id": "job-1",
        "slot": None,
        "registered_at": AT,
        "heard_s_ago": 0.25,
        "store_used_bytes": 1_500_000_000,
        "store_capacity_bytes": 4_000_000_000,
    }
    return NodeModel(**values | changes)


def test_nodes_tell_what_they_are_for() -> None:
    nodes = [node(), node(slot=3, draining=True, cordoned=True), node(job_id=None, cordoned=True, heard_s_ago=None)]
    lines = shown(nodes_table(nodes))
    assert words(lines[1]) == "node-a n0 alive 0.2 s ago job-1 standby 1.5 GB of 4 GB local-node=n0 rack=r1"
    assert "alive, draining" in lines[2]
    assert "alive, cordoned" in lines[3]
    details = shown(node_details(node(slot=3)))
    assert "address     10.0.0.1:7" in details
    assert "slot        3" in details


def test_versions_tell_who_holds_what() -> None:
    versions = [VersionModel(generation=1, step=9, committed_at=AT)]
    assert shown(versions_table(versions))[1].split() == ["9", "1", "2026-01-02", "03:04:05Z"]
    held = [HolderModel(slot=0, node_id="node-a", digest="ab" * 16), HolderModel(slot=1, node_id="node-b", digest=None)]
    detail = VersionDetailModel(
        step=9,
        generation=1,
        committed_at=None,
        is_committed=True,
        is_in_memory=False,
        ranks=[RankVersionModel(rank=0, is_sealed_everywhere=True, holders=held)],
    )
    lines = shown(version_details(detail))
    assert "in memory   no, newer versions have taken its place" in lines
    assert lines[-1].split(maxsplit=2) == ["0", "yes", "0 (node-a) abababababab, 1 (node-b)"]


RECOVERY = RecoveryDetailModel(
    generation=2,
    cause="rank 3 exited",
    outcome="completed",
    finished_step=41,
    restored_step=40,
    num_steps_lost=1,
    phases_ms={"load": 100.0, "detect": 100.0, "re_rendezvous": 200.0, "invented": 0.0},
    started_at=AT,
    slots={0: "node-a"},
    sources={1: ["node-a"], 0: ["node-b", "node-a"]},
    notes=[],
)


def test_a_recovery_is_a_waterfall_in_the_order_of_its_phases() -> None:
    assert shown(recoveries_table([RECOVERY]))[1].split()[:5] == ["2", "completed", "40", "1", "400"]
    lines = shown(waterfall(RECOVERY.phases_ms))
    block, thin = "\N{FULL BLOCK}", "\N{LEFT ONE EIGHTH BLOCK}"
    begin = lines[0].index("ms") + len("ms  ")
    assert [(line[:begin].split(), line[begin:]) for line in lines[1:]] == [
        (["detect", "100"], block * 12),
        (["re", "rendezvous", "200"], " " * 12 + block * 24),
        (["load", "100"], " " * 36 + block * 12),
        (["invented", "0"], " " * 48 + thin),
        (["in", "all", "400"], ""),
    ]
    details = shown(recovery_details(RECOVERY))
    assert [line.split(maxsplit=1) for line in details[-2:]] == [["0", "node-b, node-a"], ["1", "node-a"]]
    assert not any("notes" in line for line in details)


def test_a_recovery_that_has_just_begun_has_no_phases_yet() -> None:
    begun = RECOVERY.model_copy(update={"phases_ms": {}, "sources": {}})
    assert shown(recovery_details(begun))[-1].split() == ["in", "all", "0"]


def test_an_event_is_one_line() -> None:
    event = EventModel(
        id=12, at=AT, kind="job_failed", job_id="job-1", node_id=None, generation=2, message="why\nlog line"
    )
    assert shown(events_text([event, event])) == ["2026-01-02 03:04:05Z     12 job_failed job-1 why"] * 2


@pytest.mark.parametrize(("job_ids", "jobs"), [(None, "all"), (["job-1", "job-2"], "job-1 job-2")])
def test_tokens_tell_what_they_are_good_for(job_ids: list[str] | None, jobs: str) -> None:
    token = TokenModel(
        token_id="tok-1",
        name="ci",
        role="operator",
        job_ids=job_ids,
        created_at=AT,
        expires_at=None,
        revoked_at=None,
        last_used_at=None,
    )
    line = shown(tokens_table([token]))[1]
    assert line.startswith("tok-1  ci    operator")
    assert f"  {jobs}  " in line
