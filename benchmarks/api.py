"""How long the coordinator's API takes to answer, with a whole cluster recorded and alive.

A real coordinator, Postgres and NATS; `--nodes` simulated agents in a process of their own, which take orders and send
a heartbeat a second each; `--jobs` jobs that run on them. A client asks for every resource in turn, with a token from
the database, and times the whole of each answer. All processes share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import (
    Address,
    Assign,
    CloseJob,
    Fence,
    Heartbeat,
    HeldVersion,
    Inventory,
    OrderDone,
    RankState,
    RankStatus,
    Register,
    Registered,
    StartJob,
    orders,
    registration_replies,
)
from gemini_ft.contracts.subjects import REGISTER, heartbeat_subject, order_subject
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.localstack.postgres import PostgresServer
from gemini_ft.localstack.processes import die_with_parent
from gemini_ft.security.secret_files import write_secret

NUM_WARM_UPS = 50
READY_TIMEOUT_S = 180.0


@dataclass
class FakeNode:
    """As much of an agent as the coordinator can see."""

    port: int
    incarnation: str = field(default_factory=new_incarnation)
    node_id: str = ""
    job: StartJob | None = None
    ordered_generation: int = 0
    assign: Assign | None = None
    step: int = 0
    sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def address(self) -> Address:
        return Address(host="127.0.0.1", port=self.port)

    async def register(self, client: Client) -> None:
        request = Register(
            node_id=None,
            incarnation=self.incarnation,
            hostname=f"host-{self.port}",
            labels={"rack": f"r{self.port % 50}"},
            address=self.address,
        )
        answer = (await client.request(REGISTER, request.model_dump_json().encode(), timeout=30)).data
        reply = registration_replies.validate_json(answer)
        assert isinstance(reply, Registered), reply
        self.node_id = reply.node_id

    def obey(self, data: bytes) -> OrderDone | Inventory:
        order = orders.validate_json(data)
        match order:
            case StartJob():
                self.job = order
            case Fence():
                self.ordered_generation = order.generation
                held: tuple[HeldVersion, ...] = ()
                return Inventory(
                    node_id=self.node_id, incarnation=self.incarnation, generation=order.generation, held=held
                )
            case Assign():
                self.assign = order
            case CloseJob():
                self.job = self.assign = None
        return OrderDone(node_id=self.node_id, incarnation=self.incarnation)

    def heartbeat(self) -> Heartbeat:
        slot, ranks = None, ()
        if self.assign is not None and self.job is not None:
            slot = next(slot for slot, node_id in self.assign.slots.items() if node_id == self.node_id)
            num_ranks = self.job.spec.num_ranks_per_node
            self.step += 1
            ranks = tuple(
                RankStatus(
                    rank=rank,
                    generation=self.assign.generation,
                    pid=1000 + rank,
                    state=RankState.RUNNING,
                    finished_step=self.step,
                    committed_step=self.step - 1,
                    sealed_everywhere_step=self.step - 1,
                    restored=True,
                )
                for rank in range(slot * num_ranks, (slot + 1) * num_ranks)
            )
        return Heartbeat(
            node_id=self.node_id,
            incarnation=self.incarnation,
            sequence=next(self.sequence),
            address=self.address,
            interval_s=1.0,
            job_id=None if self.job is None else self.job.job_id,
            ordered_generation=self.ordered_generation,
            assigned_generation=0 if self.assign is None else self.assign.generation,
            slot=slot,
            ranks=ranks,
            launcher_pid=77,
            launcher_connected=True,
        )


async def fleet_main(arguments: argparse.Namespace) -> None:
    """Be all the agents, until the parent ends us."""
    client = await nats.connect(arguments.nats, token=sys.stdin.readline().strip(), pending_size=1 << 24)
    nodes = [FakeNode(20_000 + number) for number in range(arguments.nodes)]
    for begin in range(0, len(nodes), 10):
        await asyncio.gather(*(node.register(client) for node in nodes[begin : begin + 10]))

    async def beat(node: FakeNode) -> None:
        await client.publish(heartbeat_subject(node.node_id), node.heartbeat().model_dump_json().encode())

    by_subject = {order_subject(node.node_id): node for node in nodes}

    async def on_order(message: Msg) -> None:
        node = by_subject[message.subject]
        await message.respond(node.obey(message.data).model_dump_json().encode())
        await beat(node)  # what an order changes is told at once

    await client.subscribe(order_subject("*"), cb=on_order)
    print("ready", flush=True)
    begun_at = time.monotonic()
    for number in itertools.count():  # spread evenly over each second, as those of machines are
        await beat(nodes[number % len(nodes)])
        await asyncio.sleep(max(0.0, begun_at + number / len(nodes) - time.monotonic()))


@contextlib.contextmanager
def processes(folder: Path, num_nodes: int) -> Iterator[tuple[str, str]]:
    """Start everything, and yield the API's URL and an operator's token."""
    token = "token-of-the-benchmark"
    with contextlib.ExitStack() as stack:
        # What is measured are answers to reads, not the disk that the leader writes to.
        postgres = stack.enter_context(PostgresServer(folder / "postgres", settings={"fsync": "off"}))
        nats_server = stack.enter_context(NatsServer(folder / "nats"))
        assert nats_server.token is not None
        for name, secret in (("database", postgres.url), ("nats-token", nats_server.token), ("api", token)):
            write_secret(folder / name, f"{secret}\n")
        ready = folder / "ready"
        log = stack.enter_context((folder / "coordinator.log").open("w"))
        command = [sys.executable, "-m", "gemini_ft.coordinator", "--database-url-file", str(folder / "database")]
        command += ["--nats", nats_server.url, "--nats-token-file", str(folder / "nats-token")]
        command += ["--api-token-file", str(folder / "api"), "--ready-file", str(ready)]
        coordinator = stack.enter_context(subprocess.Popen([*die_with_parent(signal.SIGKILL), *command], stderr=log))
        stack.callback(coordinator.terminate)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists():
            if coordinator.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the coordinator did not start:\n{(folder / 'coordinator.log').read_text()}")
            time.sleep(0.05)
        command = [sys.executable, __file__, "--role", "fleet", "--nodes", str(num_nodes), "--nats", nats_server.url]
        command = [*die_with_parent(signal.SIGKILL), *command]
        fleet = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stack.callback(fleet.terminate)
        assert fleet.stdin is not None
        assert fleet.stdout is not None
        fleet.stdin.write(f"{nats_server.token}\n")
        fleet.stdin.flush()
        if fleet.stdout.readline() != "ready\n":
            raise SystemExit(f"the simulated agents ended with {fleet.wait()}")
        yield ready.read_text().strip(), token
        if coordinator.poll() is not None:
            raise SystemExit(f"the coordinator ended:\n{(folder / 'coordinator.log').read_text()[-3000:]}")


async def fill(api: httpx.AsyncClient, num_jobs: int, num_nodes: int) -> tuple[list[str], list[str]]:
    """Create the jobs, wait until all of them run, and return the ids of jobs and nodes."""
    spec = {"num_nodes": num_nodes // num_jobs, "num_ranks_per_node": 4, "num_replicas": 2}
    job_ids = []
    for number in range(num_jobs):
        made = await api.post("/jobs", json={"name": f"job {number}", **spec})
        job_ids.append(made.raise_for_status().json()["job_id"])
    deadline = time.monotonic() + READY_TIMEOUT_S
    while (found := (await api.get("/cluster")).json())["num_jobs_by_phase"]["running"] < num_jobs:
        if time.monotonic() > deadline:
            waiting = [job["waiting_for"] for job in (await api.get("/jobs")).json()["items"]]
            raise SystemExit(f"the jobs do not all run: {found}; they wait for {sorted(set(waiting))}")
        await asyncio.sleep(0.5)
    nodes = (await api.get("/nodes", params={"limit": 1000})).json()["items"]
    return job_ids, [node["node_id"] for node in nodes]


def routes(job_ids: list[str], node_ids: list[str]) -> Iterator[tuple[str, str]]:
    """(name, path) of requests, for ever: every resource in turn, each of another job and node."""
    for number in itertools.count():
        job, node = f"/jobs/{job_ids[number % len(job_ids)]}", node_ids[number % len(node_ids)]
        yield from (
            ("/cluster", "/cluster"),
            ("/jobs", "/jobs"),
            ("/jobs/{job_id}", job),
            ("/jobs/{job_id}/placement", f"{job}/placement"),
            ("/jobs/{job_id}/ranks", f"{job}/ranks"),
            ("/jobs/{job_id}/versions", f"{job}/versions"),
            ("/jobs/{job_id}/recoveries", f"{job}/recoveries"),
            ("/nodes", "/nodes"),
            ("/nodes/{node_id}", f"/nodes/{node}"),
            ("/events", "/events"),
        )


async def measure(arguments: argparse.Namespace, url: str, token: str) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    async with _client(url, token) as operator:
        job_ids, node_ids = await fill(operator, arguments.jobs, arguments.nodes)
        made = await operator.post("/tokens", json={"name": "benchmark", "role": "viewer"})
        viewer = made.raise_for_status().json()["token"]
    async with _client(url, viewer) as api:
        begun_at = time.monotonic()
        for number, (name, path) in enumerate(routes(job_ids, node_ids)):
            if time.monotonic() - begun_at > arguments.seconds:
                return times
            await asyncio.sleep(max(0.0, begun_at + number / arguments.rate - time.monotonic()))
            asked_at = time.perf_counter()
            (await api.get(path)).raise_for_status()
            if number >= NUM_WARM_UPS:
                times.setdefault(name, []).append(1000 * (time.perf_counter() - asked_at))
    raise AssertionError("requests do not end")


@contextlib.asynccontextmanager
async def _client(url: str, token: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=f"{url}/v1", headers=headers, timeout=30) as client:
        yield client


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000, help="nodes that are registered and send heartbeats")
    parser.add_argument("--jobs", type=int, default=100, help="jobs that run on them")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to measure")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    for name in ("role", "nats"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "fleet":
        asyncio.run(fleet_main(arguments))
        return
    with (
        tempfile.TemporaryDirectory(prefix="gemini-bench-") as folder,
        processes(Path(folder), arguments.nodes) as (url, token),
    ):
        times = asyncio.run(measure(arguments, url, token))
    report(arguments, times)


def report(arguments: argparse.Namespace, times: dict[str, list[float]]) -> None:
    everything = [value for values in times.values() for value in values]
    print(
        f"{arguments.nodes} nodes with a heartbeat a second, {arguments.jobs} jobs, {arguments.rate:g} requests/s; "
        f"{os.cpu_count()} CPUs, {platform.machine()}"
    )
    for name, values in (*sorted(times.items()), ("all", everything)):
        shown = {"p50": statistics.median(values), "p99": percentile(values, 99), "max": max(values)}
        print(f"  {name:28} " + "  ".join(f"{label} {value:6.2f} ms" for label, value in shown.items()))
    if arguments.json:
        facts: dict[str, Any] = {"nodes": arguments.nodes, "jobs": arguments.jobs, "milliseconds": times}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
