"""Agents with real memory, real sockets and real processes around them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
from nats.aio.msg import Msg

from gemini_ft.agent.agent import Agent
from gemini_ft.contracts.frames import Message
from gemini_ft.contracts.handshake import new_job_key
from gemini_ft.contracts.ids import new_node_id
from gemini_ft.contracts.local_protocol import AgentMessage, agent_messages
from gemini_ft.contracts.messages import (
    Address,
    Assign,
    Heartbeat,
    JobSpec,
    LauncherKind,
    Order,
    OrderReply,
    Register,
    Registered,
    RegistrationRefused,
    StartJob,
    order_replies,
)
from gemini_ft.contracts.subjects import HEARTBEATS, REGISTER, order_subject
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.security.secret_files import write_secret

JOB = "job-1"
NODE = "node-me"
SOON_S = 15.0

# One process at the socket: JSON messages from its standard input, answers to its standard output.
_CLIENT = """
import socket, sys
from gemini_ft.contracts.frames import FrameDecoder, encode_frame
from gemini_ft.contracts.local_protocol import agent_messages, client_messages
sock = decoder = None
for line in sys.stdin:
    if line == "connect\\n":
        sock, decoder = socket.socket(socket.AF_UNIX), FrameDecoder(agent_messages)
        try:
            sock.connect(sys.argv[1])
            print("connected", flush=True)
        except OSError as error:
            print(f"refused: {error}", flush=True)
    elif line.startswith("raw "):
        sock.sendall(bytes.fromhex(line[4:]))
    elif line.startswith("exit "):
        sys.exit(int(line[5:]))
    elif line == "read\\n":
        frames = []
        while not frames and (data := sock.recv(65536)):
            frames = decoder.feed(data)
        print(frames[0].message.model_dump_json() if frames else "closed", flush=True)
    else:
        sock.sendall(encode_frame(client_messages.validate_json(line)))
"""


async def eventually(what: str, is_true: Callable[[], object], timeout_s: float = SOON_S) -> None:
    """Wait until a condition holds, and say what was waited for if it does not."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not is_true():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


class Client:
    """A process of its own that plays a rank or a launcher."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, socket_path: Path) -> Client:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _CLIENT,
            str(socket_path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        client = cls(process)
        await client.connect()
        return client

    async def connect(self) -> None:
        """Open the connection, again if it was lost, when the agent is there."""
        deadline = asyncio.get_running_loop().time() + SOON_S
        while (answer := await self._command("connect")) != "connected":
            assert asyncio.get_running_loop().time() < deadline, answer
            await asyncio.sleep(0.05)

    def tell(self, message: Message) -> None:
        self._write(message.model_dump_json())

    async def ask(self, message: Message) -> AgentMessage:
        self.tell(message)
        return await self.read()

    async def read(self) -> AgentMessage:
        answer = await self._command("read")
        assert answer != "closed", "the agent hung up"
        return agent_messages.validate_json(answer)

    async def is_cut_off(self) -> bool:
        return await self._command("read") == "closed"

    def send_raw(self, data: bytes) -> None:
        self._write(f"raw {data.hex()}")

    def exit(self, code: int) -> None:
        self._write(f"exit {code}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), SOON_S)

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def _command(self, line: str) -> str:
        self._write(line)
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), SOON_S)).decode().strip()


class RunningAgent:
    """An agent on this event loop, with no control plane in reach: orders are given to it directly."""

    def __init__(self, agent: Agent, task: asyncio.Task[None], stop: asyncio.Event) -> None:
        self.agent = agent
        self._task = task
        self._stop = stop

    @property
    def socket_path(self) -> Path:
        return self.agent.socket_path

    async def order(self, order: Order) -> OrderReply:
        return await asyncio.wait_for(self.agent.obey(order), SOON_S)

    def heartbeat(self) -> Heartbeat:
        beat = self.agent.heartbeat(1)
        assert beat is not None
        return beat

    async def ended(self) -> None:
        """Wait until the agent ends by itself, and raise its error."""
        await asyncio.wait_for(asyncio.shield(self._task), SOON_S)

    async def stop(self) -> None:
        self._stop.set()
        await self._task


_KEYS = {JOB: new_job_key()}


def start_job(job_id: str = JOB, **spec: Any) -> StartJob:
    """An order for a job of one node and one rank, whose launcher comes by itself."""
    default = {"name": "test", "num_nodes": 1, "num_ranks_per_node": 1, "num_replicas": 1}
    whole = JobSpec(**{**default, "launcher": LauncherKind.EXTERNAL, **spec})
    return StartJob(job_id=job_id, job_key=_KEYS.setdefault(job_id, new_job_key()), spec=whole)


def assign(generation: int, node_id: str = NODE, job_id: str = JOB, restore_step: int | None = None) -> Assign:
    return Assign(
        job_id=job_id,
        generation=generation,
        slots={0: node_id},
        addresses={node_id: Address(host="127.0.0.1", port=1)},
        placement={0: (0,)},
        restore_step=restore_step,
    )


@dataclass
class Coordinator:
    """The coordinator's side of the wire, as far as agents see it."""

    connection: Any
    refusal: dict[str, Any] | None = None
    registrations: list[Register] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)

    @classmethod
    async def connect(cls, server: NatsServer) -> Coordinator:
        connection = await nats.connect(
            server.url, token=server.token, reconnect_time_wait=0.05, max_reconnect_attempts=-1, error_cb=_ignore
        )
        coordinator = cls(connection)
        await connection.subscribe(REGISTER, cb=coordinator._register)
        await connection.subscribe(HEARTBEATS, cb=coordinator._hear)
        await connection.flush()
        return coordinator

    async def order(self, node_id: str, order: Order) -> OrderReply:
        message = await self.connection.request(
            order_subject(node_id), order.model_dump_json().encode(), timeout=SOON_S
        )
        return order_replies.validate_json(message.data)

    def last(self, node_id: str) -> Heartbeat | None:
        return next((beat for beat in reversed(self.heartbeats) if beat.node_id == node_id), None)

    async def _register(self, message: Msg) -> None:
        request = Register.model_validate_json(message.data)
        self.registrations.append(request)
        reply: Message = Registered(node_id=request.node_id or new_node_id())
        if self.refusal is not None:
            reply = RegistrationRefused(error=self.refusal)
        await message.respond(reply.model_dump_json().encode())

    async def _hear(self, message: Msg) -> None:
        self.heartbeats.append(Heartbeat.model_validate_json(message.data))


async def _ignore(error: Exception) -> None:
    """The broker is killed on purpose."""


class AgentProcess:
    """An agent as people run it."""

    def __init__(self, folder: Path, memory_dir: Path, server: NatsServer) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        self._token_file = folder / "token"
        self._memory_dir = memory_dir
        self._server = server
        self.process: asyncio.subprocess.Process | None = None

    @property
    def node_id(self) -> str:
        return str(json.loads((self.state_dir / "node.json").read_text())["node_id"])

    @property
    def socket_path(self) -> Path:
        return self.state_dir / "run" / "agent.sock"

    async def start(self, *options: str) -> asyncio.subprocess.Process:
        self.folder.mkdir(exist_ok=True)
        write_secret(self._token_file, self._server.token or "")
        with (self.folder / "agent.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "gemini_ft.agent", "--nats", self._server.url, "--nats-token-file", str(self._token_file)),
                *("--state-dir", str(self.state_dir), "--memory-dir", str(self._memory_dir)),
                *("--host", "127.0.0.1", "--heartbeat-interval", "0.05", "--label", "rack=a", *options),
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
        return self.process

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            await self.kill()
