"""The paper's figures: what agrees, what does not and why, and the page that shows them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gemini_ft.planning.paper.beyond import Beyond, beyond, redundancy_rows
from gemini_ft.planning.paper.comparison import Difference, Figure, Row, Verdict
from gemini_ft.planning.paper.figures import FIGURES
from gemini_ft.planning.paper.report import REWRITE_COMMAND, render_page
from gemini_ft.planning.paper.values import PAPER, PaperValue, Relation

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return {number: figure() for number, figure in FIGURES.items()}


@pytest.fixture(scope="module")
def further() -> Beyond:
    return beyond()


def test_a_verdict_needs_an_explanation_that_holds() -> None:
    paper = PaperValue("x", 60.0, "%", "Fig 0", 2.0)
    row = Row("x", 62.0, paper)
    assert row.verdict is Verdict.WITHIN
    assert replace(row, ours=62.9).verdict is Verdict.OUTSIDE
    assert replace(row, ours=62.9, difference=Difference(62.857, "exact")).verdict is Verdict.EXPLAINED
    assert replace(row, ours=70.0, difference=Difference(62.857, "exact")).verdict is Verdict.OUTSIDE
    at_least = replace(paper, relation=Relation.AT_LEAST, tolerance=0.0)
    assert Row("x", 60.0, at_least).verdict is Verdict.WITHIN
    assert Row("x", 59.9, at_least).verdict is Verdict.OUTSIDE
    at_most = replace(at_least, relation=Relation.AT_MOST)
    assert Row("x", 60.1, at_most).verdict is Verdict.OUTSIDE


@pytest.mark.parametrize("number", list(FIGURES))
def test_every_figure_is_reproduced(figures: dict[str, Figure], number: str) -> None:
    figure = figures[number]
    assert figure.rows
    assert [row.quantity for row in figure.rows if row.verdict is Verdict.OUTSIDE] == []


def test_every_claim_of_the_paper_is_compared_with_something(figures: dict[str, Figure]) -> None:
    compared = {row.paper for figure in figures.values() for row in figure.rows}
    assert [key for key, value in PAPER.items() if value not in compared] == []


def test_what_differs_is_exactly_what_the_page_explains(figures: dict[str, Figure]) -> None:
    differing = {
        (number, row.quantity): round(row.ours, 2)
        for number, figure in figures.items()
        for row in figure.rows
        if row.verdict is Verdict.EXPLAINED
    }
    exact = {key: value for key, value in differing.items() if "simulated" not in key[1]}
    assert exact == {
        ("7", "gpt2-100b, iteration with checkpoints"): 62.0,
        ("9", "16 machines, 3 lost, ring, exact"): 62.86,
        ("9", "16 machines, 3 lost, ring below GEMINI, exact"): 21.43,
        ("10", "Strawman, equation 1"): 106.04,
        ("11", "400 Gbps, 16 machines, with the traffic of Fig 8"): 192.51,
        ("12", "GEMINI over HighFreq, with serialisation"): 9.0,
        ("13", "gpt2-10b, checkpoint traffic"): 1.1,
    }
    assert set(differing) - set(exact) == {
        ("10", "Strawman, simulated"),
        ("10", "HighFreq, simulated"),
        ("15a", "Strawman, 8 a day, simulated"),
        ("15a", "HighFreq, 8 a day, simulated"),
        ("15b", "Strawman, 200 machines, simulated"),
        ("15b", "Strawman, 1000 machines, simulated"),
        ("15b", "HighFreq, 1000 machines, simulated"),
        ("15b", "1000 machines, GEMINI over HighFreq, simulated"),
    }


def test_the_headline_numbers(figures: dict[str, Figure]) -> None:
    ours = {(number, row.quantity): row.ours for number, figure in figures.items() for row in figure.rows}
    assert round(ours["15a", "GEMINI, 8 a day, linear"], 3) == 0.952
    assert round(ours["15b", "GEMINI, 1000 machines, linear"], 3) == 0.909
    assert ours["10", "HighFreq over GEMINI, simulated"] > 13
    assert ours["12", "GEMINI over Strawman"] > 170


def test_redundancy_is_exact() -> None:
    probabilities = {
        row.label: {k: round(100 * p, 2) for k, p in row.probabilities.items()} for row in redundancy_rows(16)
    }
    assert probabilities == {
        "m = 2": {2: 93.33, 3: 80.0, 4: 61.54},
        "m = 3": {2: 100.0, 3: 98.93, 4: 95.77},
        "groups of 4, any 2 lost": {2: 100.0, 3: 97.14, 4: 89.23},
    }


def test_beyond_the_paper_each_step_helps(further: Beyond) -> None:
    ratio = {row.label: row.summary.effective_time_ratio.mean for row in further.simulated}
    for size in ("1,000", "10,000"):
        published, cold, warm = (
            ratio[f"{size} machines, {label}"]
            for label in ("GEMINI as published", "nothing serialised, cold restart", "warm restart")
        )
        assert published < cold < warm
    assert ratio["m = 2, racks ignored"] < ratio["m = 2, racks apart"]
    assert ratio["0 standbys"] < ratio["1 standbys"]


def test_the_page_is_what_a_new_computation_gives(figures: dict[str, Figure], further: Beyond) -> None:
    page = (ROOT / "docs" / "reproducing-the-paper.md").read_text(encoding="utf-8")
    assert render_page(list(figures.values()), further, "images/paper") == page, f"rewrite it with: {REWRITE_COMMAND}"


def test_the_page_shows_every_plot(figures: dict[str, Figure]) -> None:
    page = ROOT / "docs" / "reproducing-the-paper.md"
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert shown == [f"images/paper/figure-{number}.svg" for number in figures]
    assert all((page.parent / path).is_file() for path in shown)
    assert all((page.parent / path).stat().st_size < 50_000 for path in shown)
