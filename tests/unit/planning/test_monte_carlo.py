"""Estimates against exact answers, and the interval against the literature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement
from gemini_ft.planning.erasure import ErasureCode
from gemini_ft.planning.monte_carlo import (
    DomainFailures,
    Estimate,
    FailureModel,
    NodeFailures,
    UniformFailures,
    estimate_recovery,
)
from gemini_ft.planning.placement import Strategy, build_placement, group_placement, ring_placement, share_placement
from gemini_ft.planning.probability import (
    recovery_probability,
    recovery_probability_domains,
    recovery_probability_independent,
)

FOUR_SIGMA = 0.9999
RACKS_OF_FOUR = {slot: f"rack-{slot // 4}" for slot in range(32)}


def covers(estimate: Estimate, exact: float) -> bool:
    return estimate.low <= exact <= estimate.high and estimate.high - estimate.low < 0.03


@pytest.mark.parametrize("num_lost", [2, 3, 12])
@pytest.mark.parametrize("strategy", [Strategy.RING, Strategy.MIXED, Strategy.SHARE])
def test_uniform_failures_agree_with_the_exact_answer(strategy: Strategy, num_lost: int) -> None:
    placement = build_placement(strategy, 17, 2)
    estimate = estimate_recovery(placement, UniformFailures(num_lost), num_samples=40_000, confidence=FOUR_SIGMA)
    assert covers(estimate, float(recovery_probability(placement, num_lost)))


@pytest.mark.parametrize("p", [0.0, 0.001, 0.05, 0.6, 1.0])
def test_independent_failures_agree_with_the_exact_answer(p: float) -> None:
    placement = ring_placement(40, 3)
    estimate = estimate_recovery(placement, NodeFailures(p), num_samples=40_000, confidence=FOUR_SIGMA)
    assert covers(estimate, recovery_probability_independent(placement, p))


@pytest.mark.parametrize(("num_racks", "num_lost"), [(8, 3), (8, 4), (11, 3)])
def test_lost_racks_agree_with_the_exact_answer(num_racks: int, num_lost: int) -> None:
    placement = ring_placement(32, 3)
    racks = {slot: slot % num_racks for slot in placement}
    model = DomainFailures(racks, num_lost_domains=num_lost)
    estimate = estimate_recovery(placement, model, num_samples=40_000, confidence=FOUR_SIGMA)
    assert covers(estimate, float(recovery_probability_domains(placement, racks, num_lost)))


def test_racks_and_nodes_that_fail_independently_of_each_other() -> None:
    """Pairs within a rack: the rack survives, and of each of its pairs a member."""
    model = DomainFailures(RACKS_OF_FOUR, domain_loss_probability=0.02, node_loss_probability=0.05)
    estimate = estimate_recovery(group_placement(32, 2), model, num_samples=40_000, confidence=FOUR_SIGMA)
    assert covers(estimate, 0.98**8 * (1 - 0.05**2) ** 16)


def test_erasure_groups_are_sets_that_may_lose_some_members() -> None:
    code = ErasureCode(4, 2)
    estimate = estimate_recovery(
        code.groups(18), UniformFailures(5), num_samples=40_000, confidence=FOUR_SIGMA, num_losses=code.num_losses
    )
    assert covers(estimate, float(code.recovery_probability(18, 5)))


def test_sets_may_be_given_in_place_of_a_placement() -> None:
    sets = [{0, 1}, {2, 3, 4}]
    placement: Placement = {0: (0, 1), 1: (1, 0), 2: (2, 3, 4), 3: (3, 2, 4), 4: (4, 2, 3)}
    model = UniformFailures(3)
    assert estimate_recovery(sets, model, num_samples=999) == estimate_recovery(placement, model, num_samples=999)


@pytest.mark.parametrize(
    "model",
    [
        UniformFailures(3),
        NodeFailures(0.2),
        DomainFailures(RACKS_OF_FOUR, num_lost_domains=1, node_loss_probability=0.02),
    ],
    ids=["uniform", "nodes", "domains"],
)
def test_the_seed_decides(model: FailureModel) -> None:
    placement: Placement = {slot: (slot, (slot + 4) % 32) for slot in range(32)}
    first, again, other = (estimate_recovery(placement, model, num_samples=5_000, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("num_lost", [2, 3])
def test_all_choices_are_equally_likely(num_lost: int) -> None:
    lost = UniformFailures(num_lost).sample(range(5), 20_000, np.random.default_rng(5))
    seen = Counter(tuple(np.flatnonzero(column)) for column in lost.T)
    assert len(seen) == 10
    assert sum(len(choice) == num_lost for choice in seen) == 10
    # Chi-squared with nine degrees of freedom is above 33.7 once in ten thousand.
    assert sum((times - 2_000) ** 2 / 2_000 for times in seen.values()) < 33.7


def test_samples_beyond_one_batch_are_all_counted() -> None:
    placement = share_placement(10_001, 2)
    estimate = estimate_recovery(placement, UniformFailures(60), num_samples=2_000, confidence=FOUR_SIGMA)
    assert estimate.num_samples == 2_000
    exact = float(recovery_probability(placement, 60))
    assert estimate.low < exact < estimate.high


@dataclass(frozen=True)
class FatalSamples:
    """The first so many samples lose everything, the others nothing."""

    num_fatal: int

    def sample(self, slots: Sequence[int], num_samples: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        return np.tile(np.arange(num_samples) < self.num_fatal, (len(slots), 1))


@pytest.mark.parametrize(
    ("num_survived", "num_samples", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_is_wilsons(num_survived: int, num_samples: int, low: float, high: float) -> None:
    """The four examples of Newcombe, Statistics in Medicine 17 (1998), table I."""
    estimate = estimate_recovery([{0}], FatalSamples(num_samples - num_survived), num_samples=num_samples)
    assert estimate.probability == num_survived / num_samples
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)


def test_the_interval_covers_as_often_as_it_says() -> None:
    placement = group_placement(16, 2)
    exact = float(recovery_probability(placement, 3))
    estimates = [
        estimate_recovery(placement, UniformFailures(3), num_samples=400, seed=seed, confidence=0.9)
        for seed in range(400)
    ]
    num_covering = sum(estimate.low <= exact <= estimate.high for estimate in estimates)
    assert 336 <= num_covering <= 384


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (UniformFailures(5), "5 lost nodes is not possible"),
        (DomainFailures({0: "a"}, num_lost_domains=1), "slot 1 has no failure domain"),
        (DomainFailures(dict.fromkeys(range(4), "a"), num_lost_domains=2), "2 lost failure domains is not possible"),
    ],
    ids=["too-many-nodes", "no-domain", "too-many-domains"],
)
def test_failures_that_do_not_suit_the_placement_are_refused(model: FailureModel, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        estimate_recovery(ring_placement(4, 2), model)


def test_nonsense_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match="node_loss_probability is 2"):
        NodeFailures(2)
    with pytest.raises(ConfigurationError, match="either num_lost_domains or domain_loss_probability"):
        DomainFailures(RACKS_OF_FOUR)
    with pytest.raises(ConfigurationError, match="either num_lost_domains or domain_loss_probability"):
        DomainFailures(RACKS_OF_FOUR, num_lost_domains=1, domain_loss_probability=0.1)
    with pytest.raises(ConfigurationError, match="domain_loss_probability is -1"):
        DomainFailures(RACKS_OF_FOUR, domain_loss_probability=-1)
    with pytest.raises(ConfigurationError, match="num_samples is 0"):
        estimate_recovery(ring_placement(4, 2), UniformFailures(1), num_samples=0)
    with pytest.raises(ConfigurationError, match="confidence is 1"):
        estimate_recovery(ring_placement(4, 2), UniformFailures(1), confidence=1)
