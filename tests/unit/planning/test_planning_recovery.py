"""The recovery plan against brute force, and the sentences of its refusals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.contracts.messages import HeldVersion
from gemini_ft.planning.recovery import (
    Blocked,
    Geometry,
    Membership,
    NodeState,
    RecoveryPlan,
    Waiting,
    plan_recovery,
)

ALIVE, LOST = NodeState.ALIVE, NodeState.LOST
FOUR = Geometry(num_slots=4, num_ranks_per_slot=1, num_replicas=2)


def held(rank: int, step: int, *, generation: int = 1, digest: str = "") -> HeldVersion:
    return HeldVersion(rank=rank, step=step, generation=generation, shard_digest=digest or f"{rank}.{step}")


def members(*lost: str, standbys: tuple[str, ...] = ()) -> Membership:
    slots = dict(enumerate("abcd"))
    states = {node: LOST if node in lost else ALIVE for node in (*slots.values(), *standbys)}
    return Membership(slots, standbys, states)


def full_inventories(*steps: int) -> dict[str, list[HeldVersion]]:
    """What the placement {a,b} {c,d} leaves on each node."""
    groups = {"a": (0, 1), "b": (0, 1), "c": (2, 3), "d": (2, 3)}
    return {node: [held(rank, step) for rank in ranks for step in steps] for node, ranks in groups.items()}


def test_a_software_failure_restores_the_newest_step_from_the_own_nodes() -> None:
    plan = plan_recovery(FOUR, members(), full_inventories(6, 7), committed_step=6, restored_steps={1: None})
    assert isinstance(plan, RecoveryPlan)
    assert plan.restore_step == 7
    assert plan.slots == {0: "a", 1: "b", 2: "c", 3: "d"}
    assert plan.sources == {0: ("a", "b"), 1: ("b", "a"), 2: ("c", "d"), 3: ("d", "c")}


def test_a_lost_nodes_slot_goes_to_the_standby_which_fetches_from_the_peer() -> None:
    inventories = full_inventories(7)
    del inventories["c"]
    inventories["s"] = []
    plan = plan_recovery(FOUR, members("c", standbys=("s",)), inventories, committed_step=7, restored_steps={1: None})
    assert isinstance(plan, RecoveryPlan)
    assert plan.slots == {0: "a", 1: "b", 2: "s", 3: "d"}
    assert plan.sources[2] == ("d",)


def test_two_losses_in_different_groups_recover() -> None:
    inventories = full_inventories(7) | {"s": [], "t": []}
    del inventories["a"], inventories["d"]
    plan = plan_recovery(FOUR, members("a", "d", standbys=("s", "t")), inventories, committed_step=7, restored_steps={})
    assert isinstance(plan, RecoveryPlan)
    assert (plan.slots[0], plan.slots[3]) == ("s", "t")


def test_two_losses_in_one_group_block_the_job_and_name_ranks_and_nodes() -> None:
    inventories = full_inventories(7) | {"s": [], "t": []}
    del inventories["a"], inventories["b"]
    plan = plan_recovery(FOUR, members("a", "b", standbys=("s", "t")), inventories, committed_step=7, restored_steps={})
    assert isinstance(plan, Blocked)
    assert "step 7 was committed" in plan.sentence
    assert "shards of rank 0, 1" in plan.sentence
    assert "a (slot 0), b (slot 1)" in plan.sentence
    assert "restart_from_zero" in plan.sentence


def test_nothing_committed_and_nothing_complete_starts_from_zero() -> None:
    inventories = {"a": [held(0, 0)], "b": [], "c": [], "d": []}
    plan = plan_recovery(FOUR, members(), inventories, committed_step=None, restored_steps={1: None})
    assert plan == RecoveryPlan({0: "a", 1: "b", 2: "c", 3: "d"}, {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 2)}, None)


def test_a_decision_for_zero_uses_no_copy() -> None:
    plan = plan_recovery(
        FOUR, members(), full_inventories(7), committed_step=7, restored_steps={1: None}, from_zero=True
    )
    assert isinstance(plan, RecoveryPlan)
    assert plan.restore_step is None
    assert plan.sources == {}


def test_a_member_that_is_neither_lost_nor_heard_is_waited_for_by_name() -> None:
    inventories = full_inventories(7)
    del inventories["b"]
    plan = plan_recovery(FOUR, members(), inventories, committed_step=7, restored_steps={})
    assert plan == Waiting("the inventory of b (slot 1)")


def test_a_lost_slot_without_standby_waits_for_a_node() -> None:
    inventories = full_inventories(7)
    del inventories["b"]
    plan = plan_recovery(FOUR, members("b"), inventories, committed_step=7, restored_steps={})
    assert isinstance(plan, Waiting)
    assert plan.num_missing_nodes == 1
    assert "slot 1 (b is lost)" in plan.what


def test_a_standby_that_has_not_answered_is_waited_for() -> None:
    inventories = full_inventories(7)
    del inventories["b"]
    plan = plan_recovery(FOUR, members("b", standbys=("s",)), inventories, committed_step=7, restored_steps={})
    assert isinstance(plan, Waiting)
    assert plan.num_missing_nodes == 0
    assert "standby s" in plan.what


def test_copies_that_contradict_each_other_are_not_used_and_named() -> None:
    inventories = full_inventories(6, 7)
    inventories["b"] = [held(0, 7, digest="other"), held(0, 6), held(1, 6), held(1, 7)]
    plan = plan_recovery(FOUR, members(), inventories, committed_step=7, restored_steps={})
    assert isinstance(plan, RecoveryPlan)
    assert plan.restore_step == 6
    assert "step 7 of rank 0 is not used" in plan.notes[0]
    assert "step 7 was committed" in plan.notes[1]


def test_a_copy_that_was_rolled_back_is_never_used_again() -> None:
    """Generation 2 gave step 7 of generation 1 up; a copy of it that some node still has does not count."""
    inventories = full_inventories(5, 7)
    plan = plan_recovery(FOUR, members(), inventories, committed_step=5, restored_steps={1: None, 2: 5})
    assert isinstance(plan, RecoveryPlan)
    assert plan.restore_step == 5


steps = st.integers(0, 3)
copies = st.lists(
    st.builds(held, st.integers(0, 3), steps, generation=st.integers(1, 3), digest=st.sampled_from("xy")), max_size=12
)
worlds = st.tuples(
    st.lists(copies, min_size=5, max_size=5),
    st.sets(st.sampled_from("abcds")),
    st.dictionaries(st.integers(2, 4), st.none() | steps, max_size=2),
    st.none() | steps,
)


@given(worlds)
def test_the_plan_is_what_brute_force_finds(
    world: tuple[list[list[HeldVersion]], set[str], dict[int, int | None], int | None],
) -> None:
    held_by, lost, restored_steps, committed_step = world
    inventories = {node: node_copies for node, node_copies in zip("abcds", held_by, strict=True) if node not in lost}
    membership = members(*lost, standbys=("s",))
    plan = plan_recovery(FOUR, membership, inventories, committed_step=committed_step, restored_steps=restored_steps)

    def usable(copy: HeldVersion) -> bool:
        later = [step for generation, step in restored_steps.items() if generation > copy.generation]
        return all(step is not None and copy.step <= step for step in later)

    def nodes_with(rank: int, step: int) -> set[str]:
        found = [
            (node, copy.shard_digest)
            for node, node_copies in inventories.items()
            for copy in node_copies
            if (copy.rank, copy.step) == (rank, step) and usable(copy)
        ]
        return {node for node, _ in found} if len({digest for _, digest in found}) == 1 else set()

    complete = [step for step in range(4) if all(nodes_with(rank, step) for rank in range(4))]
    num_lost = len(lost - {"s"})
    if not complete and committed_step is not None:
        assert isinstance(plan, Blocked)
        return
    if num_lost > (0 if "s" in lost else 1):
        assert isinstance(plan, Waiting)
        return
    assert isinstance(plan, RecoveryPlan)
    assert sorted(plan.slots) == [0, 1, 2, 3]
    assert len(set(plan.slots.values())) == 4
    assert not lost & set(plan.slots.values())
    assert plan.restore_step == max(complete, default=None)
    if plan.restore_step is not None:
        for rank in range(4):
            sources = plan.sources[rank]
            assert set(sources) == nodes_with(rank, plan.restore_step)
            assert len(sources) == len(set(sources))
            if plan.slots[rank] in sources:
                assert sources[0] == plan.slots[rank]


def leaving(nodes: str, standbys: str = "", slots: str = "abcd") -> Membership:
    seated = dict(enumerate(slots))
    everybody = [*seated.values(), *standbys, *(node for node in nodes if node not in slots)]
    return Membership(seated, tuple(standbys), dict.fromkeys(everybody, ALIVE), tuple(nodes))


def test_a_leaving_nodes_slot_goes_to_the_standby_and_its_copies_are_sources() -> None:
    inventories = full_inventories(7) | {"s": []}
    plan = plan_recovery(FOUR, leaving("ab", "s"), inventories, committed_step=7, restored_steps={})
    assert isinstance(plan, RecoveryPlan)
    assert plan.slots == {0: "s", 1: "b", 2: "c", 3: "d"}
    assert plan.sources[0] == ("b", "a")
    assert plan.restore_step == 7


def test_a_leaving_node_stays_where_nobody_replaces_it_and_lost_nodes_come_first() -> None:
    inventories = full_inventories(7)
    plan = plan_recovery(FOUR, leaving("a"), inventories, committed_step=7, restored_steps={})
    assert isinstance(plan, RecoveryPlan)
    assert plan.slots[0] == "a"
    slots, states = dict(enumerate("abcd")), {"a": ALIVE, "b": ALIVE, "c": ALIVE, "d": LOST, "s": ALIVE}
    del inventories["d"]
    inventories["s"] = []
    plan = plan_recovery(
        FOUR, Membership(slots, ("s",), states, ("a",)), inventories, committed_step=7, restored_steps={}
    )
    assert isinstance(plan, RecoveryPlan)
    assert plan.slots == {0: "a", 1: "b", 2: "c", 3: "s"}


def test_the_copies_of_a_leaving_node_without_a_slot_are_waited_for_and_used() -> None:
    inventories = full_inventories(7)
    copies = inventories["a"]
    inventories["a"] = inventories["b"] = []
    membership = leaving("x")
    plan = plan_recovery(FOUR, membership, inventories, committed_step=7, restored_steps={})
    assert plan == Waiting("the inventory of x (leaving)")
    plan = plan_recovery(FOUR, membership, inventories | {"x": copies}, committed_step=7, restored_steps={})
    assert isinstance(plan, RecoveryPlan)
    assert plan.sources[0] == plan.sources[1] == ("x",)


def test_the_standby_in_another_rack_than_the_other_holder_is_preferred() -> None:
    inventories = full_inventories(7) | {"s": [], "t": []}
    del inventories["a"]
    racks = {"b": "1", "c": "2", "d": "1", "s": "1", "t": "2"}
    labels = {node: {"rack": rack} for node, rack in racks.items()}
    found = members("a", standbys=("s", "t"))
    membership = Membership(found.slots, found.standbys, found.states, (), labels, ("zone", "rack"))
    plan = plan_recovery(FOUR, membership, inventories, committed_step=7, restored_steps={})
    assert isinstance(plan, RecoveryPlan)
    assert plan.slots[0] == "t"
