"""Numbers and tables as commands print them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.cli._text import closest_first, format_bytes, format_percent, text_table


@given(st.floats(0, 1))
def test_only_what_is_certain_reads_as_certain(probability: float) -> None:
    text = format_percent(probability)
    assert (text == "100 %") == (probability == 1)
    assert (text == "0 %") == (probability == 0)
    assert text not in ("100.000 %", "0.000 %")
    assert abs(float(text.strip("<>% ")) - 100 * probability) <= 0.001


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (75.2e9, "75.2 GB"), (2.5e18, "2500 PB")]
)
def test_sizes(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    table = text_table(["name", "sets", "note"], [["a", "7", "x"], ["long", "100", ""]], indent="")
    assert table.splitlines() == ["name  sets  note", "a        7  x", "long   100"]


def test_the_closest_name_comes_first() -> None:
    assert closest_first("Stawman", ["gemini", "strawman", "all"])[0] == "strawman"
    assert sorted(closest_first("zzz", ["b", "a"])) == ["a", "b"]
