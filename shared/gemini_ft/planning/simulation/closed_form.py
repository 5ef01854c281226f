"""The closed forms of a scenario, to set beside its simulation (paper section 7.3, Figure 15)."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_ft.planning.simulation.mechanics import mechanics_of
from gemini_ft.planning.simulation.scenario import Scenario
from gemini_ft.planning.wasted_time import (
    average_wasted_time_s,
    best_wasted_time_s,
    effective_time_ratio,
    renewal_effective_time_ratio,
    worst_wasted_time_s,
)

__all__ = ["ClosedForm", "closed_form"]


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """T_wasted of a software failure, all that it costs, and the effective-time ratio in both accounts.

    `linear_ratio` is the paper's account; `renewal_ratio` lets failures hit recoveries and unfinished checkpoints.
    """

    best_s: float
    average_s: float
    worst_s: float
    cost_s: float
    linear_ratio: float
    renewal_ratio: float


def closed_form(scenario: Scenario, failures_per_day: float) -> ClosedForm:
    """Return the closed forms for so many software failures a day in the whole cluster; the scenario's own failure
    processes are not looked at.

    Raises:
        ConfigurationError: a negative number of failures, or a policy that cannot work in the scenario.
    """
    costs = mechanics_of(scenario).costs(scenario.iteration_s)
    average_s = average_wasted_time_s(costs)
    return ClosedForm(
        best_s=best_wasted_time_s(costs),
        average_s=average_s,
        worst_s=worst_wasted_time_s(costs),
        cost_s=average_s + costs.recovery_s,
        linear_ratio=effective_time_ratio(costs, failures_per_day),
        renewal_ratio=renewal_effective_time_ratio(costs, failures_per_day),
    )
