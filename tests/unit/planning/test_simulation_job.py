"""One simulated run: the account is exact, and small traces cost what they cost on paper."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.placement import Strategy
from gemini_ft.planning.simulation.demo_report import MeasuredPhases, MeasuredRecovery
from gemini_ft.planning.simulation.job import simulate
from gemini_ft.planning.simulation.policies import Gemini, GeminiFT, HighFreq, Policy, Strawman
from gemini_ft.planning.simulation.results import Cause, RunResult, Tier
from gemini_ft.planning.simulation.run import run_seeds
from gemini_ft.planning.simulation.scenario import (
    CodedGroups,
    DomainFailures,
    Domains,
    ExponentialDelay,
    FailureKind,
    Machines,
    PersistentTier,
    PoissonFailures,
    Replicas,
    Scenario,
    TraceFailure,
    TraceFailures,
    UniformDelay,
    WeibullFailures,
)

DAY_US = 86_400 * 10**6
MEASURED = MeasuredRecovery(
    software=MeasuredPhases(detection_s=1, coordination_s=2, retrieval_s=3, warm_up_s=4),
    hardware=MeasuredPhases(detection_s=5, coordination_s=6, retrieval_s=7, warm_up_s=8),
    stall_s=2,
    re_replication_s=20,
)
Hit = tuple[float, FailureKind, tuple[int, ...]]


def scenario(policy: Policy, *hits: Hit, **values: object) -> Scenario:
    """Four machines, 62 s an iteration, 81 s to serialise a shard, 2.5 s to send one, 480 s to write a version."""
    failures = tuple(TraceFailure(time_s=time_s, failure=kind, machines=machines) for time_s, kind, machines in hits)
    base = Scenario(
        name="four",
        num_machines=4,
        duration_days=1,
        iteration_s=62,
        shard_bytes=75e9,
        network_bytes_per_s=30e9,
        serialization_bytes_per_s=75e9 / 81,
        detection_s=15,
        warm_up_s=253,
        failures=(TraceFailures(failures=failures),) if failures else (),
        machines=Machines(lead_time_s=300),
        persistent=PersistentTier(bandwidth_bytes_per_s=4 * 75e9 / 480, interval_s=3600),
        policy=policy,
    )
    return base.changed(**values)


def run(policy: Policy, *hits: Hit, **values: object) -> RunResult:
    return simulate(scenario(policy, *hits, **values), 0)


def wasted_s(result: RunResult) -> dict[Cause, float]:
    """Causes that have cost something, in seconds."""
    return {cause: wasted_us / 1e6 for cause, wasted_us in result.wasted_us.items() if wasted_us}


def tiers(result: RunResult) -> dict[Tier, int]:
    return {tier: count for tier, count in result.recoveries.items() if count}


def test_a_run_without_failures_is_all_useful_but_for_stalls() -> None:
    assert run(Gemini()).useful_us == run(Strawman()).useful_us == DAY_US
    result = run(HighFreq(interval_s=540))
    assert wasted_s(result) == {Cause.STALL: 86_400 / 540 * 81}


def test_a_software_failure_costs_gemini_what_the_paper_measured() -> None:
    # Version 15 of 62 s is complete one iteration later, at 992 s.
    result = run(Gemini(), (1000, "software", (2,)))
    assert wasted_s(result) == {
        Cause.LOST_WORK: 1000 - 15 * 62,
        Cause.DETECTION: 15,
        Cause.SERIALIZATION: 162,
        Cause.WARM_UP: 253,
    }
    assert tiers(result) == {Tier.LOCAL: 1}


def test_a_lost_machine_adds_the_replacement_and_a_fetch_from_a_peer() -> None:
    result = run(Gemini(), (1000, "hardware", (2,)))
    assert wasted_s(result) == {
        Cause.LOST_WORK: 70,
        Cause.DETECTION: 15,
        Cause.SERIALIZATION: 162,
        Cause.REPLACEMENT: 300,
        Cause.RETRIEVAL: 2.5,
        Cause.WARM_UP: 253,
    }
    assert tiers(result) == {Tier.PEER: 1}


def test_gemini_ft_serialises_nothing_and_orders_the_machine_at_once() -> None:
    result = run(GeminiFT(), (1000, "hardware", (2,)))
    assert wasted_s(result) == {
        Cause.LOST_WORK: 70,
        Cause.DETECTION: 15,
        Cause.REPLACEMENT: 300,
        Cause.RETRIEVAL: 2.5,
        Cause.WARM_UP: 253,
    }


def test_measured_phases_replace_the_scenarios() -> None:
    machines = Machines(num_standbys=1, lead_time_s=300)
    result = run(GeminiFT(measured=MEASURED), (1000, "software", (0,)), (2000, "hardware", (2,)), machines=machines)
    wasted = wasted_s(result)
    assert [wasted[cause] for cause in (Cause.DETECTION, Cause.COORDINATION, Cause.RETRIEVAL, Cause.WARM_UP)] == [
        1 + 5,
        2 + 6,
        3 + 7,
        4 + 8,
    ]
    # Each of the 62 s of an iteration ends with a stall of 2 s; the third piece of training is not over.
    pieces_s = (1000, 1000 - 10, 86_400 - 2000 - 26)
    assert wasted[Cause.STALL] == sum(2 * (piece_s // 62) + max(0, piece_s % 62 - 60) for piece_s in pieces_s)
    assert Cause.REPLACEMENT not in wasted


def test_transfers_take_at_least_what_their_bytes_take() -> None:
    result = run(GeminiFT(measured=MEASURED), (1000, "software", (0,)), network_bytes_per_s=75e9 / 30)
    assert wasted_s(result)[Cause.RETRIEVAL] == 30


def test_strawman_goes_back_to_the_last_write_that_had_ended() -> None:
    # The write that began at 10,800 s ends at 11,280 s.
    early, late = (run(Strawman(), (time_s, "software", (0,))) for time_s in (11_279, 11_281))
    assert wasted_s(early) == {
        Cause.LOST_WORK: 11_279,
        Cause.DETECTION: 15,
        Cause.RETRIEVAL: 480,
        Cause.WARM_UP: 253,
    }
    assert wasted_s(late)[Cause.LOST_WORK] == 481
    assert tiers(late) == {Tier.PERSISTENT: 1}


def test_a_failure_during_recovery_starts_it_again() -> None:
    # 100 s of serialisation and, in the second attempt, 200 s of warm-up are for nothing.
    result = run(Gemini(), (1000, "software", (0,)), (1115, "software", (1,)), (1492, "software", (2,)))
    assert wasted_s(result) == {
        Cause.LOST_WORK: 70,
        Cause.DETECTION: 3 * 15,
        Cause.SERIALIZATION: 100 + 2 * 162,
        Cause.WARM_UP: 200 + 253,
    }
    assert result.num_restarted_recoveries == 2
    assert tiers(result) == {Tier.LOCAL: 1}


def test_a_machine_that_was_ordered_stays_ordered() -> None:
    # It arrives 15 + 162 + 300 s after its loss, the serialisation of the second attempt ends 15 + 162 + 187 s after.
    result = run(Gemini(), (1000, "hardware", (0,)), (1187, "software", (1,)))
    assert wasted_s(result)[Cause.REPLACEMENT] == 10 + (477 - 187 - 177)


def test_a_slot_without_a_machine_does_not_fail() -> None:
    result = run(Gemini(), (1000, "hardware", (0,)), (1100, "hardware", (0,)), (1200, "software", (0,)))
    assert result.num_failures == {"software": 0, "hardware": 1}
    assert result.num_restarted_recoveries == 0


def test_losing_a_whole_replica_set_falls_back_to_the_persistent_tier() -> None:
    # At 3600 s an upload of version 57 begins, which ends at 4080 s.
    lost = run(GeminiFT(), (6000, "hardware", (0, 1)))
    assert tiers(lost) == {Tier.PERSISTENT: 1}
    assert lost.num_lost_sets == 1
    assert wasted_s(lost)[Cause.LOST_WORK] == 6000 - 57 * 62
    assert wasted_s(lost)[Cause.RETRIEVAL] == 480
    apart = run(GeminiFT(), (6000, "hardware", (0, 2)))
    assert tiers(apart) == {Tier.PEER: 1}
    assert apart.num_lost_sets == 0


def test_an_upload_of_a_version_that_lost_a_set_runs_on_and_does_not_count() -> None:
    # 100 s of it are done when the set is lost, and 315 s more when the retrieval begins; the rest, 65 s, is shared.
    result = run(GeminiFT(), (3700, "hardware", (0, 1)))
    assert wasted_s(result)[Cause.RETRIEVAL] == 480 + 65
    assert wasted_s(result)[Cause.LOST_WORK] == 3700


def test_transfers_of_others_slow_the_persistent_tier_down() -> None:
    persistent = PersistentTier(bandwidth_bytes_per_s=4 * 75e9 / 480, num_other_transfers=2)
    result = run(Strawman(), (1000, "software", (0,)), persistent=persistent)
    assert wasted_s(result)[Cause.RETRIEVAL] == 3 * 480


@pytest.mark.parametrize(
    ("policy", "back_at_s", "whole_after_s"),
    [
        # Whole with the first version after the restart, which is complete after two iterations.
        (Gemini(), 15 + 162 + 300 + 2.5 + 253, 2 * 62),
        # Whole 2.5 s after the retrieval, while processes warm up.
        (GeminiFT(), 15 + 300 + 2.5, 2.5),
    ],
    ids=["gemini", "gemini_ft"],
)
def test_a_second_loss_in_the_set_counts_until_redundancy_is_whole(
    policy: Policy, back_at_s: float, whole_after_s: float
) -> None:
    whole_at_s = 6000 + back_at_s + whole_after_s
    within = run(policy, (6000, "hardware", (0,)), (whole_at_s - 0.001, "hardware", (1,)))
    after = run(policy, (6000, "hardware", (0,)), (whole_at_s, "hardware", (1,)))
    assert (within.num_lost_sets, after.num_lost_sets) == (1, 0)
    assert Tier.PERSISTENT in tiers(within)
    assert Tier.PERSISTENT not in tiers(after)


def test_memory_is_empty_until_it_is_whole_again() -> None:
    back_at_s = 6000 + 15 + 162 + 300 + 480 + 253
    soon = run(Gemini(), (6000, "hardware", (0, 1)), (back_at_s + 123, "software", (3,)))
    later = run(Gemini(), (6000, "hardware", (0, 1)), (back_at_s + 124, "software", (3,)))
    assert tiers(soon) == {Tier.PERSISTENT: 2}
    assert tiers(later) == {Tier.PERSISTENT: 1, Tier.LOCAL: 1}


@pytest.mark.parametrize(
    ("redundancy", "slots", "num_lost_sets"),
    [
        (Replicas(strategy=Strategy.RING), (1, 2), 1),
        (Replicas(strategy=Strategy.MIXED), (1, 2), 0),
        (Replicas(num_replicas=1), (1, 2), 2),
        (Replicas(num_replicas=3), (1, 2), 0),
        (CodedGroups(), (0, 1), 0),
        (CodedGroups(), (0, 1, 2), 1),
    ],
    ids=["ring", "mixed", "one_copy", "three_copies", "code_holds", "code_breaks"],
)
def test_what_is_lost_follows_from_the_sets(
    redundancy: Replicas | CodedGroups, slots: tuple[int, ...], num_lost_sets: int
) -> None:
    result = run(GeminiFT(), (6000, "hardware", slots), num_machines=8, redundancy=redundancy)
    assert result.num_lost_sets == num_lost_sets


def test_standbys_are_taken_at_once_and_refilled_after_the_lead_time() -> None:
    hits: list[Hit] = [(time_s, "hardware", (0,)) for time_s in (1000, 1290, 1900)]
    machines = Machines(num_standbys=1, lead_time_s=300)
    result = run(GeminiFT(), *hits, machines=machines)
    # The second loss is known 25 - 15 s before the pool is full again; the third finds it full.
    assert wasted_s(result)[Cause.REPLACEMENT] == 10


def test_a_checkpoint_that_does_not_fit_into_the_idle_time_is_spread_over_iterations() -> None:
    # Two of 62 s for m = 3: versions every 124 s, complete 124 s later.
    result = run(Gemini(), (1000, "software", (0,)), idle_s=4.0, redundancy=Replicas(num_replicas=3))
    assert wasted_s(result)[Cause.LOST_WORK] == 1000 - 7 * 124
    assert wasted_s(result)[Cause.SERIALIZATION] == 3 * 81


def test_time_that_ends_within_a_recovery_is_accounted_for() -> None:
    result = run(Gemini(), (86_300, "software", (0,)))
    assert sum(result.wasted_us.values()) + result.useful_us == DAY_US
    assert wasted_s(result)[Cause.SERIALIZATION] == 85
    assert tiers(result) == {}


def test_an_interval_shorter_than_a_write_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match="policy strawman of scenario four: interval_s is 100"):
        run(Strawman(interval_s=100))


rates = st.floats(0, 100)
kinds: st.SearchStrategy[FailureKind] = st.sampled_from(["software", "hardware"])
processes = st.one_of(
    st.builds(PoissonFailures, failure=kinds, per_machine_per_day=rates),
    st.builds(
        WeibullFailures, failure=kinds, shape=st.floats(0.5, 4), mean_days=st.floats(0.05, 10), are_new=st.booleans()
    ),
    st.builds(DomainFailures, failure=kinds, per_domain_per_day=rates, share=st.floats(0.1, 1)),
)
policies: st.SearchStrategy[Policy] = st.sampled_from(
    [Strawman(), HighFreq(), Gemini(), GeminiFT(), GeminiFT(measured=MEASURED)]
)
delays = st.one_of(
    st.floats(0, 1000),
    st.builds(UniformDelay, low_s=st.just(240), high_s=st.just(420)),
    st.builds(ExponentialDelay, mean_s=st.just(300)),
)
redundancies = st.sampled_from(
    [Replicas(num_replicas=1), Replicas(), Replicas(num_replicas=3, strategy=Strategy.SHARE), CodedGroups()]
)


@settings(max_examples=150, deadline=None)
@given(
    policy=policies,
    failures=st.lists(processes, max_size=3),
    lead_time_s=delays,
    num_standbys=st.integers(0, 3),
    redundancy=redundancies,
    num_machines=st.integers(4, 17),
    are_spread=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_useful_and_wasted_time_are_all_time(
    policy: Policy,
    failures: list[PoissonFailures | WeibullFailures | DomainFailures],
    lead_time_s: float | UniformDelay | ExponentialDelay,
    num_standbys: int,
    redundancy: Replicas | CodedGroups,
    num_machines: int,
    are_spread: bool,
    seed: int,
) -> None:
    made = scenario(
        policy,
        num_machines=num_machines,
        failures=tuple(failures),
        machines=Machines(num_standbys=num_standbys, lead_time_s=lead_time_s),
        redundancy=redundancy,
        domains=Domains(num_machines=3, are_spread=are_spread),
    )
    result = simulate(made, seed)
    assert result.useful_us + sum(result.wasted_us.values()) == result.total_us == DAY_US
    assert result.useful_us >= 0
    assert min(result.wasted_us.values()) >= 0
    recovered = sum(result.recoveries.values())
    struck = sum(result.num_failures.values())
    # The last recovery may be under way when time is up.
    assert 0 <= struck - result.num_restarted_recoveries - recovered <= 1
    assert simulate(made, seed) == result


def test_results_depend_on_the_seed_only() -> None:
    made = scenario(
        GeminiFT(),
        failures=(
            PoissonFailures(failure="software", per_machine_per_day=5),
            WeibullFailures(failure="hardware", shape=0.7, mean_days=0.5),
        ),
        machines=Machines(num_standbys=1, lead_time_s=ExponentialDelay(mean_s=300)),
    )
    alone = run_seeds(made, 12, num_processes=1)
    finished: list[int] = []
    together = run_seeds(made, 12, num_processes=2, on_progress=finished.append)
    assert together == alone
    assert sum(finished) == 12
    assert [result.seed for result in alone] == list(range(12))
    assert len({result.useful_us for result in alone}) == 12
    assert run_seeds(made, 2, first_seed=10, num_processes=1) == alone[10:]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_seeds": 0}, "num_seeds is 0"),
        ({"num_processes": 0}, "num_processes is 0"),
        ({"first_seed": -1}, "seed is -1"),
    ],
)
def test_impossible_runs_are_refused_with_a_sentence(values: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        run_seeds(scenario(Gemini()), **values)
