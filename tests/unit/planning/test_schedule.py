"""Algorithm 2, repaired: its invariants for any input, and the case on which the printed listing fails."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.schedule import (
    Chunk,
    JitterEffect,
    Pacing,
    chunk_cost_s,
    jitter_effect,
    largest_chunk_bytes,
    partition,
    partition_over,
    smallest_interval,
)

# GPT-2 100B on p4d.24xlarge, with spans of our own (paper section 5.2).
GPT2_BYTES = 9_400_000_000
GPT2_SPANS_S = [0.25] * 40
GPT2_PACING = Pacing(buffer_bytes=128_000_000, num_parts=4, bandwidth_bytes_per_s=6.25e9, latency_s=50e-6, slack=0.9)
SMALL = Pacing(buffer_bytes=40, num_parts=4, bandwidth_bytes_per_s=100.0, latency_s=0.01, slack=1.0)
EPSILON = 1e-9

any_spans = st.lists(st.one_of(st.just(0.0), st.floats(0, 3)), max_size=10)
any_shard = st.integers(0, 2000)
any_num_replicas = st.integers(1, 4)


@st.composite
def any_pacing(draw: st.DrawFn) -> Pacing:
    num_parts = draw(st.integers(1, 6))
    return Pacing(
        buffer_bytes=draw(st.integers(num_parts, 600)),
        num_parts=num_parts,
        bandwidth_bytes_per_s=draw(st.floats(0.5, 1e5)),
        latency_s=draw(st.one_of(st.just(0.0), st.floats(0, 1))),
        slack=draw(st.floats(0.01, 1)),
    )


def used_s(chunks: Sequence[Chunk], pacing: Pacing) -> dict[int, float]:
    used: defaultdict[int, float] = defaultdict(float)
    for chunk in chunks:
        used[chunk.span] += chunk_cost_s(chunk.size_bytes, pacing["bandwidth_bytes_per_s"], pacing["latency_s"])
    return used


@given(spans_s=any_spans, shard_bytes=any_shard, num_replicas=any_num_replicas, pacing=any_pacing())
def test_every_byte_of_every_remote_replica_is_sent_once_and_in_order(
    spans_s: list[float], shard_bytes: int, num_replicas: int, pacing: Pacing
) -> None:
    sent = {replica: 0 for replica in range(1, num_replicas)}
    chunks = partition(spans_s, shard_bytes, num_replicas, **pacing)
    for chunk in chunks:
        assert chunk.offset == sent[chunk.replica]
        sent[chunk.replica] += chunk.size_bytes
    assert set(sent.values()) <= {shard_bytes}
    assert [chunk.replica for chunk in chunks] == sorted(chunk.replica for chunk in chunks)
    assert [chunk.span for chunk in chunks] == sorted(chunk.span for chunk in chunks)


@given(spans_s=any_spans, shard_bytes=any_shard, num_replicas=any_num_replicas, pacing=any_pacing())
def test_no_chunk_is_empty_or_larger_than_a_part(
    spans_s: list[float], shard_bytes: int, num_replicas: int, pacing: Pacing
) -> None:
    largest = pacing["buffer_bytes"] // pacing["num_parts"]
    for chunk in partition(spans_s, shard_bytes, num_replicas, **pacing):
        assert 1 <= chunk.size_bytes <= largest


@given(spans_s=any_spans, shard_bytes=any_shard, num_replicas=any_num_replicas, pacing=any_pacing())
def test_every_span_but_the_last_keeps_its_budget_and_leaves_no_room_unused(
    spans_s: list[float], shard_bytes: int, num_replicas: int, pacing: Pacing
) -> None:
    chunks = partition(spans_s, shard_bytes, num_replicas, **pacing)
    used = used_s(chunks, pacing)
    last_used = max(used, default=0)
    for span, span_s in enumerate(spans_s[:-1]):
        left_s = pacing["slack"] * span_s - used.get(span, 0.0)
        assert left_s >= -EPSILON
        if span < last_used:
            room = largest_chunk_bytes(left_s - EPSILON, pacing["bandwidth_bytes_per_s"], pacing["latency_s"])
            assert room == 0


@pytest.mark.parametrize("spans_s", [[], [0.0], [0.01] * 5])
def test_a_checkpoint_without_usable_spans_goes_into_the_last_one(spans_s: list[float]) -> None:
    chunks = partition(spans_s, 25, 3, **SMALL)
    assert {chunk.span for chunk in chunks} == {max(0, len(spans_s) - 1)}
    assert [chunk.size_bytes for chunk in chunks] == [10, 10, 5, 10, 10, 5]


@pytest.mark.parametrize(("shard_bytes", "num_replicas"), [(0, 3), (25, 1)])
def test_nothing_to_send_has_no_chunks(shard_bytes: int, num_replicas: int) -> None:
    assert partition([1.0], shard_bytes, num_replicas, **SMALL) == ()


def test_a_span_takes_what_fits_and_the_next_replica_starts_in_the_same_span() -> None:
    # Whole chunks cost 0.11 s; what 0.28 s leaves after two of them has room for 5 bytes.
    assert partition([0.28, 0.01, 9.0], 22, 3, **SMALL) == (
        Chunk(0, 1, 0, 10),
        Chunk(0, 1, 10, 10),
        Chunk(0, 1, 20, 2),
        Chunk(0, 2, 0, 2),
        Chunk(2, 2, 2, 10),
        Chunk(2, 2, 12, 10),
    )


def test_the_repaired_listing_uses_seven_of_forty_spans() -> None:
    chunks = partition(GPT2_SPANS_S, GPT2_BYTES, 2, **GPT2_PACING)
    assert len(chunks) == 297
    assert {chunk.span for chunk in chunks} == set(range(7))
    assert sum(chunk.size_bytes for chunk in chunks) == GPT2_BYTES


def printed_listing(spans_s: Sequence[float], shard_bytes: int, num_replicas: int, pacing: Pacing) -> Iterator[float]:
    """Algorithm 2 as printed, yielding chunk sizes."""
    bandwidth, latency_s = pacing["bandwidth_bytes_per_s"], pacing["latency_s"]
    part_bytes = pacing["buffer_bytes"] / pacing["num_parts"]
    replica, left_bytes = 0, float(shard_bytes)
    for span_s in (*spans_s[:-1], float("inf")):
        left_s = pacing["slack"] * span_s
        while left_s > 0:
            fits = left_s > latency_s + part_bytes / bandwidth
            size = min(left_bytes, part_bytes if fits else max(0.0, (left_s - latency_s) * bandwidth))
            yield size
            left_s -= latency_s + left_bytes / bandwidth  # charges all that is left, not the chunk
            left_bytes -= size
            if left_bytes == 0:
                if replica == num_replicas - 1:  # counts from 0: one replica too many
                    return
                replica, left_bytes = replica + 1, shard_bytes


def test_the_printed_listing_sends_a_replica_too_many_nearly_all_of_it_in_the_last_span() -> None:
    sizes = list(printed_listing(GPT2_SPANS_S, GPT2_BYTES, 2, GPT2_PACING))
    assert sum(sizes) == 2 * GPT2_BYTES
    one_chunk_a_span = len(GPT2_SPANS_S) - 1
    assert sum(sizes[one_chunk_a_span:]) / sum(sizes) == pytest.approx(0.93, abs=0.005)


@example([1.0], 500, 2, SMALL)
@given(spans_s=any_spans, shard_bytes=any_shard, num_replicas=any_num_replicas, pacing=any_pacing())
def test_the_smallest_interval_is_the_first_in_which_the_last_span_keeps_its_budget(
    spans_s: list[float], shard_bytes: int, num_replicas: int, pacing: Pacing
) -> None:
    def overrun_s(num_iterations: int) -> float:
        used = used_s(partition_over(num_iterations, spans_s, shard_bytes, num_replicas, **pacing), pacing)
        last = max(0, num_iterations * len(spans_s) - 1)
        return used.get(last, 0.0) - pacing["slack"] * (spans_s[-1] if spans_s else 0.0)

    longest = 20
    try:
        interval = smallest_interval(spans_s, shard_bytes, num_replicas, longest_interval=longest, **pacing)
    except ConfigurationError:
        assert overrun_s(longest) > -EPSILON
        return
    assert overrun_s(interval) <= EPSILON
    assert interval == 1 or overrun_s(interval - 1) > -EPSILON


def test_a_checkpoint_that_never_fits_is_refused_with_what_fits() -> None:
    with pytest.raises(ConfigurationError, match=r"sends 1000000 bytes, .* of 1000 iterations \(at most 99 bytes each"):
        smallest_interval([1.0], 1_000_000, 2, **SMALL)


def test_spreading_counts_spans_through_the_iterations() -> None:
    assert smallest_interval([0.11, 0.055], 25, 2, **SMALL) == 2
    assert partition_over(2, [0.11, 0.055], 25, 2, **SMALL) == (
        Chunk(0, 1, 0, 10),
        Chunk(1, 1, 10, 4),
        Chunk(2, 1, 14, 10),
        Chunk(3, 1, 24, 1),
    )


@given(delay_s=st.floats(0, 10), bandwidth=st.floats(1, 1e6), latency_s=st.floats(0, 1))
def test_the_largest_chunk_in_flight_delays_training_by_no_more_than_asked(
    delay_s: float, bandwidth: float, latency_s: float
) -> None:
    size = largest_chunk_bytes(delay_s, bandwidth, latency_s)
    assert size == 0 or chunk_cost_s(size, bandwidth, latency_s) <= delay_s + EPSILON
    assert chunk_cost_s(size + 1, bandwidth, latency_s) > delay_s - EPSILON


def effect(spans_s: Sequence[float], deviations_s: Sequence[float], chunks: Sequence[Chunk]) -> JitterEffect:
    return jitter_effect(
        spans_s,
        deviations_s,
        chunks,
        bandwidth_bytes_per_s=SMALL["bandwidth_bytes_per_s"],
        latency_s=SMALL["latency_s"],
    )


def test_jitter_agrees_with_a_simulation() -> None:
    spans_s, deviations_s = [0.5, 0.3, 0.35], [0.1, 0.05, 0.1]
    chunks = partition(spans_s, 90, 2, **SMALL)
    costs_s = {
        span: [chunk_cost_s(chunk.size_bytes, 100.0, 0.01) for chunk in chunks if chunk.span == span]
        for span in range(3)
    }
    rng, num_samples = random.Random(0), 50_000
    num_overruns, overrun_s, delay_s, longest_s = [0, 0, 0], 0.0, 0.0, 0.0
    for _ in range(num_samples):
        for span, (mean_s, deviation_s) in enumerate(zip(spans_s, deviations_s, strict=True)):
            length_s, sent_s = rng.gauss(mean_s, deviation_s), 0.0
            for cost_s in costs_s[span]:
                if span == 2 or sent_s < length_s:
                    sent_s += cost_s
            waited_s = max(0.0, sent_s - length_s)
            delay_s += waited_s
            longest_s = max(longest_s, waited_s if span < 2 else 0.0)
            num_overruns[span] += sum(costs_s[span]) > length_s
            overrun_s += max(0.0, sum(costs_s[span]) - length_s)
    jitter = effect(spans_s, deviations_s, chunks)
    assert jitter.overrun_probability == pytest.approx([count / num_samples for count in num_overruns], abs=0.01)
    assert jitter.expected_overrun_s == pytest.approx(overrun_s / num_samples, rel=0.02)
    assert jitter.expected_delay_s == pytest.approx(delay_s / num_samples, rel=0.02)
    assert jitter.expected_delay_s < 0.9 * jitter.expected_overrun_s
    assert longest_s <= jitter.longest_delay_s == pytest.approx(0.11)


@given(spans_s=any_spans.filter(bool), shard_bytes=any_shard)
def test_without_jitter_only_the_last_span_is_overrun(spans_s: list[float], shard_bytes: int) -> None:
    chunks = partition(spans_s, shard_bytes, 2, **(SMALL | {"slack": 0.9}))
    jitter = effect(spans_s, [0.0] * len(spans_s), chunks)
    last_s = used_s(chunks, SMALL).get(len(spans_s) - 1, 0.0)
    assert set(jitter.overrun_probability[:-1]) <= {0.0}
    assert jitter.expected_overrun_s == pytest.approx(max(0.0, last_s - spans_s[-1]))
    assert jitter.expected_delay_s == pytest.approx(jitter.expected_overrun_s)


def test_slack_buys_robustness() -> None:
    spans_s = [1.0] * 9
    tenth_s = [0.1] * 9
    tight = effect(spans_s, tenth_s, partition(spans_s, 500, 2, **SMALL))
    loose = effect(spans_s, tenth_s, partition(spans_s, 500, 2, **(SMALL | {"slack": 0.7})))
    assert tight.overrun_probability[0] == pytest.approx(0.5, abs=0.05)
    assert loose.overrun_probability[0] < 0.002
    assert loose.expected_overrun_s < 0.01 * tight.expected_overrun_s


@pytest.mark.parametrize(
    ("deviations_s", "reason"),
    [([], "one non-negative number for each span"), ([-1.0], "one non-negative number"), ([0.1], "in span 1, but")],
)
def test_jitter_that_does_not_match_the_spans_is_refused(deviations_s: list[float], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        effect([1.0], deviations_s, [Chunk(1, 1, 0, 10)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shard_bytes": -1}, "shard_bytes is -1; give 0 or more"),
        ({"num_replicas": 0}, "num_replicas is 0; it counts the local copy, so give at least 1"),
        ({"num_parts": 0}, r"num_parts is 0; give 1 to buffer_bytes \(40\)"),
        ({"num_parts": 41}, r"num_parts is 41; give 1 to buffer_bytes \(40\)"),
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s is 0.0; give more than 0"),
        ({"latency_s": float("nan")}, "latency_s is nan; give 0 or more"),
        ({"slack": 1.1}, "slack is 1.1; give more than 0 and at most 1"),
        ({"spans_s": [1.0, -2.0]}, "span 1 is -2.0 s long; give 0 or more"),
        ({"num_iterations": 0}, "num_iterations is 0; give at least 1"),
    ],
)
def test_a_number_out_of_range_is_refused(change: dict[str, Any], reason: str) -> None:
    arguments = {"num_iterations": 1, "spans_s": [1.0], "shard_bytes": 10, "num_replicas": 2} | SMALL | change
    with pytest.raises(ConfigurationError, match=reason):
        partition_over(**arguments)
