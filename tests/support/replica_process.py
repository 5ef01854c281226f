"""One node's checkpoint memory in a process of its own, driven by JSON lines: for tests that kill it anywhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import select
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from gemini_ft import faults
from gemini_ft.agent.replicas.service import LocalReplicaService
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.contracts.errors import GeminiError, from_wire
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged
from gemini_ft.contracts.messages import Assign, JobSpec

__all__ = ["ReplicaProcess", "ReplicaProcessDiedError"]

PATIENCE = timedelta(seconds=30)
_POLL_S = 0.05
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["replica_process"])


class ReplicaProcessDiedError(Exception):
    """The process ended instead of answering."""


class ReplicaProcess:
    """A node's process; `call` runs one method of the service in it."""

    def __init__(self, name: str, memory_dir: Path, fault: str | None = None) -> None:
        self.name = name
        self._socket, theirs = socket.socketpair()
        self._process = _context.Process(target=_run, args=(theirs, memory_dir, fault), name=name)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._received = bytearray()
        self._answers: dict[int, dict[str, Any]] = {}

    def call(self, method: str, meanwhile: Callable[[], None] = lambda: None, **arguments: Any) -> Any:
        """Return what the method returns; `meanwhile` is called again and again until then, and may call as well.

        Raises:
            ReplicaProcessDiedError: the process ended first.
            GeminiError: what the method raised.
        """
        number = next(self._numbers)
        try:
            self._socket.sendall(json.dumps([number, method, arguments]).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            raise ReplicaProcessDiedError(self.name) from None
        while number not in self._answers:
            self._receive()
            meanwhile()
        answer = self._answers.pop(number)
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["result"]

    def _receive(self) -> None:
        readable, _, _ = select.select([self._socket], [], [], _POLL_S)
        if not readable:
            return
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ReplicaProcessDiedError(self.name)
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            number, answer = json.loads(line)
            self._answers[number] = answer

    @property
    def has_died(self) -> bool:
        return self._process.exitcode is not None

    def end(self) -> int:
        """SIGKILL it if it lives, and return its exit code."""
        self._process.kill()
        self._process.join(30)
        code = self._process.exitcode
        assert code is not None
        self._process.close()
        self._socket.close()
        return code


def _run(sock: socket.socket, memory_dir: Path, fault: str | None) -> None:
    faults.arm(fault)
    asyncio.run(_serve(sock, memory_dir))


async def _serve(sock: socket.socket, memory_dir: Path) -> None:
    settings = ReplicaSettings(
        memory_dir=memory_dir, first_retry=timedelta(milliseconds=5), last_retry=timedelta(milliseconds=50)
    )
    service = LocalReplicaService(settings)
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 22)
    running = set()
    while line := await reader.readline():
        task = asyncio.create_task(_answer(service, writer, *json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(
    service: LocalReplicaService, writer: asyncio.StreamWriter, number: int, method: str, arguments: dict[str, Any]
) -> None:
    try:
        answer = {"result": await _carry_out(service, method, arguments)}
    except GeminiError as error:
        answer = {"error": error.to_wire()}
    writer.write(json.dumps([number, answer]).encode() + b"\n")


async def _carry_out(service: LocalReplicaService, method: str, arguments: dict[str, Any]) -> Any:
    match method:
        case "open":
            address = await service.start(None)
            spec = JobSpec.model_validate(arguments["spec"])
            await service.open_job(
                arguments["job_id"], arguments["job_key"], spec, arguments["name"], new_incarnation()
            )
            return address.model_dump()
        case "fence":
            copies = await service.fence(arguments["generation"])
            return {"held": [held.model_dump() for held in copies.held], "damaged": copies.damaged}
        case "assign":
            return await service.assign(Assign.model_validate_json(arguments["plan"]))
        case "open_rank":
            return str(service.open_rank(arguments["rank"], arguments["generation"]))
        case "reserve":
            return [str(path) for path in await service.reserve(**arguments, timeout=PATIENCE)]
        case "restorable_copy":
            copy = await service.restorable_copy(arguments["rank"], PATIENCE)
            return [copy.step, copy.buffer, copy.source]
        case "fill_begun":
            return service.fill_begun(FillBegun(**arguments))
        case "staged":
            return service.staged(Staged(**arguments))
        case "sealed":
            return service.sealed(Sealed(**arguments))
        case _:
            raise ValueError(method)
