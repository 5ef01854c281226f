"""The agent as people run it, killed as machines kill it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from agent_harness import JOB, AgentProcess, Client, Coordinator, assign, eventually, start_job

from gemini_ft.contracts.errors import ConflictError
from gemini_ft.contracts.local_protocol import LauncherHello, RankHello, RankWelcome, WorkersStarted
from gemini_ft.contracts.messages import Fence, Heartbeat, Inventory, RankState
from gemini_ft.security.secret_files import write_secret

StartClient = Callable[[Path], Awaitable[Client]]
MakeAgent = Callable[[str], AgentProcess]

RANK_HELLO = RankHello(request_id=1, generation=1, rank=0, job_id=JOB, pid=1, world_size=1)


async def registered(agent: AgentProcess, coordinator: Coordinator) -> str:
    """Start an agent, wait for its heartbeat and return its node id."""
    num_registrations = len(coordinator.registrations)
    await agent.start()
    await eventually("the registration", lambda: len(coordinator.registrations) > num_registrations)
    incarnation = coordinator.registrations[-1].incarnation

    def beat() -> Heartbeat | None:
        return next((beat for beat in coordinator.heartbeats if beat.incarnation == incarnation), None)

    await eventually("a heartbeat", beat)
    found = beat()
    assert found is not None
    return found.node_id


async def test_a_killed_agent_finds_its_launcher_and_ranks_again(
    agent_process: MakeAgent, coordinator: Coordinator, start_client: StartClient
) -> None:
    agent = agent_process("node")
    node_id = await registered(agent, coordinator)
    await coordinator.order(node_id, start_job())
    await coordinator.order(node_id, Fence(job_id=JOB, generation=1))
    await coordinator.order(node_id, assign(1, node_id))
    launcher, rank = await start_client(agent.socket_path), await start_client(agent.socket_path)
    hello = LauncherHello(request_id=1, job_id=JOB, pid=launcher.pid, num_local_ranks=1, generation=0)
    await launcher.ask(hello)
    await launcher.ask(WorkersStarted(request_id=2, generation=1, pids={0: rank.pid}))
    await rank.ask(RANK_HELLO)

    await agent.kill()
    assert await registered(agent, coordinator) == node_id
    beat = coordinator.last(node_id)
    assert beat is not None
    assert (beat.launcher_pid, beat.ordered_generation, beat.assigned_generation) == (launcher.pid, 1, 1)
    assert (beat.ranks[0].pid, beat.ranks[0].state) == (rank.pid, RankState.RUNNING)
    await rank.connect()
    assert isinstance(await rank.ask(RANK_HELLO), RankWelcome)
    await launcher.connect()
    await launcher.ask(hello.model_copy(update={"generation": 1, "worker_pids": {0: rank.pid}}))
    await eventually("the launcher to show", lambda: coordinator.last(node_id).launcher_connected)

    rank.signal(signal.SIGKILL)
    await rank.ended()
    await eventually("the rank's end", lambda: coordinator.last(node_id).ranks[0].exit_code == -signal.SIGKILL)


async def test_an_agent_killed_in_a_fence_still_ends_the_old_rank(
    agent_process: MakeAgent, coordinator: Coordinator, start_client: StartClient
) -> None:
    agent = agent_process("node")
    node_id = await registered(agent, coordinator)
    await coordinator.order(node_id, start_job())
    await coordinator.order(node_id, Fence(job_id=JOB, generation=1))
    await coordinator.order(node_id, assign(1, node_id))
    rank = await start_client(agent.socket_path)
    await rank.ask(RANK_HELLO)
    await agent.kill()

    # As if it had died right after it wrote the fence down.
    record = agent.state_dir / "job.json"
    text = record.read_text()
    assert text.count('"generation":1,"assignment":') == 1
    record.write_text(text.replace('"generation":1,"assignment":', '"generation":2,"assignment":'))
    assert await registered(agent, coordinator) == node_id
    assert await rank.ended() == -signal.SIGKILL
    assert isinstance(await coordinator.order(node_id, Fence(job_id=JOB, generation=2)), Inventory)


async def test_two_agents_on_one_host_are_two_nodes(agent_process: MakeAgent, coordinator: Coordinator) -> None:
    first = await registered(agent_process("one"), coordinator)
    second = await registered(agent_process("two"), coordinator)
    assert first != second
    assert len({request.hostname for request in coordinator.registrations}) == 1


async def test_a_refused_identity_is_exit_code_3(agent_process: MakeAgent, coordinator: Coordinator) -> None:
    coordinator.refusal = ConflictError("node-1 is in use by two agents").to_wire()
    agent = agent_process("node")
    process = await agent.start()
    assert await process.wait() == 3
    assert agent.log().endswith("agent: node-1 is in use by two agents\n")


async def test_a_second_agent_in_a_folder_is_exit_code_3(agent_process: MakeAgent, coordinator: Coordinator) -> None:
    agent = agent_process("node")
    await registered(agent, coordinator)
    first = agent.process
    second = await agent.start()
    try:
        assert await second.wait() == 3
        assert "already runs in the state folder" in agent.log()
    finally:
        agent.process = first


async def test_sigterm_ends_the_agent_and_leaves_the_ranks(
    agent_process: MakeAgent, coordinator: Coordinator, start_client: StartClient
) -> None:
    agent = agent_process("node")
    node_id = await registered(agent, coordinator)
    await coordinator.order(node_id, start_job())
    await coordinator.order(node_id, Fence(job_id=JOB, generation=1))
    await coordinator.order(node_id, assign(1, node_id))
    rank = await start_client(agent.socket_path)
    await rank.ask(RANK_HELLO)
    assert agent.process is not None
    agent.process.terminate()
    assert await agent.process.wait() == 0
    assert await rank.is_cut_off()
    assert not agent.socket_path.exists()
    assert "Traceback" not in agent.log()


def test_bad_usage_is_exit_code_2_and_one_sentence(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "gemini_ft.agent", "--nats", "nats://127.0.0.1:1", "--state-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "--memory-dir" in run.stderr
    assert "Traceback" not in run.stderr


async def test_the_agent_presents_its_token_and_keeps_it_secret(
    agent_process: MakeAgent, coordinator: Coordinator, tmp_path: Path
) -> None:
    agent, token_file = agent_process("node"), tmp_path / "token"
    write_secret(token_file, "gft_secret\n")
    await agent.start("--registration-token-file", str(token_file))
    await eventually("the registration", lambda: coordinator.registrations)
    assert coordinator.registrations[-1].token == "gft_secret"
    await agent.kill()

    token_file.chmod(0o644)
    refused = await agent.start("--registration-token-file", str(token_file))
    assert await refused.wait() == 2
    assert "--registration-token-file" in agent.log()
    assert "gft_secret" not in agent.log()
