"""An iteration with a checkpoint in it, as a line of text."""

from __future__ import annotations

from collections.abc import Iterable

from gemini_ft.planning.interleaving import Prediction

__all__ = ["TIMELINE_LEGEND", "draw_timeline"]

TIMELINE_LEGEND = "= training's traffic, . idle, # checkpoint, ! training waits for the checkpoint"


def draw_timeline(prediction: Prediction, total_s: float, width: int = 64) -> str:
    """Return `width` columns for `total_s` seconds; each shows what took most of its time, and any wait."""
    column_s = total_s / width
    idle = _occupied(((span.start_s, span.idle_end_s) for span in prediction.spans), column_s, width)
    waiting = _occupied(((span.idle_end_s, span.end_s) for span in prediction.spans), column_s, width)
    sending = _occupied(((one.send_start_s, one.send_end_s) for one in prediction.chunks), column_s, width)
    columns = []
    for column in range(width):
        sent_s = max(0.0, sending[column] - waiting[column])
        shares = {
            "#": sent_s,
            ".": idle[column] - sent_s,
            "=": column_s - idle[column] - waiting[column],
        }
        is_over = column * column_s >= prediction.iteration_s
        waits = waiting[column] > 0.01 * column_s
        columns.append(" " if is_over else "!" if waits else max(shares, key=lambda kind: shares[kind]))
    return "".join(columns)


def _occupied(intervals: Iterable[tuple[float, float]], column_s: float, width: int) -> list[float]:
    """How much of each column lies in the intervals, which do not overlap each other."""
    occupied_s = [0.0] * width
    for start_s, end_s in intervals:
        for column in range(int(start_s / column_s), min(width, int(end_s / column_s) + 1)):
            overlap_s = min(end_s, (column + 1) * column_s) - max(start_s, column * column_s)
            occupied_s[column] += max(0.0, overlap_s)
    return occupied_s
