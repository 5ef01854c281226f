"""A recovery as a waterfall."""

from __future__ import annotations

import pytest
from api_examples import recovery

from gemini_ft.contracts.api import RECOVERY_PHASES, RecoveryDetailModel
from gemini_ft.dashboard.recoveries import recovery_html
from gemini_ft.dashboard.recovery_model import PHASE_WORDS, waterfall


def test_bars_follow_each_other_and_fill_the_whole() -> None:
    lengths = {"plan": 10.0, "detect": 70.0, "fence": 20.0, "invented_later": 100.0}
    bars = waterfall(recovery(2, phases_ms=lengths))
    assert [bar.phase for bar in bars] == ["detect", "fence", "plan", "invented_later"]
    assert [bar.begun_ms for bar in bars] == [0, 70, 90, 100]
    assert [bar.begun_share for bar in bars] == pytest.approx([0, 0.35, 0.45, 0.5])
    assert bars[-1].begun_share + bars[-1].length_share == pytest.approx(1.0)


def test_a_recovery_of_which_nothing_is_known_yet_has_no_bars() -> None:
    assert waterfall(recovery(2, outcome="open")) == []
    assert [bar.length_share for bar in waterfall(recovery(2, phases_ms={"detect": 0.0}))] == [0.0]


def test_every_phase_has_words() -> None:
    assert set(PHASE_WORDS) == set(RECOVERY_PHASES)


def test_the_page_tells_the_cause_as_text_and_where_every_shard_came_from() -> None:
    one = recovery(2, cause="rank 1 <script>\nTraceback", phases_ms={"fetch": 5.0})
    detail = RecoveryDetailModel(**one.model_dump(), slots={}, sources={0: ["node-0a", "node-0b"], 1: []}, notes=[])
    shown = recovery_html(one, detail, {"node-0a": "n0"})
    assert "Cause: rank 1 &lt;script&gt;</caption>" in shown
    assert "Traceback" not in shown
    assert "<td>n0</td><td>node-0b</td>" in shown
    assert "<td>nowhere</td><td>none</td>" in shown
