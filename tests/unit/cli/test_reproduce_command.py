"""`gemini-ft reproduce`: chosen figures, plots, exit codes, refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import assert_refused, gemini_ft

from gemini_ft.planning.paper import comparison
from gemini_ft.planning.paper.values import PAPER


def test_a_figure_is_a_table_with_numbered_reasons() -> None:
    done = gemini_ft("reproduce", 9)
    assert done.code == 0
    assert done.stdout.startswith("Figure 9: probability of recovery from memory, m = 2\n")
    row = next(line for line in done.stdout.splitlines() if "3 lost, ring, exact" in line)
    assert re.search(r" 62\.86 +60 \+- 2 % +Fig 9, read off +differs \(1\)$", row)
    assert "  (1) 352 of the 560 choices of 3 machines are survived" in done.stdout


def test_figures_come_in_their_order_and_15_is_both_of_its_parts() -> None:
    found = json.loads(gemini_ft("reproduce", 16, 15, "--json").stdout)
    assert [figure["figure"] for figure in found["figures"]] == ["15a", "15b", "16"]
    assert found["beyond"] is None
    assert all(figure["is_reproduced"] for figure in found["figures"])
    verdicts = {row["verdict"] for figure in found["figures"] for row in figure["rows"]}
    assert verdicts == {"within", "differs"}


def test_a_value_that_is_not_the_papers_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**PAPER, "9 group 3": replace(PAPER["9 group 3"], value=75.0)}
    monkeypatch.setattr(comparison, "PAPER", other)
    done = gemini_ft("reproduce", 9)
    assert done.code == 1
    assert "outside" in done.stdout


@pytest.mark.parametrize(("plot_format", "suffixes"), [("both", [".png", ".svg"]), ("svg", [".svg"])])
def test_plots(tmp_path: Path, plot_format: str, suffixes: list[str]) -> None:
    assert gemini_ft("reproduce", 7, "--plots", tmp_path, "--plot-format", plot_format).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"figure-7{suffix}" for suffix in suffixes]
    picture = (tmp_path / "figure-7.svg").read_text()
    assert "gpt2-100b" in picture
    gemini_ft("reproduce", 7, "--plots", tmp_path, "--plot-format", plot_format)
    assert (tmp_path / "figure-7.svg").read_text() == picture


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    assert_refused(gemini_ft("reproduce", "17"), "no figure '17'; choose from 7, ", "beyond")
    assert_refused(gemini_ft("reproduce", 9, "--plots", tmp_path, "--plot-format", "gif"), "'gif'", "svg")
    assert_refused(gemini_ft("reproduce", 9, "--markdown", tmp_path / "page.md"), "--markdown")
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert_refused(gemini_ft("reproduce", 9, "--plots", occupied), "plots cannot be written")
