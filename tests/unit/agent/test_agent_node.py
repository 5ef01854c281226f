"""The agent's decisions, one event at a time."""

from __future__ import annotations

import pytest

from gemini_ft.agent.actions import (
    AnswerParked,
    Beat,
    CloseClients,
    EndProcesses,
    EnsureLauncher,
    HoldGeneration,
    MarkClosed,
    OpenJob,
    OrderGeneration,
    Persist,
    RequestCheckpoint,
)
from gemini_ft.agent.node import Node
from gemini_ft.agent.pages import RankProgress
from gemini_ft.agent.records import JobRecord, ProcessIdentity
from gemini_ft.contracts.errors import (
    ConfigurationError,
    ConflictError,
    FencedError,
    JobClosedError,
    NotFoundError,
    NoVersionError,
    ProtocolError,
)
from gemini_ft.contracts.handshake import new_job_key
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.local_protocol import (
    Finished,
    LauncherHello,
    PublishStore,
    RankHello,
    Restored,
    WorkersExited,
)
from gemini_ft.contracts.messages import (
    Address,
    Assign,
    CheckpointNow,
    CloseJob,
    Fence,
    Heartbeat,
    Hold,
    JobOutcome,
    JobSpec,
    LauncherKind,
    RankState,
    StartJob,
)

ME, PEER, JOB = "node-me", "node-peer", "job-1"
ADDRESS = Address(host="127.0.0.1", port=4000)
KEY = new_job_key()
MAX_STARTS = 2


def process(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid=pid, started=f"boot/{pid}")


def start_job(job_id: str = JOB, key: str = KEY, launcher: LauncherKind = LauncherKind.MANAGED) -> StartJob:
    spec = JobSpec(name="test", command=("train.py",), num_nodes=2, num_ranks_per_node=2, launcher=launcher)
    return StartJob(job_id=job_id, job_key=key, spec=spec)


def assign(generation: int, me: int | None = 1, restore_step: int | None = None) -> Assign:
    slots = {0: PEER, 1: ME} if me == 1 else {0: ME, 1: PEER} if me == 0 else {0: PEER, 1: "node-third"}
    return Assign(
        job_id=JOB,
        generation=generation,
        slots=slots,
        addresses={ME: ADDRESS, PEER: ADDRESS},
        placement={0: (0, 1), 1: (1, 0)},
        restore_step=restore_step,
    )


def fence(generation: int, job_id: str = JOB) -> Fence:
    return Fence(job_id=job_id, generation=generation)


def hello(rank: int, generation: int, world_size: int = 4, job_id: str = JOB) -> RankHello:
    return RankHello(request_id=1, generation=generation, rank=rank, job_id=job_id, pid=1, world_size=world_size)


def launcher_hello(generation: int = 0, num_local_ranks: int = 2) -> LauncherHello:
    return LauncherHello(request_id=1, job_id=JOB, pid=1, num_local_ranks=num_local_ranks, generation=generation)


def fresh() -> Node:
    return Node(new_incarnation(), ME, MAX_STARTS)


def at_generation(generation: int, restore_step: int | None = None) -> Node:
    """A node that runs ranks 2 and 3 (processes 12 and 13) of `generation` under launcher 10."""
    node = fresh()
    node.start_job(start_job())
    node.launcher_hello(launcher_hello(), process(10), {})
    move_to(node, generation, restore_step)
    return node


def move_to(node: Node, generation: int, restore_step: int | None = None) -> None:
    node.fence(fence(generation))
    node.fence_enforced(generation)
    node.assign(assign(generation, restore_step=restore_step))
    node.assignment_taken(generation)
    for rank in (2, 3):
        message = hello(rank, generation)
        node.rank_hello(message, process(10 * generation + rank))
        node.rank_opened(message, process(10 * generation + rank), f"/page/{generation}/{rank}")


def heartbeat(node: Node) -> Heartbeat:
    beat = node.heartbeat(1, ADDRESS, 1.0, True, 5, 9)
    assert beat is not None
    return beat


def test_without_identity_there_is_no_heartbeat() -> None:
    node = Node(new_incarnation(), None, MAX_STARTS)
    assert node.heartbeat(1, ADDRESS, 1.0, False, 0, 0) is None
    node.registered(ME)
    assert heartbeat(node).node_id == ME


def test_another_identity_is_taken_only_without_a_job() -> None:
    node = fresh()
    node.registered("node-other")
    node.start_job(start_job())
    with pytest.raises(ConflictError, match="another cluster"):
        node.registered(ME)


def test_starting_a_job_twice_asks_for_the_same_again() -> None:
    node = fresh()
    assert (
        node.start_job(start_job()) == node.start_job(start_job()) == (OpenJob(), Persist(), EnsureLauncher(), Beat())
    )
    assert (heartbeat(node).job_id, heartbeat(node).hang_timeout_s) == (JOB, 300)


def test_a_second_job_and_another_key_are_refused() -> None:
    node = fresh()
    node.start_job(start_job())
    with pytest.raises(ConflictError, match="close the former first"):
        node.start_job(start_job("job-2"))
    with pytest.raises(ConflictError, match="another key"):
        node.start_job(start_job(key=new_job_key()))


@pytest.mark.parametrize("order", [fence(1), assign(1)])
def test_orders_for_an_unknown_job_are_refused(order: Fence | Assign) -> None:
    node = fresh()
    with pytest.raises(NotFoundError, match="start it there first"):
        node.fence(order) if isinstance(order, Fence) else node.assign(order)


def test_a_fence_persists_then_shows_then_kills() -> None:
    node = at_generation(1)
    assert node.fence(fence(2)) == (
        Persist(),
        OrderGeneration(2),
        AnswerParked(),
        CloseClients(2),
        EndProcesses((process(12), process(13))),
    )
    assert node.record().generation == 2
    assert [rank.rank for rank in node.record().ranks] == [2, 3], "ranks are written down until they are dead"
    node.fence_enforced(2)
    assert heartbeat(node).ranks == ()
    assert heartbeat(node).ordered_generation == 2
    assert heartbeat(node).assigned_generation == 1


def test_an_old_fence_and_an_old_plan_are_refused_and_change_nothing() -> None:
    node = at_generation(3)
    before = node.record()
    with pytest.raises(FencedError):
        node.fence(fence(2))
    with pytest.raises(FencedError):
        node.assign(assign(2))
    assert node.fence_enforced(2) == node.assignment_taken(2) == ()
    assert node.record() == before


def test_a_fence_that_comes_after_its_own_assignment_leaves_the_ranks_alone() -> None:
    node = at_generation(1)
    with pytest.raises(ConflictError, match="too late"):
        node.fence(fence(1))


def test_a_plan_needs_its_fence() -> None:
    node = at_generation(1)
    assert node.needs_fence(assign(2))
    with pytest.raises(ConflictError, match="fence it first"):
        node.assign(assign(2))


def test_a_plan_may_be_repeated_with_new_addresses_but_not_changed() -> None:
    node = at_generation(1)
    moved = assign(1).model_copy(update={"addresses": {ME: Address(host="127.0.0.1", port=4001)}})
    assert node.assign(moved) == (Persist(),)
    assert node.record().assignment == moved
    assert heartbeat(node).assigned_generation == 1, "the plan that was taken counts meanwhile"
    with pytest.raises(ConflictError, match="another plan"):
        node.assign(assign(1, restore_step=7))


def test_an_assignment_is_given_only_when_checkpoint_memory_has_taken_it() -> None:
    node = fresh()
    node.start_job(start_job())
    node.fence(fence(1))
    node.assign(assign(1))
    assert node.next_assignment(0) is None
    assert node.assignment_taken(1) == (EnsureLauncher(), AnswerParked(), Beat())
    assert node.next_assignment(0) == (1, 1, 2)
    assert node.next_assignment(1) is None
    node.fence(fence(2))
    assert node.next_assignment(0) is None, "the plan of a fenced generation is void"


def test_a_standby_stays_parked() -> None:
    node = fresh()
    node.start_job(start_job())
    node.fence(fence(1))
    node.assign(assign(1, me=None))
    node.assignment_taken(1)
    assert node.next_assignment(0) is None
    assert heartbeat(node).slot is None
    assert heartbeat(node).assigned_generation == 1


def test_a_new_launcher_does_not_join_a_generation_whose_ranks_have_ended() -> None:
    node = at_generation(1)
    node.process_ended(process(12), -9)
    assert node.next_assignment(0) is None
    move_to(node, 2)
    assert node.next_assignment(0) == (2, 1, 2)


@pytest.mark.parametrize(
    ("message", "kind", "sentence"),
    [
        (hello(2, 1, job_id="job-2"), NotFoundError, "check GEMINI_FT_JOB"),
        (hello(2, 0), FencedError, "generation 0"),
        (hello(2, 2), ProtocolError, "was not assigned"),
        (hello(2, 1, world_size=2), ConfigurationError, "2 nodes of 2 ranks"),
        (hello(0, 1), ConflictError, "is slot 1"),
    ],
)
def test_a_rank_that_does_not_belong_is_refused(message: RankHello, kind: type[Exception], sentence: str) -> None:
    node = at_generation(1)
    with pytest.raises(kind, match=sentence):
        node.rank_hello(message, process(99))


def test_a_second_process_cannot_be_the_same_rank() -> None:
    node = at_generation(1)
    with pytest.raises(ConflictError, match="process 12 is rank 2"):
        node.rank_hello(hello(2, 1), process(99))
    node.rank_hello(hello(2, 1), process(12))


def test_a_launcher_that_does_not_belong_is_refused() -> None:
    node = at_generation(1)
    with pytest.raises(ConfigurationError, match="--nproc-per-node 2"):
        node.launcher_hello(launcher_hello(num_local_ranks=3), process(10), {})
    with pytest.raises(ConflictError, match="launcher 10 already serves"):
        node.launcher_hello(launcher_hello(), process(99), {})
    node.launcher_hello(launcher_hello(num_local_ranks=0), process(10), {})


def test_ranks_of_an_old_generation_that_a_launcher_names_are_only_ended() -> None:
    node = at_generation(2)
    before = node.record()
    actions = node.workers_started(1, {2: process(92), 3: process(93)})
    assert EndProcesses((process(92), process(93))) in actions
    assert node.record() == before


def test_the_process_that_said_hello_stays_the_rank() -> None:
    node = at_generation(1)
    node.workers_started(1, {2: process(92), 3: process(93)})
    assert [rank.process for rank in node.record().ranks] == [process(12), process(13)]


def test_the_end_of_a_rank_is_told_at_once_and_its_code_when_known() -> None:
    node = at_generation(1)
    assert Beat() in node.process_ended(process(12), None)
    (ended, running) = heartbeat(node).ranks
    assert (ended.state, ended.exit_code) == (RankState.EXITED, None)
    assert running.state is RankState.RUNNING
    node.workers_exited(WorkersExited(request_id=1, generation=1, exit_codes={2: 3}, detail="boom"))
    assert (heartbeat(node).ranks[0].exit_code, heartbeat(node).ranks[0].detail) == (3, "boom")


def test_exit_codes_of_an_old_generation_change_nothing() -> None:
    node = at_generation(2)
    before = heartbeat(node)
    assert node.workers_exited(WorkersExited(request_id=1, generation=1, exit_codes={2: 1, 3: 1})) == ()
    assert node.process_ended(process(12), -9) == ()
    assert heartbeat(node) == before


def test_a_dead_launcher_is_started_again_a_bounded_number_of_times_a_generation() -> None:
    node = fresh()
    node.start_job(start_job())
    for pid in range(MAX_STARTS):
        assert node.wants_launcher
        node.launcher_started(process(pid))
        assert not node.wants_launcher
        assert EnsureLauncher() in node.process_ended(process(pid), 1)
    assert not node.wants_launcher
    node.fence(fence(1))
    assert node.wants_launcher


def test_an_external_launcher_is_never_started() -> None:
    node = fresh()
    node.start_job(start_job(launcher=LauncherKind.EXTERNAL))
    assert not node.wants_launcher


def test_no_launcher_is_started_after_the_ranks_have_finished() -> None:
    node = at_generation(1)
    node.node_finished(Finished(request_id=1, generation=1))
    node.process_ended(process(10), 0)
    assert heartbeat(node).finished
    assert not node.wants_launcher
    with pytest.raises(FencedError):
        node.node_finished(Finished(request_id=1, generation=0))


def test_a_launcher_that_lost_its_connection_is_not_gone() -> None:
    node = at_generation(1)
    assert heartbeat(node).launcher_connected
    node.launcher_gone(process(10))
    assert not heartbeat(node).launcher_connected
    assert heartbeat(node).launcher_pid == 10
    assert not node.wants_launcher


def test_restore_is_recorded_and_its_failure_asks_for_a_recovery() -> None:
    node = at_generation(2, restore_step=7)
    node.restore_answered(2, 2, "peer")
    message = Restored(request_id=1, generation=2, rank=2, step=7, phases_s={"load": 0.1})
    assert node.restored(message) == (Beat(),)
    assert node.restore_failed(3, 2, NoVersionError("none left").to_wire()) == (Beat(),)
    good, bad = heartbeat(node).ranks
    assert (good.restored, good.restored_step, good.restore_source, good.phases_s) == (True, 7, "peer", {"load": 0.1})
    assert bad.restore_error is not None
    assert bad.restore_error["code"] == "no_version"
    with pytest.raises(FencedError):
        node.restored(message.model_copy(update={"generation": 1}))


def test_the_first_finished_step_is_worth_a_heartbeat_and_progress_never_falls() -> None:
    node = at_generation(1)
    assert node.awaits_first_step
    assert node.observe(2, 1, RankProgress(finished_step=4, committed_step=3)) == (Beat(),)
    assert node.observe(2, 1, RankProgress(finished_step=5, committed_step=4)) == ()
    # A rank that came back after the agent's death has a fresh page.
    assert node.observe(2, 1, RankProgress()) == ()
    assert heartbeat(node).ranks[0].finished_step == 5
    assert node.record().committed_step == 4
    node.observe(3, 1, RankProgress(finished_step=4))
    assert not node.awaits_first_step
    assert node.observe(2, 0, RankProgress(finished_step=9)) == ()


def test_only_the_newest_generation_is_held_or_asked_for_a_checkpoint() -> None:
    node = at_generation(2)
    order, request = Hold(job_id=JOB, generation=2), CheckpointNow(job_id=JOB, generation=2, request=3)
    assert node.hold(order) == node.hold(order) == (HoldGeneration(2),)
    assert node.checkpoint_now(request) == (RequestCheckpoint(3),)
    for generation, refusal in ((1, FencedError), (3, ConflictError)):
        with pytest.raises(refusal, match="the order to hold"):
            node.hold(order.model_copy(update={"generation": generation}))
        with pytest.raises(refusal, match="the request for a checkpoint"):
            node.checkpoint_now(request.model_copy(update={"generation": generation}))
    with pytest.raises(NotFoundError):
        node.hold(order.model_copy(update={"job_id": "job-2"}))


def test_a_held_rank_is_worth_a_heartbeat() -> None:
    node = at_generation(1)
    node.observe(2, 1, RankProgress(finished_step=4, committed_step=3))
    held = RankProgress(finished_step=5, committed_step=5, held_step=5)
    assert node.observe(2, 1, held) == (Beat(),)
    assert node.observe(2, 1, held) == node.observe(2, 1, RankProgress()) == ()
    assert [rank.held_step for rank in heartbeat(node).ranks] == [5, None]
    move_to(node, 2, restore_step=5)
    assert [rank.held_step for rank in heartbeat(node).ranks] == [None, None]


def test_a_plan_resets_the_committed_step_to_what_it_restores() -> None:
    node = at_generation(1)
    node.observe(2, 1, RankProgress(committed_step=9))
    move_to(node, 2, restore_step=8)
    assert node.record().committed_step == 8


def test_only_slot_0_has_the_store_and_a_fence_forgets_it() -> None:
    node = at_generation(1)
    store = PublishStore(request_id=1, generation=1, host="127.0.0.1", port=5)
    with pytest.raises(ConflictError, match="not slot 0"):
        node.store_published(store)
    other = fresh()
    other.start_job(start_job())
    other.fence(fence(1))
    other.assign(assign(1, me=0))
    other.assignment_taken(1)
    other.store_published(store)
    assert other.record().store == Address(host="127.0.0.1", port=5)
    with pytest.raises(ProtocolError):
        other.store_published(store.model_copy(update={"port": 70000}))
    other.fence(fence(2))
    assert other.record().store is None


def test_a_closed_job_answers_everybody_that_it_has_ended() -> None:
    node = at_generation(1)
    order = CloseJob(job_id=JOB, outcome=JobOutcome.SUCCEEDED)
    assert node.close_job(order) == (MarkClosed(), AnswerParked())
    for ask in (
        lambda: node.next_assignment(0),
        lambda: node.rank_hello(hello(2, 1), process(12)),
        lambda: node.fence(fence(2)),
        lambda: node.start_job(start_job()),
    ):
        with pytest.raises(JobClosedError) as caught:
            ask()
        assert caught.value.outcome == "succeeded"
    assert node.job_closed() == (Beat(),)
    with pytest.raises(JobClosedError):
        node.launcher_hello(launcher_hello(), process(10), {})
    assert node.close_job(order) == node.job_closed() == ()
    assert heartbeat(node).job_id is None
    node.start_job(start_job("job-2"))


def test_closing_another_job_closes_nothing() -> None:
    node = at_generation(1)
    assert node.close_job(CloseJob(job_id="job-2", outcome=JobOutcome.STOPPED)) == ()
    assert heartbeat(node).job_id == JOB


def test_a_restarted_agent_continues_where_its_former_life_ended() -> None:
    former = at_generation(1, restore_step=None)
    former.observe(2, 1, RankProgress(committed_step=3))
    former.process_ended(process(13), 0)
    record = JobRecord.model_validate_json(former.record().model_dump_json())
    node = fresh()
    actions = node.adopt(record, is_closed=False)
    assert actions[0] == OrderGeneration(1)
    assert actions[-1] == EndProcesses(())
    assert node.record() == record
    assert heartbeat(node).assigned_generation == 0, "checkpoint memory has to take the plan again"
    node.assignment_taken(1)
    node.rank_hello(hello(2, 1), process(12))
    assert heartbeat(node).ranks[1].exit_code == 0


def test_a_restarted_agent_ends_the_ranks_that_its_former_life_had_fenced() -> None:
    former = at_generation(1)
    former.fence(fence(2))
    node = fresh()
    actions = node.adopt(former.record(), is_closed=False)
    assert EndProcesses((process(12), process(13))) in actions
    with pytest.raises(FencedError):
        node.rank_hello(hello(2, 1), process(12))


def test_a_restarted_agent_starts_no_launcher_for_a_job_that_was_closing() -> None:
    former = at_generation(1)
    former.process_ended(process(10), 0)
    node = fresh()
    node.adopt(former.record(), is_closed=True)
    assert not node.wants_launcher
    assert node.close_job(CloseJob(job_id=JOB, outcome=JobOutcome.FAILED)) != ()
