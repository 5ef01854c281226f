"""Which bytes of a checkpoint are sent in which idle span (paper section 5.3, Algorithm 2, repaired).

The printed listing charges a span for the whole rest of the checkpoint instead of for the chunk, sends m remote
replicas instead of m - 1, loops for ever where a span's rest is below the start-up latency, and returns sizes only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from statistics import NormalDist
from typing import TypedDict, Unpack

from gemini_ft.contracts.errors import ConfigurationError

__all__ = [
    "Chunk",
    "JitterEffect",
    "Pacing",
    "chunk_cost_s",
    "jitter_effect",
    "largest_chunk_bytes",
    "partition",
    "partition_over",
    "smallest_interval",
]


class Pacing(TypedDict):
    """How chunks are cut and what one costs.

    A chunk is at most `buffer_bytes` // `num_parts` (R/p) and costs `latency_s` + size / `bandwidth_bytes_per_s`;
    `slack` (mu, in (0, 1]) is the part of a span that is planned with.
    """

    buffer_bytes: int
    num_parts: int
    bandwidth_bytes_per_s: float
    latency_s: float
    slack: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + size_bytes) of a shard, sent in `span` to holder number `replica` (1 to m - 1) of its
    slot's placement.
    """

    span: int
    replica: int
    offset: int
    size_bytes: int


def chunk_cost_s(size_bytes: int, bandwidth_bytes_per_s: float, latency_s: float) -> float:
    """Time that sending one chunk takes: f(s) = alpha + s / B (paper section 5.3)."""
    return latency_s + size_bytes / bandwidth_bytes_per_s


def largest_chunk_bytes(longest_delay_s: float, bandwidth_bytes_per_s: float, latency_s: float) -> int:
    """Return the largest chunk that, in flight when training wants the network back, delays it by at most
    `longest_delay_s`; 0 if there is none.
    """
    return max(0, math.floor((longest_delay_s - latency_s) * bandwidth_bytes_per_s))


def partition(
    spans_s: Sequence[float], shard_bytes: int, num_replicas: int, **pacing: Unpack[Pacing]
) -> tuple[Chunk, ...]:
    """Return the chunks of all m - 1 remote replicas, in the order in which they are sent.

    Spans are filled from the first to `slack` times their length; the last one takes whatever is left, so that a
    checkpoint always ends within its iteration, at worst by making it longer. No spans at all count as one of length 0.

    Raises:
        ConfigurationError: a number is out of its range.
    """
    budgets_s = _budgets_s(spans_s, shard_bytes, num_replicas, pacing)
    return tuple(_cut(chain(budgets_s[:-1], [math.inf]), shard_bytes, num_replicas, pacing))


def partition_over(
    num_iterations: int, spans_s: Sequence[float], shard_bytes: int, num_replicas: int, **pacing: Unpack[Pacing]
) -> tuple[Chunk, ...]:
    """Return the chunks of one checkpoint that is spread over k = `num_iterations` iterations.

    `Chunk.span` counts through them: divided by the number of spans of one iteration it gives the iteration.

    Raises:
        ConfigurationError: a number is out of its range.
    """
    if num_iterations < 1:
        raise ConfigurationError(f"num_iterations is {num_iterations}; give at least 1")
    return partition(tuple(spans_s) * num_iterations, shard_bytes, num_replicas, **pacing)


def smallest_interval(
    spans_s: Sequence[float],
    shard_bytes: int,
    num_replicas: int,
    *,
    longest_interval: int = 1000,
    **pacing: Unpack[Pacing],
) -> int:
    """Return the smallest k such that one checkpoint, spread over k iterations, overruns no span, not even the last.

    Raises:
        ConfigurationError: a number is out of its range, or k would be above `longest_interval`.
    """
    budgets_s = _budgets_s(spans_s, shard_bytes, num_replicas, pacing)
    num_bytes = shard_bytes * (num_replicas - 1)
    if num_bytes == 0:
        return 1
    # A bound on what one iteration carries, so that a hopeless case is refused without being cut up.
    carried_bytes = sum(max(0.0, budget_s - pacing["latency_s"]) for budget_s in budgets_s)
    carried_bytes *= pacing["bandwidth_bytes_per_s"]
    if num_bytes <= carried_bytes * longest_interval:
        budgets = chain.from_iterable(repeat(budgets_s, longest_interval))
        chunks = list(_cut(budgets, shard_bytes, num_replicas, pacing))
        if sum(chunk.size_bytes for chunk in chunks) == num_bytes:
            return chunks[-1].span // len(budgets_s) + 1
    raise ConfigurationError(
        f"a checkpoint sends {num_bytes} bytes, which do not fit in the idle time of {longest_interval} iterations "
        f"(at most {carried_bytes:.0f} bytes each); give fewer replicas or longer spans"
    )


@dataclass(frozen=True, slots=True)
class JitterEffect:
    """What a schedule does when the spans' lengths vary.

    `overrun_probability` has one entry a span. `expected_overrun_s` is the time per checkpoint by which training
    waits if every chunk is sent in its span; `expected_delay_s` is what remains of it if a chunk that has not begun
    when its span ends is put off, except in the last span. Training then waits in no other span longer than
    `longest_delay_s`, one chunk. What is put off is not counted again in the span that takes it.
    """

    overrun_probability: tuple[float, ...]
    expected_overrun_s: float
    expected_delay_s: float
    longest_delay_s: float


def jitter_effect(
    spans_s: Sequence[float],
    deviations_s: Sequence[float],
    chunks: Iterable[Chunk],
    *,
    bandwidth_bytes_per_s: float,
    latency_s: float,
) -> JitterEffect:
    """Return how often and by how much `chunks` overrun spans of independent normal lengths, in closed form.

    `spans_s` and `deviations_s` are mean and standard deviation of each span; the paper measured deviations below a
    tenth of the mean (section 5.4).

    Raises:
        ConfigurationError: `deviations_s` is not one non-negative number a span, or a chunk is in none of the spans.
    """
    if len(deviations_s) != len(spans_s) or any(not 0 <= deviation_s < math.inf for deviation_s in deviations_s):
        raise ConfigurationError("deviations_s must hold one non-negative number for each span")
    costs_s: list[list[float]] = [[] for _ in spans_s]
    for chunk in chunks:
        if chunk.span >= len(costs_s):
            raise ConfigurationError(f"a chunk is in span {chunk.span}, but there are {len(costs_s)} spans")
        costs_s[chunk.span].append(chunk_cost_s(chunk.size_bytes, bandwidth_bytes_per_s, latency_s))
    probabilities, overrun_s, delay_s = [], 0.0, 0.0
    last = len(spans_s) - 1
    for span, (mean_s, deviation_s, span_costs_s) in enumerate(zip(spans_s, deviations_s, costs_s, strict=True)):
        # Entry k: the chance that the span ends before k chunks are sent, and by how much it is then too short.
        shortfalls = [_shortfall(end_s, mean_s, deviation_s) for end_s in accumulate(span_costs_s, initial=0.0)]
        probability, span_overrun_s = shortfalls[-1] if span_costs_s else (0.0, 0.0)
        probabilities.append(probability)
        overrun_s += span_overrun_s
        delay_s += span_overrun_s
        if span_costs_s and span != last:
            put_off_s = sum(cost_s * ended for cost_s, (ended, _) in zip(span_costs_s, shortfalls, strict=False))
            delay_s -= put_off_s + shortfalls[0][1]
    longest_delay_s = max(chain.from_iterable(costs_s[:-1]), default=0.0)
    return JitterEffect(tuple(probabilities), overrun_s, delay_s, longest_delay_s)


def _shortfall(used_s: float, mean_s: float, deviation_s: float) -> tuple[float, float]:
    """Return P(X < used) and E[max(0, used - X)] of X normal."""
    if deviation_s == 0:
        return float(used_s > mean_s), max(0.0, used_s - mean_s)
    normal, score = NormalDist(), (used_s - mean_s) / deviation_s
    return normal.cdf(score), deviation_s * (score * normal.cdf(score) + normal.pdf(score))


def _cut(budgets_s: Iterable[float], shard_bytes: int, num_replicas: int, pacing: Pacing) -> Iterator[Chunk]:
    bandwidth, latency_s = pacing["bandwidth_bytes_per_s"], pacing["latency_s"]
    part_bytes = pacing["buffer_bytes"] // pacing["num_parts"]
    part_cost_s = chunk_cost_s(part_bytes, bandwidth, latency_s)
    replica, offset = 1, 0
    for span, budget_s in enumerate(budgets_s):
        left_s = budget_s
        while True:
            if replica == num_replicas or shard_bytes == 0:
                return
            size = part_bytes if left_s >= part_cost_s else largest_chunk_bytes(left_s, bandwidth, latency_s)
            size = min(size, part_bytes, shard_bytes - offset)
            if size == 0:
                break
            yield Chunk(span, replica, offset, size)
            left_s -= chunk_cost_s(size, bandwidth, latency_s)
            offset += size
            if offset == shard_bytes:
                replica, offset = replica + 1, 0


def _budgets_s(spans_s: Sequence[float], shard_bytes: int, num_replicas: int, pacing: Pacing) -> list[float]:
    """Check all numbers and return mu times each span; no spans at all are one of length 0."""
    if shard_bytes < 0:
        raise ConfigurationError(f"shard_bytes is {shard_bytes}; give 0 or more")
    if num_replicas < 1:
        raise ConfigurationError(f"num_replicas is {num_replicas}; it counts the local copy, so give at least 1")
    if not 1 <= pacing["num_parts"] <= pacing["buffer_bytes"]:
        raise ConfigurationError(
            f"num_parts is {pacing['num_parts']}; give 1 to buffer_bytes ({pacing['buffer_bytes']}), "
            "for a part holds at least one byte"
        )
    if not 0 < pacing["bandwidth_bytes_per_s"] < math.inf:
        raise ConfigurationError(f"bandwidth_bytes_per_s is {pacing['bandwidth_bytes_per_s']}; give more than 0")
    if not 0 <= pacing["latency_s"] < math.inf:
        raise ConfigurationError(f"latency_s is {pacing['latency_s']}; give 0 or more")
    if not 0 < pacing["slack"] <= 1:
        raise ConfigurationError(f"slack is {pacing['slack']}; give more than 0 and at most 1")
    for span, span_s in enumerate(spans_s):
        if not 0 <= span_s < math.inf:
            raise ConfigurationError(f"span {span} is {span_s} s long; give 0 or more")
    return [pacing["slack"] * span_s for span_s in spans_s] or [0.0]
