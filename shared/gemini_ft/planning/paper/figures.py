"""All figures of the paper that are reproduced, by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gemini_ft.planning.paper.comparison import Figure
from gemini_ft.planning.paper.failures import figure_10, figure_14, figure_15a, figure_15b
from gemini_ft.planning.paper.frequencies import figure_11, figure_12
from gemini_ft.planning.paper.iterations import figure_7, figure_8, figure_13, figure_16
from gemini_ft.planning.paper.probabilities import figure_9

__all__ = ["FIGURES"]

FIGURES: Mapping[str, Callable[[], Figure]] = MappingProxyType(
    {
        "7": figure_7,
        "8": figure_8,
        "9": figure_9,
        "10": figure_10,
        "11": figure_11,
        "12": figure_12,
        "13": figure_13,
        "14": figure_14,
        "15a": figure_15a,
        "15b": figure_15b,
        "16": figure_16,
    }
)
"""Number -> the function that computes the figure."""
