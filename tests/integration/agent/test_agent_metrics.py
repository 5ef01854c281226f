"""The agent as people run it, with metrics and logs for machines."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from agent_harness import JOB, SOON_S, AgentProcess, Client, Coordinator, assign, eventually, start_job
from prometheus_client.parser import text_string_to_metric_families

from gemini_ft.contracts.local_protocol import RankHello, RankWelcome
from gemini_ft.contracts.messages import Fence, LauncherKind
from gemini_ft.localstack.nats import NatsServer

METRICS = ("--metrics-listen", "127.0.0.1:0", "--log-format", "json")


class Scrapes:
    """Reads an agent's metrics from where its log says that they are."""

    def __init__(self, agent: AgentProcess) -> None:
        self._agent = agent
        self.samples: dict[tuple[str, str], float] = {}

    async def scrape(self) -> None:
        urls = re.findall(r"serving metrics at (http://[0-9.:]+/metrics)", self._agent.log())
        async with httpx.AsyncClient() as client:
            text = (await client.get(urls[-1])).text
        self.samples = {
            (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def until(self, what: str, is_true: Callable[[dict[tuple[str, str], float]], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + SOON_S
        while not is_true(self.samples):
            assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {what}"
            await asyncio.sleep(0.02)
            await self.scrape()


async def test_an_agent_tells_prometheus_what_it_knows(
    agent_process: Callable[[str], AgentProcess],
    coordinator: Coordinator,
    nats_server: NatsServer,
    start_client: Callable[[Path], Awaitable[Client]],
) -> None:
    agent = agent_process("node")
    await agent.start(*METRICS)
    await eventually("a heartbeat", lambda: coordinator.heartbeats)
    node_id = coordinator.heartbeats[0].node_id
    scrapes = Scrapes(agent)
    await scrapes.scrape()
    assert scrapes.samples["gemini_ft_agent_info", f",{node_id}"] == 1
    assert scrapes.samples["gemini_ft_heartbeats_sent_total", ""] >= 1
    assert scrapes.samples["gemini_ft_nats_connected", ""] == 1
    assert scrapes.samples["gemini_ft_nats_reconnects_total", ""] == 0

    await coordinator.order(node_id, start_job())
    await coordinator.order(node_id, Fence(job_id=JOB, generation=1))
    await coordinator.order(node_id, assign(1, node_id))
    rank = await start_client(agent.socket_path)
    hello = RankHello(request_id=1, generation=1, rank=0, job_id=JOB, pid=rank.pid, world_size=1)
    assert isinstance(await rank.ask(hello), RankWelcome)
    await scrapes.scrape()
    assert scrapes.samples["gemini_ft_agent_info", f"{JOB},{node_id}"] == 1
    assert scrapes.samples["gemini_ft_agent_generation", ""] == 1
    assert scrapes.samples["gemini_ft_rank_running", "0"] == 1
    assert scrapes.samples["gemini_ft_store_capacity_bytes", ""] > 0
    assert scrapes.samples["gemini_ft_redundancy_whole", ""] == 1
    assert ("gemini_ft_rank_finished_step", "0") not in scrapes.samples

    rank.signal(signal.SIGKILL)
    await scrapes.until("the rank's end", lambda found: found["gemini_ft_rank_running", "0"] == 0)
    nats_server.kill()
    await scrapes.until("the loss of NATS", lambda found: found["gemini_ft_nats_connected", ""] == 0)
    nats_server.start()
    await scrapes.until(
        "the connection",
        lambda found: found["gemini_ft_nats_reconnects_total", ""] >= found["gemini_ft_nats_connected", ""] == 1,
    )


async def test_agent_and_launcher_log_json_with_node_job_and_generation(
    agent_process: Callable[[str], AgentProcess], coordinator: Coordinator, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    agent = agent_process("node")
    await agent.start("--log-format", "json")
    await eventually("a heartbeat", lambda: coordinator.heartbeats)
    node_id = coordinator.heartbeats[0].node_id
    order = start_job(
        launcher=LauncherKind.MANAGED, command=(str(script),), environment={"GEMINI_FT_START_METHOD": "cold"}
    )
    await coordinator.order(node_id, order)
    await coordinator.order(node_id, Fence(job_id=JOB, generation=1))
    await coordinator.order(node_id, assign(1, node_id))
    await eventually("the job to be finished", lambda: coordinator.last(node_id).finished, timeout_s=60)

    lines = [json.loads(line) for line in agent.log().splitlines()]
    assert {line["process"] for line in lines} == {"agent"}
    about = {"node_id": node_id, "job_id": JOB, "generation": 1}
    assert any(about.items() <= line.items() for line in lines if line["message"].startswith("carried out assign"))
    launcher_log = agent.state_dir / "logs" / JOB / "launcher.log"
    joined = [json.loads(line) for line in launcher_log.read_text().splitlines() if "joined generation" in line]
    assert [(line["process"], line["job_id"], line["generation"]) for line in joined] == [("launcher", JOB, 1)]


async def test_an_address_that_is_taken_is_exit_code_2(
    agent_process: Callable[[str], AgentProcess], nats_server: NatsServer
) -> None:
    agent = agent_process("node")
    process = await agent.start("--metrics-listen", nats_server.url.removeprefix("nats://"))
    assert await process.wait() == 2
    assert "choose another --metrics-listen" in agent.log().splitlines()[-1]
