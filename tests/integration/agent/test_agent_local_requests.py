"""An agent, and processes that play its launcher and its ranks on the real socket."""

from __future__ import annotations

import asyncio
import mmap
import signal
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest
from agent_harness import JOB, NODE, Client, RunningAgent, assign, eventually, start_job

from gemini_ft.agent.rank_watch import identify
from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, JobPage
from gemini_ft.contracts.errors import from_wire
from gemini_ft.contracts.frames import encode_frame
from gemini_ft.contracts.local_protocol import (
    AgentMessage,
    AssignmentReply,
    Failed,
    Finished,
    LauncherHello,
    LauncherWelcome,
    NextAssignment,
    NotYet,
    Ok,
    PublishStore,
    RankHello,
    RankWelcome,
    Reserve,
    Reserved,
    Restore,
    Restored,
    RestoreReply,
    Staged,
    StoreAddress,
    StoreAddressReply,
    WorkersExited,
    WorkersStarted,
)
from gemini_ft.contracts.messages import CloseJob, Fence, Inventory, JobOutcome, OrderDone, OrderRefused, RankState

StartClient = Callable[[Path], Awaitable[Client]]


def rank_hello(generation: int, rank: int = 0, world_size: int = 1, job_id: str = JOB) -> RankHello:
    return RankHello(request_id=1, generation=generation, rank=rank, job_id=job_id, pid=1, world_size=world_size)


def launcher_hello(client: Client, job_id: str = JOB, num_local_ranks: int = 1) -> LauncherHello:
    return LauncherHello(request_id=1, job_id=job_id, pid=client.pid, num_local_ranks=num_local_ranks, generation=0)


def next_assignment(after_generation: int, timeout_s: float = 10) -> NextAssignment:
    return NextAssignment(request_id=2, after_generation=after_generation, timeout_s=timeout_s)


def error_code(reply: AgentMessage) -> str:
    assert isinstance(reply, Failed), reply
    return from_wire(reply.error).code


async def begin(agent: RunningAgent, generation: int = 1) -> None:
    """Bring the job to a generation that starts from zero."""
    assert isinstance(await agent.order(start_job()), OrderDone)
    assert isinstance(await agent.order(Fence(job_id=JOB, generation=generation)), Inventory)
    assert isinstance(await agent.order(assign(generation)), OrderDone)


def read_job_page(path: str) -> tuple[int, bool]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), CONTROL_PAGE_BYTES, prot=mmap.PROT_READ) as mapping:
        view = memoryview(mapping)
        page = JobPage(view)
        found = page.ordered_generation, page.closed
        page.release()
        view.release()
        return found


def exist(*paths: str) -> bool:
    return any(Path(path).exists() for path in paths)


async def test_closing_a_job_ends_processes_that_do_not_end_by_themselves(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await begin(agent)
        launcher, rank = await start_client(agent.socket_path), await start_client(agent.socket_path)
        await launcher.ask(launcher_hello(launcher))
        await rank.ask(rank_hello(1))
        rank.signal(signal.SIGSTOP)
        assert isinstance(await agent.order(CloseJob(job_id=JOB, outcome=JobOutcome.STOPPED)), OrderDone)
        assert await rank.ended() == await launcher.ended() == -signal.SIGKILL
        late = await start_client(agent.socket_path)
        assert error_code(await late.ask(launcher_hello(late))) == "job_closed"


async def test_a_job_from_the_first_hello_to_its_end(run_agent, start_client: StartClient) -> None:
    async with run_agent(close_grace=timedelta(seconds=10)) as agent:
        assert isinstance(await agent.order(start_job()), OrderDone)
        launcher = await start_client(agent.socket_path)
        welcome = await launcher.ask(launcher_hello(launcher))
        assert isinstance(welcome, LauncherWelcome)
        assert welcome.node_id == NODE
        launcher.tell(next_assignment(0))

        inventory = await agent.order(Fence(job_id=JOB, generation=1))
        assert isinstance(inventory, Inventory)
        assert (inventory.held, inventory.committed_step) == ((), None)
        assert read_job_page(welcome.job_page) == (1, False)
        await agent.order(assign(1))
        reply = await launcher.read()
        assert isinstance(reply, AssignmentReply)
        assert (reply.generation, reply.slot, reply.num_slots, reply.host) == (1, 0, 1, "127.0.0.1")

        assert isinstance(await launcher.ask(PublishStore(request_id=3, generation=1, host="127.0.0.1", port=4321)), Ok)
        address = await launcher.ask(StoreAddress(request_id=4, generation=1, timeout_s=5))
        assert isinstance(address, StoreAddressReply)
        assert address.port == 4321

        rank = await start_client(agent.socket_path)
        await launcher.ask(WorkersStarted(request_id=5, generation=1, pids={0: rank.pid}))
        assert agent.heartbeat().ranks[0].pid == rank.pid
        assert isinstance(await rank.ask(rank_hello(1)), RankWelcome)
        reserve = Reserve(request_id=2, generation=1, rank=0, data_bytes=100_000, manifest_bytes=1000, timeout_s=10)
        reserved = await rank.ask(reserve)
        assert isinstance(reserved, Reserved)
        assert exist(*reserved.buffers)
        restored = await rank.ask(Restore(request_id=3, generation=1, rank=0, timeout_s=10))
        assert isinstance(restored, RestoreReply)
        assert (restored.step, restored.source) == (None, "zero")
        await rank.ask(Restored(request_id=4, generation=1, rank=0, step=None, phases_s={"load": 0.5}))
        status = agent.heartbeat().ranks[0]
        assert (status.restored, status.restore_source, status.phases_s) == (True, "zero", {"load": 0.5})

        rank.exit(0)
        await rank.ended()
        await eventually("the rank's end", lambda: agent.heartbeat().ranks[0].state is RankState.EXITED)
        await launcher.ask(WorkersExited(request_id=6, generation=1, exit_codes={0: 0}))
        await launcher.ask(Finished(request_id=7, generation=1))
        assert agent.heartbeat().finished
        assert agent.heartbeat().ranks[0].exit_code == 0

        launcher.tell(next_assignment(1))
        closing = asyncio.create_task(agent.order(CloseJob(job_id=JOB, outcome=JobOutcome.SUCCEEDED)))
        assert error_code(await launcher.read()) == "job_closed"
        launcher.exit(0)
        assert isinstance(await closing, OrderDone)
        assert await launcher.ended() == 0, "it had time to end by itself"
        assert not exist(*reserved.buffers, welcome.job_page)
        assert agent.heartbeat().job_id is None
        assert isinstance(await agent.order(start_job("job-2")), OrderDone)


async def test_a_fence_kills_a_stopped_rank_and_refuses_its_generation(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await begin(agent)
        stopped, late = await start_client(agent.socket_path), await start_client(agent.socket_path)
        assert isinstance(await stopped.ask(rank_hello(1)), RankWelcome)
        stopped.signal(signal.SIGSTOP)
        assert isinstance(await agent.order(Fence(job_id=JOB, generation=2)), Inventory)
        assert await stopped.ended() == -signal.SIGKILL
        assert agent.heartbeat().ranks == ()
        assert error_code(await late.ask(rank_hello(1))) == "fenced"


async def test_an_order_of_an_old_generation_is_refused(run_agent) -> None:
    async with run_agent() as agent:
        await begin(agent, generation=3)
        for order in (Fence(job_id=JOB, generation=2), assign(2)):
            refused = await agent.order(order)
            assert isinstance(refused, OrderRefused)
            assert refused.error["code"] == "fenced"
        assert agent.heartbeat().ordered_generation == 3


async def test_an_assignment_that_came_before_its_fence_fences_first(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await begin(agent)
        rank = await start_client(agent.socket_path)
        await rank.ask(rank_hello(1))
        assert isinstance(await agent.order(assign(2)), OrderDone)
        assert await rank.ended() == -signal.SIGKILL
        assert agent.heartbeat().assigned_generation == 2


async def test_an_order_that_is_repeated_at_once_is_carried_out_once(run_agent) -> None:
    async with run_agent() as agent:
        await agent.order(start_job())
        fence = Fence(job_id=JOB, generation=1)
        first, second = await asyncio.gather(agent.order(fence), agent.order(fence))
        assert first is second
        assert isinstance(await agent.order(fence), Inventory)


async def test_a_recovery_while_the_launcher_waits_for_the_store_sets_it_free(
    run_agent, start_client: StartClient
) -> None:
    async with run_agent() as agent:
        await begin(agent)
        launcher = await start_client(agent.socket_path)
        await launcher.ask(launcher_hello(launcher))
        launcher.tell(StoreAddress(request_id=9, generation=1, timeout_s=600))
        await agent.order(Fence(job_id=JOB, generation=2))
        assert isinstance(await launcher.read(), NotYet)


async def test_a_rank_that_died_is_reported_with_its_signal_without_its_launcher(
    run_agent, start_client: StartClient
) -> None:
    async with run_agent() as agent:
        await begin(agent)
        rank = await start_client(agent.socket_path)
        await rank.ask(rank_hello(1))
        rank.signal(signal.SIGSEGV)
        await rank.ended()
        await eventually("the rank's end", lambda: agent.heartbeat().ranks[0].state is RankState.EXITED)
        assert agent.heartbeat().ranks[0].exit_code == -signal.SIGSEGV


async def test_hellos_that_are_not_welcome_get_a_sentence(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        client = await start_client(agent.socket_path)
        assert error_code(await client.ask(rank_hello(1))) == "not_found"
        await begin(agent)
        assert error_code(await client.ask(rank_hello(1, job_id="job-9"))) == "not_found"
        assert error_code(await client.ask(rank_hello(1, world_size=2))) == "configuration"
        assert error_code(await client.ask(rank_hello(1, rank=1))) == "conflict"
        assert error_code(await client.ask(launcher_hello(client, num_local_ranks=8))) == "configuration"
        assert isinstance(await client.ask(launcher_hello(client)), LauncherWelcome)
        second = await start_client(agent.socket_path)
        assert error_code(await second.ask(launcher_hello(second))) == "conflict"


async def test_a_rank_that_comes_back_gets_a_fresh_page(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await begin(agent)
        rank = await start_client(agent.socket_path)
        first = await rank.ask(rank_hello(1))
        await rank.connect()
        second = await rank.ask(rank_hello(1))
        assert isinstance(first, RankWelcome)
        assert isinstance(second, RankWelcome)
        assert first.rank_page != second.rank_page
        assert first.job_page == second.job_page
        assert agent.heartbeat().ranks[0].state is RankState.RUNNING


async def test_a_parked_request_is_answered_in_time(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await agent.order(start_job())
        launcher = await start_client(agent.socket_path)
        await launcher.ask(launcher_hello(launcher))
        assert isinstance(await launcher.ask(next_assignment(0, timeout_s=0.02)), NotYet)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: agent\r\nAccept: */*\r\n\r\n",
        encode_frame(NotYet(request_id=1)),
        encode_frame(next_assignment(0)),
        encode_frame(Staged(generation=1, rank=0, step=1, num_chunks=1)),
        encode_frame(rank_hello(1), payload_bytes=4) + b"data",
        encode_frame(next_assignment(0))[:-1] + b"X",
    ],
    ids=["garbage", "agent's own message", "no hello", "no rank", "payload", "flipped byte"],
)
async def test_what_is_malformed_or_out_of_order_closes_only_its_connection(
    run_agent, start_client: StartClient, data: bytes
) -> None:
    async with run_agent() as agent:
        await begin(agent)
        bad, good = await start_client(agent.socket_path), await start_client(agent.socket_path)
        bad.send_raw(data)
        assert await bad.is_cut_off()
        assert isinstance(await good.ask(rank_hello(1)), RankWelcome)


@pytest.mark.parametrize("timeout_s", [float("inf"), -1.0, 1e9])
async def test_an_unbounded_wait_is_refused(run_agent, start_client: StartClient, timeout_s: float) -> None:
    async with run_agent() as agent:
        await begin(agent)
        launcher = await start_client(agent.socket_path)
        await launcher.ask(launcher_hello(launcher))
        message = next_assignment(0).model_dump_json().replace("10.0", str(timeout_s).replace("inf", "Infinity"))
        launcher._write(message)
        assert await launcher.is_cut_off()


async def test_too_many_parked_requests_close_the_connection(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await agent.order(start_job())
        launcher = await start_client(agent.socket_path)
        await launcher.ask(launcher_hello(launcher))
        for _ in range(17):
            launcher.tell(next_assignment(0))
        assert await launcher.is_cut_off()


async def test_a_message_for_another_rank_closes_the_connection(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await begin(agent)
        rank = await start_client(agent.socket_path)
        await rank.ask(rank_hello(1))
        rank.tell(Staged(generation=1, rank=1, step=1, num_chunks=1))
        assert await rank.is_cut_off()


async def test_only_this_user_can_reach_the_socket(run_agent) -> None:
    async with run_agent() as agent:
        assert agent.socket_path.stat().st_mode & 0o777 == 0o600
        assert agent.socket_path.parent.stat().st_mode & 0o777 == 0o700


async def test_a_restarted_agent_takes_its_job_up_again(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await begin(agent)
        launcher, rank = await start_client(agent.socket_path), await start_client(agent.socket_path)
        await launcher.ask(launcher_hello(launcher))
        await launcher.ask(WorkersStarted(request_id=5, generation=1, pids={0: rank.pid}))
        await launcher.ask(PublishStore(request_id=3, generation=1, host="127.0.0.1", port=4321))
        await rank.ask(rank_hello(1))
    async with run_agent() as agent:
        beat = agent.heartbeat()
        assert (beat.job_id, beat.ordered_generation, beat.assigned_generation, beat.slot) == (JOB, 1, 1, 0)
        assert (beat.launcher_pid, beat.launcher_connected) == (launcher.pid, False)
        assert (beat.ranks[0].pid, beat.ranks[0].state) == (rank.pid, RankState.RUNNING)
        await launcher.connect()
        hello = launcher_hello(launcher).model_copy(update={"generation": 1, "worker_pids": {0: rank.pid}})
        assert isinstance(await launcher.ask(hello), LauncherWelcome)
        assert isinstance(await launcher.ask(StoreAddress(request_id=4, generation=1, timeout_s=5)), StoreAddressReply)
        rank.signal(signal.SIGKILL)
        await rank.ended()
        await eventually("the rank's end", lambda: agent.heartbeat().ranks[0].exit_code == -signal.SIGKILL)


async def test_a_launcher_that_does_not_connect_is_ended(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await begin(agent)
        launcher = await start_client(agent.socket_path)
        await launcher.ask(launcher_hello(launcher))
        assert agent.heartbeat().launcher_pid == launcher.pid
    async with run_agent(launcher_hello_timeout=timedelta(milliseconds=50)) as agent:
        assert await launcher.ended() == -signal.SIGKILL
        await eventually("the launcher's end", lambda: agent.heartbeat().launcher_pid is None)


async def test_ranks_that_an_old_launcher_still_runs_are_ended(run_agent, start_client: StartClient) -> None:
    async with run_agent() as agent:
        await begin(agent, generation=2)
        launcher, rank = await start_client(agent.socket_path), await start_client(agent.socket_path)
        hello = launcher_hello(launcher).model_copy(update={"generation": 1, "worker_pids": {0: rank.pid}})
        assert isinstance(await launcher.ask(hello), LauncherWelcome)
        assert await rank.ended() == -signal.SIGKILL
        assert agent.heartbeat().ranks == ()
        assert identify(launcher.pid).started
