"""Figures 7, 8, 13 and 16: what checkpoints of every iteration do to the iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from gemini_ft.planning.interleaving import Scheme, pacing_of, predict
from gemini_ft.planning.paper.comparison import Difference, Figure, Row, compare
from gemini_ft.planning.paper.profiles import PAPER_MODELS, fig16_profile
from gemini_ft.planning.paper.values import PAPER
from gemini_ft.planning.plots import draw_bars
from gemini_ft.planning.schedule import smallest_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["figure_7", "figure_8", "figure_13", "figure_16"]

_P4D = ("gpt2-100b", "roberta-100b", "bert-100b")
_P3DN = ("gpt2-10b", "gpt2-20b", "gpt2-40b", "roberta-40b", "bert-40b")
_ITERATION, _TRAFFIC = "iteration with checkpoints", "checkpoint traffic"
_INPUTS = (
    "Input: iteration and idle time without checkpoints, as the paper gives them. Computed: the schedule (Algorithm 2, "
    "repaired), played on a two-stage timeline of receiving and copying out."
)


def figure_7() -> Figure:
    """Return Fig 7: iteration time of the 100B models on p4d."""
    text = Difference(62, "the bar is higher than the 62 s of the text (section 7.2), which is our input")
    rows = [compare("7 text", _iteration_s("gpt2-100b"), "as in the text")]
    rows += _iterations("7", _P4D, {"gpt2-100b": text})
    return Figure("7", "iteration time on 16 p4d", rows, [_INPUTS], _bars(_P4D, rows[1:], "iteration (s)"))


def figure_8() -> Figure:
    """Return Fig 8: how much of the idle time of p4d the checkpoint uses."""
    traffic = _traffic("8", _P4D)
    rows = [*traffic, _fits(_P4D)]
    notes = [
        _INPUTS,
        "Calibrated: the rate of copying out is the shard of GPT-2 100B over its 2.5 s, so that this row holds by "
        "construction; the other models have a shard of the same size.",
    ]
    return Figure(
        "8",
        "checkpoint traffic in the idle time of 16 p4d",
        rows,
        notes,
        _bars(_P4D, traffic, "checkpoint traffic (s)"),
    )


def figure_13() -> Figure:
    """Return Fig 13: iteration time and checkpoint traffic on p3dn."""
    small = Difference(
        4.4 / 4,
        "a quarter of the bytes of gpt2-40b takes a quarter of its time in our model, which has no fixed cost a "
        "checkpoint; the bar of gpt2-10b shows about 0.3 s more",
    )
    traffic = _traffic("13b", _P3DN, {"gpt2-10b": small})
    rows = [*_iterations("13a", _P3DN), *traffic, _fits(_P3DN)]
    notes = [
        _INPUTS,
        "Calibrated: the rate of copying out is the shard of GPT-2 40B over its 4.4 s; the other models follow from "
        "their parameters.",
        f"With m = 3, a checkpoint of gpt2-40b needs {_interval('gpt2-40b', 3)} iterations to stay in their idle time; "
        f"that of gpt2-100b on p4d needs {_interval('gpt2-100b', 3)}.",
    ]
    return Figure("13", "iterations on 16 p3dn", rows, notes, _bars(_P3DN, traffic, "checkpoint traffic (s)"))


def figure_16() -> Figure:
    """Return Fig 16: the ways to interleave, GPT-2 40B on p3dn."""
    predicted = {scheme: predict(fig16_profile(), scheme) for scheme in Scheme}
    rows = [compare("16 baseline", predicted[Scheme.PIPELINED].baseline_s)]
    rows += [
        compare(f"16 {scheme}", 100 * predicted[scheme].overhead)
        for scheme in (Scheme.BLOCKING, Scheme.ONE_BUFFER, Scheme.PIPELINED)
    ]
    naive = predicted[Scheme.NAIVE]
    rows.insert(2, compare("16 naive", naive.buffer_bytes / 1e9))
    notes = [
        "Input: network rate, shard, the longest idle span of 1.6 s (section 7.4), 5.7 s of idle time (Fig 13b). "
        "Calibrated: the other idle time is cut in 24 spans, so that one buffer costs 3.5 %; any number from 4 to 256 "
        "gives 3.3 to 3.8 %. Assumed: slack 0.9, for which the paper gives no value, and a start-up latency of 50 us.",
        f"Naive interleaving needs {naive.buffer_bytes / 1e9:.2f} GB in one piece and does not fit in the 2 GB "
        f"that are free; if it did, an iteration would take {naive.iteration_s:.1f} s.",
    ]
    baseline_s = PAPER["16 baseline"].value
    paper: list[float | None] = [
        baseline_s * (1 + PAPER[f"16 {scheme}"].value / 100) if scheme is not Scheme.NAIVE else None
        for scheme in Scheme
    ]
    ours: list[float | None] = [one.iteration_s if one.fits else None for one in predicted.values()]
    labels = ["blocking", "naive\n(out of memory)", "one buffer", "4 parts"]
    return Figure(
        "16",
        "interleaving, GPT-2 40B on 16 p3dn",
        rows,
        notes,
        lambda axes: draw_bars(axes, labels, {"ours": ours, "paper": paper}, "iteration (s)"),
    )


def _iteration_s(model: str) -> float:
    return predict(PAPER_MODELS[model].profile(), Scheme.PIPELINED).iteration_s


def _iterations(
    figure: str, models: Sequence[str], differences: Mapping[str, Difference] = MappingProxyType({})
) -> list[Row]:
    return [
        compare(f"{figure} {_ITERATION} {model}", _iteration_s(model), difference=differences.get(model))
        for model in models
    ]


def _traffic(
    figure: str, models: Sequence[str], differences: Mapping[str, Difference] = MappingProxyType({})
) -> list[Row]:
    return [
        compare(
            f"{figure} {_TRAFFIC} {model}",
            predict(PAPER_MODELS[model].profile(), Scheme.PIPELINED).traffic_s,
            difference=differences.get(model),
        )
        for model in models
    ]


def _fits(models: Sequence[str]) -> Row:
    return compare("fits", max(_interval(model) for model in models))


def _interval(model: str, num_replicas: int = 2) -> int:
    """How many iterations a checkpoint needs so that it delays none of them."""
    profile = PAPER_MODELS[model].profile()
    return smallest_interval(profile.spans_s, profile.shard_bytes, num_replicas, **pacing_of(profile))


def _bars(models: Sequence[str], rows: Sequence[Row], y_label: str) -> Callable[[Axes], None]:
    series: dict[str, list[float | None]] = {
        "ours": [row.ours for row in rows],
        "paper": [row.paper.value for row in rows],
    }
    return lambda axes: draw_bars(axes, models, series, y_label)
