"""How probably a job recovers, estimated by sampling: for placements and failures that no exact method covers.

The samples depend on the seed and the arguments only. Needs the extra `planning` (numpy).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning.placement import replica_sets
from gemini_ft.planning.probability import check_num_lost, number_domains

__all__ = ["DomainFailures", "Estimate", "FailureModel", "NodeFailures", "UniformFailures", "estimate_recovery"]

_MAX_CELLS = 1 << 22
"""Slots times samples that are in memory at once."""


class FailureModel(Protocol):
    """Draws which slots are lost."""

    def sample(self, slots: Sequence[int], num_samples: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Return an array (slot, sample): True where the slot is lost."""
        ...


@dataclass(frozen=True, slots=True)
class UniformFailures:
    """`num_lost` slots are lost, all choices equally likely (the paper's model)."""

    num_lost: int

    def sample(self, slots: Sequence[int], num_samples: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """See FailureModel; refuses more losses than slots."""
        check_num_lost(self.num_lost, len(slots), "nodes")
        return _choose(len(slots), self.num_lost, num_samples, rng)


@dataclass(frozen=True, slots=True)
class NodeFailures:
    """Each slot is lost independently."""

    node_loss_probability: float

    def __post_init__(self) -> None:
        _check_probability("node_loss_probability", self.node_loss_probability)

    def sample(self, slots: Sequence[int], num_samples: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """See FailureModel."""
        return _independent(len(slots), self.node_loss_probability, num_samples, rng)


@dataclass(frozen=True, slots=True)
class DomainFailures:
    """Whole failure domains are lost, and slots of the others independently.

    `domains` maps each slot to its domain (rack, zone). Give either `num_lost_domains`, all choices equally likely, or
    the `domain_loss_probability` of each domain, independently.

    Raises:
        ConfigurationError: both or neither are given, or a probability is not within 0 and 1.
    """

    domains: Mapping[int, Hashable]
    num_lost_domains: int | None = None
    domain_loss_probability: float | None = None
    node_loss_probability: float = 0.0

    def __post_init__(self) -> None:
        if (self.num_lost_domains is None) == (self.domain_loss_probability is None):
            raise ConfigurationError("failures of domains need either num_lost_domains or domain_loss_probability")
        _check_probability("domain_loss_probability", self.domain_loss_probability or 0.0)
        _check_probability("node_loss_probability", self.node_loss_probability)

    def sample(self, slots: Sequence[int], num_samples: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """See FailureModel; refuses a slot without a domain, and more lost domains than there are."""
        number = list(number_domains(slots, self.domains).values())
        num_domains = len(set(number))
        if self.num_lost_domains is not None:
            check_num_lost(self.num_lost_domains, num_domains, "failure domains")
            lost_domains = _choose(num_domains, self.num_lost_domains, num_samples, rng)
        else:
            lost_domains = _independent(num_domains, self.domain_loss_probability or 0.0, num_samples, rng)
        return lost_domains[number] | _independent(len(slots), self.node_loss_probability, num_samples, rng)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A probability with the Wilson interval that covers the true one with probability `confidence`."""

    probability: float
    low: float
    high: float
    num_samples: int
    confidence: float


def estimate_recovery(
    sets: Placement | Collection[Collection[int]],
    failure_model: FailureModel,
    *,
    num_samples: int = 100_000,
    seed: int = 0,
    confidence: float = 0.95,
    num_losses: int | None = None,
) -> Estimate:
    """Estimate the probability that every set keeps enough members.

    `sets` is a placement, or the sets themselves, which must name every slot. Each may lose `num_losses` members; by
    default all but one (replicas). For an erasure code give its groups and its num_losses.

    Raises:
        ConfigurationError: no samples, a confidence that is not between 0 and 1, or what the failure model refuses.
    """
    if num_samples < 1:
        raise ConfigurationError(f"num_samples is {num_samples}; give at least 1")
    if not 0 < confidence < 1:
        raise ConfigurationError(f"confidence is {confidence:g}; give a number between 0 and 1, such as 0.95")
    families = replica_sets(sets) if isinstance(sets, dict) else [frozenset(members) for members in sets]
    slots = sorted(sets if isinstance(sets, dict) else frozenset[int]().union(*families))
    row = {slot: index for index, slot in enumerate(slots)}
    by_size: defaultdict[int, list[list[int]]] = defaultdict(list)
    for family in families:
        by_size[len(family)].append([row[slot] for slot in sorted(family)])
    rows = {size: np.array(equal) for size, equal in by_size.items()}

    rng = np.random.default_rng(seed)
    batch = max(1, _MAX_CELLS // max(1, len(slots)))
    num_survived = 0
    for first in range(0, num_samples, batch):
        lost = failure_model.sample(slots, min(batch, num_samples - first), rng)
        fatal = np.zeros(lost.shape[1], dtype=np.bool_)
        for size, members in rows.items():
            allowed = size - 1 if num_losses is None else num_losses
            num_members_lost = np.zeros((len(members), lost.shape[1]), dtype=np.uint16)
            for column in members.T:
                num_members_lost += lost[column]
            fatal |= (num_members_lost > allowed).any(axis=0)
        num_survived += int(fatal.size - fatal.sum())
    return _wilson(num_survived, num_samples, confidence)


def _wilson(num_survived: int, num_samples: int, confidence: float) -> Estimate:
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_survived / num_samples
    centre = (share + z * z / (2 * num_samples)) / (1 + z * z / num_samples)
    half = z / (1 + z * z / num_samples) * math.sqrt(share * (1 - share) / num_samples + (z / num_samples / 2) ** 2)
    # At the ends the interval touches 0 or 1; rounding must not push it past the share itself.
    low, high = min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))
    return Estimate(share, low, high, num_samples, confidence)


def _choose(num_all: int, num_chosen: int, num_samples: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Column after column, a choice of `num_chosen` rows, all equally likely (Floyd's algorithm)."""
    if num_chosen > num_all // 2:
        return ~_choose(num_all, num_all - num_chosen, num_samples, rng)
    chosen = np.zeros((num_all, num_samples), dtype=np.bool_)
    columns = np.arange(num_samples)
    for last in range(num_all - num_chosen, num_all):
        drawn = rng.integers(0, last, size=num_samples, endpoint=True)
        chosen[np.where(chosen[drawn, columns], last, drawn), columns] = True
    return chosen


def _independent(num_all: int, probability: float, num_samples: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """True in each cell independently: a binomial number of cells, all choices of them equally likely."""
    cells = np.zeros(num_all * num_samples, dtype=np.bool_)
    num_true = int(rng.binomial(cells.size, probability))
    cells[rng.choice(cells.size, num_true, replace=False, shuffle=False)] = True
    return cells.reshape(num_all, num_samples)


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigurationError(f"{name} is {value:g}; give a number from 0 to 1")
