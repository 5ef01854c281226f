"""Transfers on the persistent tier's link share it in equal parts."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import simpy

from gemini_ft.planning.simulation.link import SharedLink

MB = 10**6


def run(transfers: list[tuple[float, float]], *, others: int = 0, stop_first_at_s: float | None = None) -> list[float]:
    """Start (at_s, size_bytes) on a link of 1 MB/s; return when each ended, in seconds, infinity if it was stopped."""
    env = simpy.Environment(initial_time=0)
    link = SharedLink(env, MB, others)
    ended = [float("inf")] * len(transfers)

    def one(index: int, at_s: float, size_bytes: float) -> Generator[simpy.Event, None, None]:
        yield env.timeout(round(at_s * 1e6))
        try:
            yield from link.transfer(size_bytes)
        except simpy.Interrupt:
            return
        ended[index] = env.now / 1e6

    started = [env.process(one(index, at_s, size)) for index, (at_s, size) in enumerate(transfers)]

    def stop(at_s: float) -> Generator[simpy.Event, None, None]:
        yield env.timeout(round(at_s * 1e6))
        started[0].interrupt()

    if stop_first_at_s is not None:
        env.process(stop(stop_first_at_s))
    env.run()
    return ended


def test_a_transfer_alone_has_the_whole_link() -> None:
    assert run([(1, 10 * MB)]) == [11]


def test_overlapping_transfers_share_while_they_overlap() -> None:
    # 4 MB alone, then 3 MB each, then 1 MB alone.
    assert run([(0, 7 * MB), (4, 4 * MB)]) == [10, 11]


def test_equal_transfers_end_together_and_three_take_a_third_each() -> None:
    assert run([(0, 2 * MB), (0, 2 * MB), (0, 2 * MB)]) == [6, 6, 6]


def test_transfers_of_others_take_their_part_all_the_time() -> None:
    assert run([(0, 2 * MB)], others=1) == [4]


def test_a_stopped_transfer_leaves_its_part() -> None:
    assert run([(0, 10 * MB), (0, 10 * MB)], stop_first_at_s=4) == [float("inf"), 12]


def test_sizes_that_do_not_divide_end_within_a_microsecond_each() -> None:
    ended = run([(0, 1_000_003 / 3), (0.1, 777_777.7), (0.2, 1.5)])
    assert max(ended) == pytest.approx((1_000_003 / 3 + 777_777.7 + 1.5) / MB, abs=5e-6)
