"""Control pages: every field keeps its value and disturbs no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, JobPage, RankPage

STEPS = ("sealed_everywhere_step", "damaged_step", "finished_step", "committed_step", "held_step")
NUMBERS = ("stall_us", "num_skipped")


def test_a_fresh_page_says_nothing() -> None:
    page = RankPage(memoryview(bytearray(CONTROL_PAGE_BYTES)))
    assert [getattr(page, name) for name in STEPS] == [None] * len(STEPS)
    assert [getattr(page, name) for name in NUMBERS] == [0, 0]
    assert page.replication_healthy is False
    job = JobPage(memoryview(bytearray(CONTROL_PAGE_BYTES)))
    assert (job.ordered_generation, job.closed, job.hold_generation, job.checkpoint_request) == (0, False, 0, 0)


@given(
    values=st.fixed_dictionaries(
        {name: st.none() | st.integers(0, 2**62) for name in STEPS}
        | {name: st.integers(0, 2**64 - 1) for name in NUMBERS}
        | {"replication_healthy": st.booleans()}
    ),
    order=st.permutations((*STEPS, *NUMBERS, "replication_healthy")),
)
def test_every_field_reads_back_through_another_mapping(values: dict[str, object], order: list[str]) -> None:
    memory = bytearray(CONTROL_PAGE_BYTES)
    writer, reader = RankPage(memoryview(memory)), RankPage(memoryview(memory))
    for name in order:
        setattr(writer, name, values[name])
    assert {name: getattr(reader, name) for name in order} == values


words = st.integers(0, 2**64 - 1)


@given(generation=words, closed=st.booleans(), held=words, request_number=words)
def test_the_job_page_reads_back(generation: int, closed: bool, held: int, request_number: int) -> None:
    memory = bytearray(CONTROL_PAGE_BYTES)
    writer, reader = JobPage(memoryview(memory)), JobPage(memoryview(memory))
    writer.closed = closed
    writer.ordered_generation = generation
    writer.hold_generation = held
    writer.checkpoint_request = request_number
    assert (reader.ordered_generation, reader.closed) == (generation, closed)
    assert (reader.hold_generation, reader.checkpoint_request) == (held, request_number)


def test_a_released_page_lets_its_memory_go() -> None:
    memory = bytearray(CONTROL_PAGE_BYTES)
    page = RankPage(memoryview(memory))
    page.release()
    memory.extend(b"x")
    with pytest.raises(ValueError, match="released"):
        _ = page.finished_step
