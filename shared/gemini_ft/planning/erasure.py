"""Erasure-coded groups, the alternative to replicas: g slots keep coded pieces of each other's shards.

A maximum-distance-separable code cuts a group's shards so that any g - t members restore all of them. Not in the
paper, which rejects it for its computing cost (section 8); here it stands in the same tables as the placements.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning._counting import polynomial_power, polynomial_product
from gemini_ft.planning.probability import all_down_rate_per_s, check_num_lost

__all__ = ["ErasureCode"]


@dataclass(frozen=True, slots=True)
class ErasureCode:
    """Groups of `num_members` slots (g) that survive the loss of any `num_losses` (t) of their members.

    Where g does not divide N, groups take one or more members in addition and still survive t losses.

    Raises:
        ConfigurationError: not 1 <= t < g.
    """

    num_members: int = 4
    num_losses: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.num_losses < self.num_members:
            raise ConfigurationError(
                f"an erasure code of {self.num_members} members cannot survive {self.num_losses} losses; "
                "give num_losses from 1 to num_members - 1"
            )

    def groups(self, num_slots: int) -> tuple[tuple[int, ...], ...]:
        """Return N // g groups of consecutive slots, whose sizes differ by at most one.

        Raises:
            ConfigurationError: fewer slots than members.
        """
        if num_slots < self.num_members:
            raise ConfigurationError(
                f"an erasure code of {self.num_members} members needs as many nodes, but there are {num_slots}"
            )
        num_groups = num_slots // self.num_members
        borders = [num_slots * index // num_groups for index in range(num_groups + 1)]
        return tuple(tuple(range(first, end)) for first, end in pairwise(borders))

    def recovery_probability(self, num_slots: int, num_lost: int) -> Fraction:
        """Return the probability that no group loses more than t members when `num_lost` slots are lost, all choices
        equally likely.

        Raises:
            ConfigurationError: fewer slots than members, or `num_lost` is not within 0 and N.
        """
        check_num_lost(num_lost, num_slots, "nodes")
        survivable = [1]
        for size, num_equal in Counter(map(len, self.groups(num_slots))).items():
            group = [math.comb(size, lost) for lost in range(self.num_losses + 1)]
            survivable = polynomial_product(survivable, polynomial_power(group, num_equal, num_lost), num_lost)
        return Fraction(survivable[num_lost] if num_lost < len(survivable) else 0, math.comb(num_slots, num_lost))

    def loss_rate_per_s(self, num_slots: int, node_failures_per_s: float, exposure_s: float) -> float:
        """Return how often per second t + 1 members of a group are down at once; see `set_loss_rate_per_s`.

        Raises:
            ConfigurationError: fewer slots than members, or a rate or an exposure is negative.
        """
        num_fatal = sum(math.comb(len(group), self.num_losses + 1) for group in self.groups(num_slots))
        return num_fatal * all_down_rate_per_s(self.num_losses + 1, node_failures_per_s, exposure_s)

    @property
    def memory_factor(self) -> Fraction:
        """What a slot keeps, in shards: g / (g - t), a piece of each member's shard; less in a larger group.

        Replicas keep m. No slot has a whole shard, so a software failure needs the network too.
        """
        return Fraction(self.num_members, self.num_members - self.num_losses)

    @property
    def traffic_factor(self) -> Fraction:
        """What a slot sends for a version, in shards: (g - 1) / (g - t), at most that in a larger group.

        Replicas send m - 1.
        """
        return Fraction(self.num_members - 1, self.num_members - self.num_losses)
