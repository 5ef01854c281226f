"""What ranks and launchers ask of their agent, message by message."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

from gemini_ft.agent.actions import Actions
from gemini_ft.agent.local_server import Client, Notice
from gemini_ft.agent.node import Node
from gemini_ft.agent.parking import Parking
from gemini_ft.agent.rank_watch import identify
from gemini_ft.agent.records import ProcessIdentity
from gemini_ft.agent.replicas.interface import ReplicaService
from gemini_ft.contracts.errors import (
    FencedError,
    NoVersionError,
    ProtocolError,
    UnavailableError,
    WaitTimeoutError,
)
from gemini_ft.contracts.local_protocol import (
    AgentMessage,
    AssignmentReply,
    BadCopy,
    ClientMessage,
    FillBegun,
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
    Sealed,
    Staged,
    StoreAddress,
    StoreAddressReply,
    WorkersExited,
    WorkersStarted,
)

__all__ = ["LocalRequests"]

LauncherMessage = NextAssignment | PublishStore | StoreAddress | WorkersStarted | WorkersExited | Finished
RankMessage = Reserve | Restore | BadCopy | Restored

_ZERO = "zero"


class LocalRequests:
    """See LocalHandler.

    Args:
        perform: carries out the actions that the node decides on, and returns when they are done.
        perform_soon: has them carried out.
        job_page: returns the path of the open job's page.
        host: address of this node for the ranks' own traffic.
    """

    def __init__(
        self,
        node: Node,
        replicas: ReplicaService,
        perform: Callable[[Actions], Coroutine[Any, Any, None]],
        perform_soon: Callable[[Actions], None],
        parking: Parking,
        job_page: Callable[[], Path],
        host: str,
    ) -> None:
        self._node = node
        self._replicas = replicas
        self._perform = perform
        self._perform_soon = perform_soon
        self._parking = parking
        self._job_page = job_page
        self._host = host
        self._launchers: dict[Client, ProcessIdentity] = {}
        self._ranks: dict[Client, tuple[int, int]] = {}

    async def answer(self, client: Client, message: ClientMessage) -> AgentMessage:
        """See LocalHandler."""
        if isinstance(message, LauncherHello):
            return await self._greet_launcher(client, message)
        if isinstance(message, RankHello):
            return await self._greet_rank(client, message)
        if isinstance(message, Reserve | Restore | BadCopy | Restored):
            self._check_rank(client, message)
            return await self._answer_rank(message)
        if isinstance(message, FillBegun | Staged | Sealed):
            raise ProtocolError(f"a {message.kind} message is no request")
        if client not in self._launchers:
            raise ProtocolError(f"{client.name} sent {message.kind} before a launcher's hello")
        return await self._answer_launcher(message)

    def take(self, client: Client, message: Notice) -> None:
        """See LocalHandler."""
        self._check_rank(client, message)
        self._node.check_generation(client.name, message.generation)
        match message:
            case FillBegun():
                self._replicas.fill_begun(message)
            case Staged():
                self._replicas.staged(message)
            case Sealed():
                self._replicas.sealed(message)

    def gone(self, client: Client) -> None:
        """See LocalHandler."""
        self._ranks.pop(client, None)
        process = self._launchers.pop(client, None)
        # A launcher that has come back on a second connection is not gone with its first one.
        if process is not None and process not in self._launchers.values():
            self._perform_soon(self._node.launcher_gone(process))

    def close_ranks_below(self, generation: int) -> None:
        """Hang up on ranks of older generations."""
        for client, (_, client_generation) in list(self._ranks.items()):
            if client_generation < generation:
                client.close()

    # ---- hellos

    async def _greet_launcher(self, client: Client, hello: LauncherHello) -> AgentMessage:
        process = _identify(client)
        workers = {rank: identify(pid) for rank, pid in hello.worker_pids.items()}
        actions = self._node.launcher_hello(hello, process, workers)
        self._launchers[client] = process
        client.name = f"launcher {client.pid}"
        await self._perform(actions)
        return LauncherWelcome(
            request_id=hello.request_id, job_page=str(self._job_page()), node_id=self._node.node_id or ""
        )

    async def _greet_rank(self, client: Client, hello: RankHello) -> AgentMessage:
        process = _identify(client)
        job = self._node.rank_hello(hello, process)
        page = self._replicas.open_rank(hello.rank, hello.generation)
        actions = self._node.rank_opened(hello, process, str(page))
        self._ranks[client] = hello.rank, hello.generation
        client.name = f"rank {hello.rank} of generation {hello.generation} (process {client.pid})"
        await self._perform(actions)
        return RankWelcome(
            request_id=hello.request_id,
            job_page=str(self._job_page()),
            rank_page=str(page),
            checkpoint_interval_steps=job.spec.checkpoint_interval_steps,
        )

    def _check_rank(self, client: Client, message: RankMessage | Notice) -> None:
        if client not in self._ranks:
            raise ProtocolError(f"{client.name} sent {message.kind} before a rank's hello")
        if self._ranks[client] != (message.rank, message.generation):
            raise ProtocolError(
                f"{client.name} sent {message.kind} for rank {message.rank} of generation {message.generation}"
            )

    # ---- launchers

    async def _answer_launcher(self, message: LauncherMessage) -> AgentMessage:
        node = self._node
        match message:
            case NextAssignment(request_id=request_id):
                found = await self._parking.wait_for(
                    lambda: node.next_assignment(message.after_generation), timedelta(seconds=message.timeout_s)
                )
                if found is None:
                    return NotYet(request_id=request_id)
                generation, slot, num_slots = found
                return AssignmentReply(
                    request_id=request_id, generation=generation, slot=slot, num_slots=num_slots, host=self._host
                )
            case PublishStore(request_id=request_id):
                await self._perform(node.store_published(message))
                self._replicas.publish_store(message.generation, message.host, message.port)
            case StoreAddress(request_id=request_id):
                try:
                    address = await self._parking.run_while(
                        lambda: node.check_generation("the launcher", message.generation),
                        self._replicas.store_address(message.generation, timedelta(seconds=message.timeout_s)),
                    )
                except FencedError:
                    # The job page tells the launcher why; to it this is no failure but a reason to join the next one.
                    address = None
                if address is None:
                    return NotYet(request_id=request_id)
                return StoreAddressReply(request_id=request_id, host=address.host, port=address.port)
            case WorkersStarted(request_id=request_id):
                workers = {rank: identify(pid) for rank, pid in message.pids.items()}
                await self._perform(node.workers_started(message.generation, workers))
            case WorkersExited(request_id=request_id):
                await self._perform(node.workers_exited(message))
            case Finished(request_id=request_id):
                await self._perform(node.node_finished(message))
        return Ok(request_id=request_id)

    # ---- ranks

    async def _answer_rank(self, message: RankMessage) -> AgentMessage:
        node, rank, generation, request_id = self._node, message.rank, message.generation, message.request_id
        job = node.check_generation(f"rank {rank}", generation)
        match message:
            case Reserve():
                buffers = await self._parking.run_while(
                    lambda: node.check_generation(f"rank {rank}", generation),
                    self._replicas.reserve(
                        rank,
                        job.world_size,
                        message.data_bytes,
                        message.manifest_bytes,
                        timedelta(seconds=message.timeout_s),
                    ),
                )
                return Reserved(request_id=request_id, buffers=(str(buffers[0]), str(buffers[1])))
            case Restore():
                return await self._restore(message)
            case BadCopy():
                self._replicas.drop_copy(rank, message.step, message.detail)
            case Restored():
                await self._perform(node.restored(message))
        return Ok(request_id=request_id)

    async def _restore(self, message: Restore) -> AgentMessage:
        node, rank, generation = self._node, message.rank, message.generation
        try:
            copy = await self._parking.run_while(
                lambda: node.check_generation(f"rank {rank}", generation),
                self._replicas.restorable_copy(rank, timedelta(seconds=message.timeout_s)),
            )
        except WaitTimeoutError:
            return NotYet(request_id=message.request_id)
        except NoVersionError as error:
            await self._perform(node.restore_failed(rank, generation, error.to_wire()))
            raise
        source = _ZERO if copy.step is None else copy.source
        node.restore_answered(rank, generation, source)
        return RestoreReply(request_id=message.request_id, step=copy.step, buffer=copy.buffer, source=source)


def _identify(client: Client) -> ProcessIdentity:
    process = identify(client.pid)
    if not process.started:
        raise UnavailableError(f"process {client.pid} ended while it said hello")
    return process
