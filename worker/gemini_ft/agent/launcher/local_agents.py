"""Agents without a coordinator: the launcher's side of the agent's socket for all nodes of one job, in one process.

For tests and benchmarks of launchers. The policy is the simplest one: a failed rank raises the generation, and
the slots stay where they are. It speaks the real protocol over real sockets.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, JobPage
from gemini_ft.contracts.errors import FencedError, JobClosedError, NotFoundError
from gemini_ft.contracts.frames import FrameDecoder, encode_frame
from gemini_ft.contracts.local_protocol import (
    AgentMessage,
    AssignmentReply,
    ClientMessage,
    Failed,
    Finished,
    LauncherHello,
    LauncherWelcome,
    NextAssignment,
    NotYet,
    Ok,
    PublishStore,
    StoreAddress,
    StoreAddressReply,
    WorkersExited,
    WorkersStarted,
    client_messages,
)

__all__ = ["LocalAgents"]

T = TypeVar("T")


@dataclass
class _Node:
    index: int
    socket_path: Path
    page: JobPage
    page_path: Path
    slot: int | None = None
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)


class LocalAgents:
    """Serves nodes 0..num_nodes-1 of `job_id`, each at `socket_path(node)`; those past `num_slots` are standbys.

    What launchers told is kept in `told`, as (node, message) in order of arrival. Thread-safe.
    """

    def __init__(self, folder: Path, job_id: str, num_slots: int, num_standbys: int = 0, restarts: bool = True) -> None:
        self.told: list[tuple[int, ClientMessage]] = []
        self.generation = 0
        self._job_id = job_id
        self._num_slots = num_slots
        self._is_only_fenced = False
        self._restarts = restarts
        self._stores: dict[int, tuple[str, int]] = {}
        self._closed: JobClosedError | None = None
        self._finished: set[int] = set()
        self._nodes = [self._make_node(folder, index) for index in range(num_slots + num_standbys)]
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local-agents", daemon=True)
        self._thread.start()
        for node in self._nodes:
            self._do(self._serve(node))

    def __enter__(self) -> LocalAgents:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            self._do(self._unserve(node))
        self._do(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def socket_path(self, node: int) -> str:
        """Return where the node's agent listens."""
        return str(self._nodes[node].socket_path)

    def order(self, generation: int | None = None, slots: dict[int, int] | None = None, assign: bool = True) -> int:
        """Raise the generation; `slots` (slot -> node) replaces who is where. Return the generation.

        With `assign=False` launchers are only told to leave, as between a fence and its assignment.
        """
        return self._do(self._order(generation, slots, assign))

    def close_job(self, outcome: str) -> None:
        """End the job."""
        self._do(self._close_job(outcome))

    def stop_agent(self, node: int) -> None:
        """Make the node's agent vanish: its socket and connections, not its job page."""
        self._do(self._unserve(self._nodes[node]))

    def start_agent(self, node: int) -> None:
        """Bring a vanished agent back."""
        self._do(self._serve(self._nodes[node]))

    def of_kind(self, kind: type[T]) -> list[tuple[int, T]]:
        """Return what was told with messages of one kind, as (node, message)."""
        return [(node, message) for node, message in self.told if isinstance(message, kind)]

    def pids(self, generation: int) -> dict[int, int]:
        """Return the pids of the generation's ranks that were told so far, by global rank."""
        found: dict[int, int] = {}
        for _, message in self.of_kind(WorkersStarted):
            if message.generation == generation:
                found |= message.pids
        return found

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _make_node(self, folder: Path, index: int) -> _Node:
        page_path = folder / f"job-page-{index}"
        page_path.write_bytes(bytes(CONTROL_PAGE_BYTES))
        with page_path.open("r+b") as file:
            page = JobPage(memoryview(mmap.mmap(file.fileno(), CONTROL_PAGE_BYTES)))
        return _Node(index, folder / f"agent-{index}.sock", page, page_path)

    async def _serve(self, node: _Node) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            node.writers.add(writer)
            await self._converse(node, reader, writer)
            node.writers.discard(writer)
            writer.close()

        node.server = await asyncio.start_unix_server(connected, node.socket_path)

    async def _unserve(self, node: _Node) -> None:
        if node.server is not None:
            node.server.close()
            node.socket_path.unlink()
            for writer in node.writers:
                writer.close()
            node.server = None

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _converse(self, node: _Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder: FrameDecoder[ClientMessage] = FrameDecoder(client_messages)
        with suppress(ConnectionResetError):
            while data := await reader.read(1 << 16):
                for frame in decoder.feed(data):
                    task = asyncio.create_task(self._answer(node, frame.message, writer))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def _answer(self, node: _Node, message: ClientMessage, writer: asyncio.StreamWriter) -> None:
        reply = await self._reply(node, message)
        if not writer.is_closing():
            writer.write(encode_frame(reply))

    async def _reply(self, node: _Node, message: ClientMessage) -> AgentMessage:
        request_id: int = getattr(message, "request_id", 0)
        match message:
            case LauncherHello():
                self.told.append((node.index, message))
                if message.job_id != self._job_id:
                    unknown = NotFoundError(f"job {message.job_id} is not known on this node; check --job")
                    return Failed(request_id=request_id, error=unknown.to_wire())
                return LauncherWelcome(
                    request_id=request_id, job_page=str(node.page_path), node_id=f"node-{node.index}"
                )
            case NextAssignment():
                return await self._park(
                    request_id, message.timeout_s, lambda: self._assignment(node, request_id, message)
                )
            case StoreAddress():
                return await self._park(
                    request_id, message.timeout_s, lambda: self._store_address(request_id, message.generation)
                )
        return await self._hear(node, request_id, message)

    async def _hear(self, node: _Node, request_id: int, message: ClientMessage) -> AgentMessage:
        generation: int = getattr(message, "generation", 0)
        async with self._changed:
            self.told.append((node.index, message))
            is_old = generation < self.generation
            if isinstance(message, PublishStore):
                self._stores[generation] = (message.host, message.port)
            elif isinstance(message, Finished):
                self._finished.add(node.index)
            self._changed.notify_all()
        if is_old:
            return Failed(
                request_id=request_id, error=FencedError.of("launcher", generation, self.generation).to_wire()
            )
        if isinstance(message, WorkersExited) and any(message.exit_codes.values()):
            if self._restarts:
                await self._order(None, None, True)
            else:
                await self._close_job("failed")
        return Ok(request_id=request_id)

    async def _park(self, request_id: int, timeout_s: float, answer: Callable[[], AgentMessage | None]) -> AgentMessage:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while True:
                    if self._closed is not None:
                        return Failed(request_id=request_id, error=self._closed.to_wire())
                    if (reply := answer()) is not None:
                        return reply
                    await self._changed.wait()
        except TimeoutError:
            return NotYet(request_id=request_id)

    def _assignment(self, node: _Node, request_id: int, message: NextAssignment) -> AgentMessage | None:
        if node.slot is None or self.generation <= message.after_generation or self._is_only_fenced:
            return None
        return AssignmentReply(
            request_id=request_id,
            generation=self.generation,
            slot=node.slot,
            num_slots=self._num_slots,
            host="127.0.0.1",
        )

    def _store_address(self, request_id: int, generation: int) -> AgentMessage | None:
        if generation not in self._stores:
            return None
        host, port = self._stores[generation]
        return StoreAddressReply(request_id=request_id, host=host, port=port)

    async def _order(self, generation: int | None, slots: dict[int, int] | None, assign: bool) -> int:
        async with self._changed:
            self.generation = generation or self.generation + 1
            if slots is None and not any(node.slot is not None for node in self._nodes):
                slots = {slot: slot for slot in range(self._num_slots)}
            if slots is not None:
                places = {node: slot for slot, node in slots.items()}
                for node in self._nodes:
                    node.slot = places.get(node.index)
            self._is_only_fenced = not assign
            for node in self._nodes:
                node.page.ordered_generation = self.generation
            self._changed.notify_all()
            return self.generation

    async def _close_job(self, outcome: str) -> None:
        async with self._changed:
            self._closed = JobClosedError(f"job {self._job_id} has ended: {outcome}", outcome=outcome)
            for node in self._nodes:
                node.page.closed = True
            self._changed.notify_all()
