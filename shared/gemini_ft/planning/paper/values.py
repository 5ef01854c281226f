"""What the paper says: every printed or read-off value that a figure is compared with, with source and tolerance.

Printed values may differ by 3 %, or by what they were rounded by. Values read off a figure may differ by 2 % of its
axis, taken to end at the largest value that is shown.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["PAPER", "PaperValue", "Relation"]

_PRINTED_TOLERANCE = 0.03
_READING_ERROR = 0.02


class Relation(enum.StrEnum):
    """What the paper claims of a quantity."""

    ABOUT = "about"
    AT_LEAST = "at least"
    AT_MOST = "at most"


@dataclass(frozen=True, slots=True)
class PaperValue:
    """One claim. `tolerance` is in `unit`, and 0 for a bound."""

    quantity: str
    value: float
    unit: str
    source: str
    tolerance: float
    relation: Relation = Relation.ABOUT

    def agrees(self, value: float) -> bool:
        """True if `value` is what the paper claims, within its tolerance."""
        match self.relation:
            case Relation.AT_LEAST:
                return value >= self.value
            case Relation.AT_MOST:
                return value <= self.value
            case _:
                return self.is_near(value, self.value)

    def is_near(self, value: float, other: float) -> bool:
        """True if the two differ by no more than the tolerance."""
        return abs(value - other) <= self.tolerance * (1 + 1e-9)


def _printed(quantity: str, value: float, unit: str, source: str, rounding: float | None = None) -> PaperValue:
    tolerance = _PRINTED_TOLERANCE * value if rounding is None else rounding
    return PaperValue(quantity, value, unit, source, tolerance)


def _read_off(quantity: str, value: float, unit: str, source: str, axis: float) -> PaperValue:
    return PaperValue(quantity, value, unit, f"{source}, read off", _READING_ERROR * axis)


def _bound(quantity: str, relation: Relation, value: float, unit: str, source: str) -> PaperValue:
    return PaperValue(quantity, value, unit, source, 0.0, relation)


def _models(figure: str, what: str, unit: str, axis: float, values: Mapping[str, float]) -> dict[str, PaperValue]:
    return {
        f"{figure} {what} {model}": _read_off(f"{model}, {what}", value, unit, f"Fig {figure}", axis)
        for model, value in values.items()
    }


_ITERATION, _TRAFFIC = "iteration with checkpoints", "checkpoint traffic"

PAPER: Mapping[str, PaperValue] = MappingProxyType(
    {
        # Iterations and their idle time, 16 machines
        "7 text": _printed("gpt2-100b, iteration with checkpoints", 62, "s", "section 7.2"),
        **_models("7", _ITERATION, "s", 79, {"gpt2-100b": 65, "roberta-100b": 79, "bert-100b": 73}),
        **_models("8", _TRAFFIC, "s", 11.7, {"gpt2-100b": 2.5, "roberta-100b": 2.5, "bert-100b": 2.5}),
        "fits": _printed("iterations that a checkpoint needs, largest of all models", 1, "", "section 7.2", 0.0),
        **_models(
            "13a",
            _ITERATION,
            "s",
            48,
            {"gpt2-10b": 11, "gpt2-20b": 22.5, "gpt2-40b": 45, "roberta-40b": 48, "bert-40b": 46.5},
        ),
        **_models(
            "13b",
            _TRAFFIC,
            "s",
            6.4,
            {"gpt2-10b": 1.4, "gpt2-20b": 2.3, "gpt2-40b": 4.4, "roberta-40b": 4.5, "bert-40b": 4.5},
        ),
        # Recovery probability, m = 2
        "9 group 2": _printed("16 machines, 2 lost, GEMINI", 93.3, "%", "section 4", 0.05),
        "9 group 3": _printed("16 machines, 3 lost, GEMINI", 80.0, "%", "section 4", 0.05),
        "9 not 2": _printed("16 machines, 2 lost, GEMINI cannot use memory", 6.7, "%", "section 7.2", 0.05),
        "9 ring 3": _read_off("16 machines, 3 lost, ring", 60, "%", "Fig 9", 100),
        "9 lower 3": _printed("16 machines, 3 lost, ring below GEMINI", 25, "%", "section 7.2", 0.5),
        "9 four group": _printed("4 machines, 2 lost, fatal pairs, group", 2, "of 6", "section 4", 0.0),
        "9 four ring": _printed("4 machines, 2 lost, fatal pairs, ring", 4, "of 6", "section 4", 0.0),
        # Average wasted time
        "10 Strawman": _read_off("Strawman", 98, "min", "Fig 10", 98),
        "10 HighFreq": _read_off("HighFreq", 23, "min", "Fig 10", 98),
        "10 GEMINI": _printed("GEMINI, software failure", 1.6, "min", "section 7.2", 0.05),
        "10 GEMINI peer": _printed("GEMINI, machine replaced", 1.6, "min", "section 7.2", 0.05),
        "10 ratio": _bound("HighFreq over GEMINI", Relation.AT_LEAST, 13, "x", "section 7.2"),
        # Checkpoint time against the persistent tier
        "11 100": _printed("100 Gbps, 16 machines", 65, "x", "section 7.2"),
        "11 400": _read_off("400 Gbps, 16 machines", 270, "x", "Fig 11", 270),
        "11 bound": _bound("400 Gbps, 16 machines", Relation.AT_LEAST, 250, "x", "section 7.2"),
        "11 storage": _printed("storage bandwidth that would match 400 Gbps", 6.4, "Tbps", "section 7.2", 0.05),
        # Checkpoint frequency
        "12 GEMINI": _read_off("GEMINI", 58, "/h", "Fig 12", 58),
        "12 HighFreq": _read_off("HighFreq", 7, "/h", "Fig 12", 58),
        "12 over HighFreq": _printed("GEMINI over HighFreq", 8, "x", "section 7.2"),
        "12 over Strawman": _bound("GEMINI over Strawman", Relation.AT_LEAST, 170, "x", "section 7.2"),
        "12 share": _printed("HighFreq, share of all time in serialisation", 14.5, "%", "section 7.3"),
        # A recovery, in parts
        "14 serialization": _printed("serialisation of two replicas", 162, "s", "Fig 14"),
        "14 retrieval": _bound("retrieval from a peer", Relation.AT_MOST, 3, "s", "section 7.2"),
        "14 software": _printed("software failure, in all", 7, "min", "section 7.3", 0.5),
        "14 hardware": _printed("hardware failure, in all, replaced in 4 to 7 min", 12, "min", "section 7.3", 1.5),
        # Effective training time
        **{
            f"15a {system} {failures}": _read_off(f"{system}, {failures} a day", value, "", "Fig 15a", 1)
            for system, values in {
                "Strawman": (0.92, 0.39),
                "HighFreq": (0.84, 0.71),
                "GEMINI": (0.99, 0.95),
            }.items()
            for failures, value in zip((1, 8), values, strict=True)
        },
        **{
            f"15b {system} {machines}": _read_off(f"{system}, {machines} machines", value, "", "Fig 15b", 1)
            for system, values in {
                "Strawman": (0.77, 0.0),
                "HighFreq": (0.80, 0.59),
                "GEMINI": (0.98, 0.91),
            }.items()
            for machines, value in zip((200, 1000), values, strict=True)
        },
        # Read off two axes: 2 % of the machines, and 2 % of the ratio over a slope of 0.00115 a machine.
        "15b zero": PaperValue("Strawman, machines at which nothing is left", 900, "", "Fig 15b, read off", 20 + 17),
        "15b higher": _printed("1000 machines, GEMINI over HighFreq", 1.54, "x", "section 7.3"),
        # Interleaving, GPT-2 40B on p3dn
        "16 baseline": _read_off("no checkpoints", 43.5, "s", "Fig 16", 48),
        "16 blocking": _printed("blocking, added", 10.1, "%", "section 7.4"),
        "16 naive": _bound("naive interleaving, receive buffer", Relation.AT_LEAST, 2.0, "GB", "section 7.4"),
        "16 one_buffer": _printed("one buffer of 128 MB, added", 3.5, "%", "section 7.4"),
        "16 pipelined": _printed("4 parts of 32 MB, added", 0.0, "%", "section 7.4", 0.05),
    }
)
"""Key (figure and quantity) -> what the paper says."""
