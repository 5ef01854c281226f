"""The job page outlives generations; what was asked of one generation's ranks does not."""

from __future__ import annotations

from pathlib import Path

from gemini_ft.agent.pages import JobPageFile


def test_a_request_for_a_checkpoint_is_void_in_the_next_generation_and_outlives_the_agent(tmp_path: Path) -> None:
    first = JobPageFile(tmp_path / "job.page")
    first.order_generation(2)
    first.page.checkpoint_request = 7
    first.close()
    second = JobPageFile(tmp_path / "job.page")
    second.order_generation(2)
    assert second.page.checkpoint_request == 7
    second.order_generation(3)
    assert (second.page.ordered_generation, second.page.checkpoint_request) == (3, 0)
    second.remove()
