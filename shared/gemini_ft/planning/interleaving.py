"""How long an iteration takes when checkpoint traffic goes in between (paper section 5.2 and Fig 16).

A model of one rank's traffic in two stages, both in order: a chunk is received into a free part of the peer's
buffer, then copied out to CPU memory. Training's own traffic waits for a chunk that is being received.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gemini_ft.planning.profile import IdleProfile
from gemini_ft.planning.schedule import Chunk, Pacing, chunk_cost_s, partition

__all__ = ["Prediction", "Scheme", "TimedChunk", "TimedSpan", "pacing_of", "predict"]


class Scheme(enum.StrEnum):
    """Ways to send a checkpoint, the four bars of Fig 16."""

    BLOCKING = "blocking"
    NAIVE = "naive"
    ONE_BUFFER = "one_buffer"
    PIPELINED = "pipelined"


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A span as it happens. Between `idle_end_s` and `end_s` training waits for checkpoint traffic."""

    start_s: float
    idle_end_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """A chunk as it happens; it waits in buffer part `part` from `send_start_s` to `copy_end_s`."""

    chunk: Chunk
    part: int
    send_start_s: float
    send_end_s: float
    copy_start_s: float
    copy_end_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """An iteration with one checkpoint in it.

    `fits` says whether the receive buffer of `buffer_bytes` fits in the free device memory; `iteration_s` is what
    it would take if it did. `traffic_s` is the time that the chunks are planned to take. `Chunk.span` is an index
    into `spans`; the blocking scheme has a span of its own, of length 0, before those of the profile.
    """

    scheme: Scheme
    baseline_s: float
    iteration_s: float
    traffic_s: float
    buffer_bytes: int
    fits: bool
    spans: tuple[TimedSpan, ...]
    chunks: tuple[TimedChunk, ...]

    @property
    def overhead(self) -> float:
        """What the checkpoint adds, as a fraction of an iteration without one."""
        return self.iteration_s / self.baseline_s - 1


def pacing_of(profile: IdleProfile, scheme: Scheme = Scheme.PIPELINED) -> Pacing:
    """Return how `scheme` cuts its chunks and what it takes one to cost.

    With one part, receiving waits for copying, so that their times add up; with more, the slower stage sets the pace.
    The naive scheme sends one piece a span and counts on the time between two spans for copying it.
    """
    bandwidth, copy = profile.bandwidth_bytes_per_s, profile.copy_bytes_per_s
    buffer_bytes, num_parts = profile.buffer_bytes, profile.num_parts
    if scheme is Scheme.NAIVE:
        buffer_bytes, num_parts, pace = max(1, profile.shard_bytes), 1, bandwidth
    elif scheme is Scheme.ONE_BUFFER or num_parts == 1:
        num_parts, pace = 1, 1 / (1 / bandwidth + 1 / copy)
    else:
        pace = min(bandwidth, copy)
    return Pacing(
        buffer_bytes=buffer_bytes,
        num_parts=num_parts,
        bandwidth_bytes_per_s=pace,
        latency_s=profile.latency_s,
        slack=profile.slack,
    )


def predict(profile: IdleProfile, scheme: Scheme, num_replicas: int = 2) -> Prediction:
    """Return what one checkpoint of m = `num_replicas` replicas an iteration costs under `scheme`.

    Raises:
        ConfigurationError: `num_replicas` is below 1.
    """
    pacing = pacing_of(profile, scheme)
    windows = list(zip(profile.starts_s, profile.spans_s, strict=True)) or [(profile.iteration_s, 0.0)]
    if scheme is Scheme.BLOCKING:
        chunks = partition([], profile.shard_bytes, num_replicas, **pacing)
        windows = [(0.0, 0.0), *windows]
    else:
        chunks = partition(profile.spans_s, profile.shard_bytes, num_replicas, **pacing)
    spans, timed = _run(profile, windows, chunks, pacing["num_parts"], until_copied=scheme is Scheme.BLOCKING)
    buffer_bytes = profile.buffer_bytes
    if scheme is Scheme.NAIVE:
        buffer_bytes = max((chunk.size_bytes for chunk in chunks), default=0)
    cost = (pacing["bandwidth_bytes_per_s"], pacing["latency_s"])
    return Prediction(
        scheme=scheme,
        baseline_s=profile.iteration_s,
        iteration_s=profile.iteration_s + sum(span.end_s - span.idle_end_s for span in spans),
        traffic_s=sum(chunk_cost_s(chunk.size_bytes, *cost) for chunk in chunks),
        buffer_bytes=buffer_bytes,
        fits=buffer_bytes <= profile.free_device_bytes,
        spans=tuple(spans),
        chunks=tuple(timed),
    )


def _run(
    profile: IdleProfile,
    windows: Sequence[tuple[float, float]],
    chunks: Sequence[Chunk],
    num_parts: int,
    *,
    until_copied: bool,
) -> tuple[list[TimedSpan], list[TimedChunk]]:
    """Play the chunks; what a span takes too long delays everything after it."""
    by_span = defaultdict(list)
    for chunk in chunks:
        by_span[chunk.span].append(chunk)
    part_free_s = [0.0] * num_parts
    copied_s = delay_s = 0.0
    spans: list[TimedSpan] = []
    timed: list[TimedChunk] = []
    for index, (start_s, length_s) in enumerate(windows):
        now_s = start_s + delay_s
        idle_end_s = now_s + length_s
        for chunk in by_span[index]:
            part = len(timed) % num_parts
            send_start_s = max(now_s, part_free_s[part])
            now_s = send_start_s + chunk_cost_s(chunk.size_bytes, profile.bandwidth_bytes_per_s, profile.latency_s)
            copy_start_s = max(now_s, copied_s)
            copied_s = part_free_s[part] = copy_start_s + chunk.size_bytes / profile.copy_bytes_per_s
            timed.append(TimedChunk(chunk, part, send_start_s, now_s, copy_start_s, copied_s))
        end_s = max(idle_end_s, copied_s if until_copied else now_s)
        spans.append(TimedSpan(start_s + delay_s, idle_end_s, end_s))
        delay_s += end_s - idle_end_s
    return spans, timed
