"""The demo itself, on its smallest scale: two nodes and a standby train with DDP and lose every part once."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from gemini_ft.localstack.demo.demo import DemoSettings, run_demo
from gemini_ft.localstack.demo.records import ALL_RANKS
from gemini_ft.localstack.demo.scenario import Drill, kill_agent, kill_control_plane, kill_rank, lose_node
from gemini_ft.localstack.demo.view import DemoView
from gemini_ft.localstack.stack import LocalStack

NUM_STEPS = 300


@pytest.mark.timeout(600)
def test_every_drill_is_survived_bit_for_bit() -> None:
    settings = DemoSettings(
        num_steps=NUM_STEPS,
        step_s=0.15,
        example="train_ddp.py",
        num_nodes=2,
        drills=(
            Drill("rank", "one rank is killed", kill_rank(1)),
            Drill("agent", "one agent is killed", kill_agent(0)),
            Drill("node", "one machine is lost with its memory", lose_node(1)),
            Drill("plane", "the whole control plane is killed", kill_control_plane(outage_s=3.0)),
            Drill("again", "one rank is killed again", kill_rank(0)),
        ),
    )
    shown = io.StringIO()
    kept: list[Path] = []

    def before_close(stack: LocalStack) -> None:
        kept.append(stack.memory)

    with DemoView(Console(file=shown, width=160), NUM_STEPS) as view:
        record = run_demo(settings, view, before_close=before_close)

    assert record.success, record
    assert record.digests.keys() == {ALL_RANKS, "rank 0", "rank 1"}
    drills = {drill.key: drill for drill in record.drills}
    for key in ("rank", "node", "again"):
        assert drills[key].step_after_ms is not None
        assert drills[key].num_steps_lost in (0, 1, 2)
        assert {"detect", "fence", "plan"} <= drills[key].phases_ms.keys()
    for key in ("agent", "plane"):
        assert drills[key].step_after_ms is None, "training went on"
        assert drills[key].num_steps_meanwhile
    assert drills["plane"].num_commits_meanwhile
    assert record.memory
    assert record.memory_is_bounded
    assert not kept[0].exists()
    assert "survived: SIGKILL of every process of" in shown.getvalue()
