"""The agent of one node: performs what `Node` decides, and joins its servers into one process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from gemini_ft.agent.actions import (
    Action,
    Actions,
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
    WatchProcess,
)
from gemini_ft.agent.control_link import ControlLink
from gemini_ft.agent.imports_exchange import JobImports
from gemini_ft.agent.launch import LauncherStarter
from gemini_ft.agent.local_requests import LocalRequests
from gemini_ft.agent.local_server import LocalServer, default_socket_path
from gemini_ft.agent.metrics import AgentMetrics
from gemini_ft.agent.node import Node
from gemini_ft.agent.pages import JobPageFile, RankPageFile
from gemini_ft.agent.parking import Parking
from gemini_ft.agent.persistence import StateFolder
from gemini_ft.agent.rank_watch import ProcessWatch
from gemini_ft.agent.records import JobRecord, NodeRecord, ProcessIdentity
from gemini_ft.agent.replicas.interface import ReplicaService
from gemini_ft.agent.settings import AgentSettings
from gemini_ft.agent.tasks import end_tasks, first_to_end
from gemini_ft.contracts.errors import ConfigurationError, GeminiError, UnavailableError
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import (
    Address,
    Assign,
    CheckpointNow,
    CloseJob,
    Fence,
    Heartbeat,
    Hold,
    Inventory,
    Order,
    OrderDone,
    OrderRefused,
    OrderReply,
    Register,
    StartJob,
)
from gemini_ft.metrics_listener import serve_metrics

__all__ = ["Agent"]

_FIRST_STEP_POLL_S = 0.02
_IDLE_POLL_S = 0.1
_LAUNCHER_RETRY_S = 1.0
_EXIT_CODE_WAIT_S = 0.2

logger = logging.getLogger(__name__)


class Agent:
    """One life of a node's agent. `run` serves until `stop` is set or the node's identity is refused."""

    def __init__(self, settings: AgentSettings, state: StateFolder, replicas: ReplicaService) -> None:
        self._settings = settings
        self._state = state
        self._replicas = replicas
        self._node = Node(new_incarnation(), state.load_node().node_id, settings.max_launcher_starts)
        self._address: Address | None = None
        self._job_page: JobPageFile | None = None
        self._rank_pages: dict[str, RankPageFile | None] = {}
        self._parking = Parking()
        self._watch = ProcessWatch(self._process_ended)
        self.socket_path = settings.socket_path or default_socket_path(state.path)
        self._requests = LocalRequests(
            self._node,
            replicas,
            self._perform,
            self._perform_soon,
            self._parking,
            self._job_page_path,
            settings.host,
        )
        self._server = LocalServer(self.socket_path, self._requests)
        self._starter = LauncherStarter(state.path, settings.effective_log_dir, self.socket_path, os.environ)
        self._link = ControlLink(settings.nats_access, settings.heartbeat_interval, self)
        self._order_lock = asyncio.Lock()
        self._persist_lock = asyncio.Lock()
        self._num_saves_wanted = 0
        self._num_saves_done = 0
        self._launcher_lock = asyncio.Lock()
        self._obeying: dict[str, asyncio.Task[OrderReply]] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve.

        Raises:
            ConflictError: the coordinator refuses this node's identity.
            GeminiError: the node cannot serve at all.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._close_pages)
            stack.push_async_callback(self._replicas.close)
            stack.callback(self._watch.close)
            stack.push_async_callback(self._end_background)
            stack.push_async_callback(self._server.close)
            await self._start()
            if self._settings.metrics_listen is not None:
                metrics = AgentMetrics(self._node, self._replicas, self._link)
                url = await stack.enter_async_context(serve_metrics(self._settings.metrics_listen, metrics))
                logger.info("serving metrics at %s", url)
            await first_to_end(self._link.run(), self._read_pages(), stop.wait())

    def log_facts(self) -> Mapping[str, Any]:
        """Return what everything that this process logs is about."""
        job = self._node.job
        about_job = {"job_id": job.job_id, "generation": job.generation} if job else {}
        return {"node_id": self._node.node_id, **about_job}

    # ---- for the control link

    @property
    def node_id(self) -> str | None:
        """See ControlNode."""
        return self._node.node_id

    def registration(self) -> Register:
        """See ControlNode."""
        return Register(
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            hostname=socket.gethostname(),
            labels=dict(self._settings.labels),
            address=self._own_address(),
            token=self._settings.registration_token(),
        )

    async def registered(self, node_id: str) -> None:
        """See ControlNode."""
        if node_id != self._node.node_id:
            self._node.registered(node_id)
            await self._save_node()

    def heartbeat(self, sequence: int) -> Heartbeat | None:
        """See ControlNode."""
        self._observe_pages()
        status = self._replicas.status()
        return self._node.heartbeat(
            sequence,
            self._own_address(),
            self._settings.heartbeat_interval.total_seconds(),
            status.redundancy_whole,
            status.used_bytes,
            status.capacity_bytes,
        )

    @property
    def log_dir(self) -> Path:
        """See ControlNode."""
        return self._settings.effective_log_dir

    def imports(self) -> JobImports | None:
        """See ControlNode."""
        job = self._node.job
        return None if job is None or job.closing is not None else self._starter.imports(job.job_id, job.spec)

    async def obey(self, order: Order) -> OrderReply:
        """See ControlNode. An order that is repeated while it is being carried out is carried out once."""
        key = order.model_dump_json()
        task = self._obeying.get(key)
        if task is None:
            task = self._obeying[key] = asyncio.create_task(self._obey(order))
            task.add_done_callback(lambda _: self._obeying.pop(key))
        return await asyncio.shield(task)

    # ---- orders

    async def _obey(self, order: Order) -> OrderReply:
        began = time.monotonic()
        reply: OrderReply
        try:
            async with self._order_lock:
                reply = await self._carry_out(order)
        except GeminiError as error:
            logger.warning("refused %s of %s: %s", order.kind, order.job_id, error)
            return OrderRefused(node_id=self._node.node_id or "", error=error.to_wire())
        except OSError as error:
            logger.error("%s of %s failed", order.kind, order.job_id, exc_info=error)
            refusal = UnavailableError(f"node {self._node.node_id} cannot carry out {order.kind}: {error}")
            return OrderRefused(node_id=self._node.node_id or "", error=refusal.to_wire())
        logger.info("carried out %s of %s in %.0f ms", order.kind, order.job_id, 1000 * (time.monotonic() - began))
        return reply

    async def _carry_out(self, order: Order) -> OrderReply:
        match order:
            case StartJob():
                await self._perform(self._node.start_job(order))
            case Fence():
                return await self._fence(order)
            case Assign():
                if self._node.needs_fence(order):
                    await self._fence(Fence(job_id=order.job_id, generation=order.generation))
                await self._perform(self._node.assign(order))
                await self._replicas.assign(order)
                await self._perform(self._node.assignment_taken(order.generation))
            case Hold():
                await self._perform(self._node.hold(order))
            case CheckpointNow():
                await self._perform(self._node.checkpoint_now(order))
            case CloseJob():
                await self._close_job(order)
        return OrderDone(node_id=self._node.node_id or "", incarnation=self._node.incarnation)

    async def _fence(self, order: Fence) -> Inventory:
        await self._perform(self._node.fence(order))
        # What the dead ranks wrote last; their pages go with the fence.
        self._observe_pages()
        committed_step = self._node.job.committed_step if self._node.job else None
        await self._perform(self._node.fence_enforced(order.generation))
        verified = await self._replicas.fence(order.generation)
        for sentence in verified.damaged:
            logger.error("damaged copy: %s", sentence)
        return Inventory(
            node_id=self._node.node_id or "",
            incarnation=self._node.incarnation,
            generation=order.generation,
            held=verified.held,
            damaged=verified.damaged,
            committed_step=committed_step,
        )

    async def _close_job(self, order: CloseJob) -> None:
        actions = self._node.close_job(order)
        if not actions:
            return
        await self._perform(actions)
        left = await self._watch.wait_ended(self._node.live_processes, self._settings.close_grace)
        await self._end_processes(tuple(left))
        await self._replicas.close_job()
        closed = self._node.job_closed()
        async with self._persist_lock:
            await asyncio.to_thread(self._state.remove_job)
        if self._job_page is not None:
            self._job_page.remove()
            self._job_page = None
        self._starter.forget(order.job_id)
        await self._perform(closed)
        logger.info("job %s is closed: %s %s", order.job_id, order.outcome, order.reason)

    # ---- actions

    async def _perform(self, actions: Actions) -> None:
        for action in actions:
            await self._do(action)

    def _perform_soon(self, actions: Actions) -> None:
        if actions:
            self._spawn(self._perform(actions))

    async def _do(self, action: Action) -> None:
        match action:
            case OpenJob():
                await self._open_job()
            case Persist():
                await self._persist()
            case OrderGeneration(generation=generation):
                if self._job_page is not None:
                    self._job_page.order_generation(generation)
            case HoldGeneration(generation=generation):
                self._open_page().page.hold_generation = generation
            case RequestCheckpoint(request=request):
                page = self._open_page().page
                page.checkpoint_request = max(page.checkpoint_request, request)
            case MarkClosed():
                if self._job_page is not None:
                    self._job_page.page.closed = True
            case EndProcesses(processes=processes):
                await self._end_processes(processes)
            case CloseClients(generation=generation):
                self._requests.close_ranks_below(generation)
            case WatchProcess(process=process):
                self._watch.watch(process)
            case EnsureLauncher():
                await self._ensure_launcher()
            case AnswerParked():
                self._parking.notify()
            case Beat():
                self._link.beat()

    async def _open_job(self) -> None:
        job = self._node.job
        assert job is not None
        if self._node.node_id is None:
            raise ConfigurationError(
                f"{self._state.path} holds job {job.job_id} but no node identity; remove job.json from it to start anew"
            )
        await self._replicas.open_job(job.job_id, job.job_key, job.spec, self._node.node_id, self._node.incarnation)
        if self._job_page is None:
            self._job_page = JobPageFile(self._page_path(job.job_id))

    async def _persist(self) -> None:
        self._num_saves_wanted += 1
        wanted = self._num_saves_wanted
        async with self._persist_lock:
            # Whoever waited behind a save that began after its request has its state on disk.
            if self._node.job is None or self._num_saves_done >= wanted:
                return
            saving = self._num_saves_wanted
            await asyncio.to_thread(self._state.save_job, self._node.record())
            self._num_saves_done = saving

    async def _end_processes(self, processes: tuple[ProcessIdentity, ...]) -> None:
        for process in await self._watch.end(processes, self._settings.kill_timeout):
            logger.error("process %d did not die of SIGKILL; its memory is taken away from it", process.pid)

    async def _ensure_launcher(self) -> None:
        async with self._launcher_lock:
            job = self._node.job
            if job is None or not self._node.wants_launcher:
                return
            started = self._starter.start(job.job_id, job.spec)
            if started is None:
                logger.info("a launcher of job %s lives that has not connected yet", job.job_id)
                self._later(_LAUNCHER_RETRY_S, (EnsureLauncher(),))
                return
            await self._perform(self._node.launcher_started(started))
            self._expect_hello(started)

    def _expect_hello(self, launcher: ProcessIdentity) -> None:
        timeout_s = self._settings.launcher_hello_timeout.total_seconds()

        async def check() -> None:
            await asyncio.sleep(timeout_s)
            job = self._node.job
            if job is not None and job.launcher == launcher and not job.launcher_connected:
                logger.error("waited %g s for launcher %d to connect; it is ended", timeout_s, launcher.pid)
                await self._end_processes((launcher,))

        self._spawn(check())

    def _process_ended(self, process: ProcessIdentity, code: int | None) -> None:
        self._starter.reap()
        self._observe_pages()
        job = self._node.job
        if job is not None and process == job.launcher:
            level = logging.INFO if job.closing else logging.WARNING
            logger.log(
                level, "launcher %d ended with %s; see %s", process.pid, code, self._starter.log_path(job.job_id)
            )
        if code is None and job is not None and job.launcher_connected and process != job.launcher:
            # Only its launcher knows how it ended; unasked, a rank that ended well would be taken for a failed one.
            self._spawn(self._report_end_later(process))
            return
        self._perform_soon(self._node.process_ended(process, code))

    async def _report_end_later(self, process: ProcessIdentity) -> None:
        await asyncio.sleep(_EXIT_CODE_WAIT_S)
        await self._perform(self._node.process_ended(process, None))

    # ---- life

    async def _start(self) -> None:
        self._address = await self._replicas.start(self._state.load_node().data_port)
        await self._save_node()
        record = self._state.load_job()
        if record is not None:
            await self._adopt(record)
        await self._server.start()
        await self._ensure_launcher()
        logger.info(
            "node %s (incarnation %s) serves ranks at %s and peers at %s:%d",
            self._node.node_id or "without identity",
            self._node.incarnation,
            self.socket_path,
            self._own_address().host,
            self._own_address().port,
        )

    async def _adopt(self, record: JobRecord) -> None:
        self._job_page = JobPageFile(self._page_path(record.job_id))
        actions = self._node.adopt(record, self._job_page.page.closed)
        # Checkpoint memory makes new pages and removes those of the former life; what is mapped stays readable.
        self._observe_pages()
        await self._open_job()
        await self._perform(actions)
        await self._perform(self._node.fence_enforced(record.generation))
        assignment = record.assignment
        if assignment is not None and assignment.generation == record.generation:
            await self._replicas.assign(assignment)
            if record.store is not None:
                self._replicas.publish_store(record.generation, record.store.host, record.store.port)
            await self._perform(self._node.assignment_taken(record.generation))
        elif record.generation:
            await self._replicas.fence(record.generation)
        if self._node.job is not None and self._node.job.launcher is not None:
            self._expect_hello(self._node.job.launcher)
        logger.info("took up job %s again in generation %d", record.job_id, record.generation)

    async def _end_background(self) -> None:
        await end_tasks([*self._obeying.values(), *self._background])

    def _close_pages(self) -> None:
        for page in (self._job_page, *self._rank_pages.values()):
            if page is not None:
                page.close()

    async def _save_node(self) -> None:
        record = NodeRecord(node_id=self._node.node_id, data_port=self._own_address().port)
        await asyncio.to_thread(self._state.save_node, record)

    # ---- pages

    async def _read_pages(self) -> None:
        while True:
            self._observe_pages()
            await asyncio.sleep(_FIRST_STEP_POLL_S if self._node.awaits_first_step else _IDLE_POLL_S)

    def _observe_pages(self) -> None:
        ranks = list(self._node.job.ranks.values()) if self._node.job else []
        wanted = {rank.page for rank in ranks if rank.page}
        for path in [path for path in self._rank_pages if path not in wanted]:
            page = self._rank_pages.pop(path)
            if page is not None:
                page.close()
        for rank in ranks:
            if not rank.page:
                continue
            if rank.page not in self._rank_pages:
                self._rank_pages[rank.page] = _map_rank_page(rank.page)
            page = self._rank_pages[rank.page]
            if page is not None:
                self._perform_soon(self._node.observe(rank.rank, rank.generation, page.read()))

    # ---- helpers

    def _page_path(self, job_id: str) -> Path:
        return self._state.path / f"{job_id}.page"

    def _open_page(self) -> JobPageFile:
        if self._job_page is None:
            raise UnavailableError("the job is not open on this node yet; try again")
        return self._job_page

    def _job_page_path(self) -> Path:
        return self._open_page().path

    def _own_address(self) -> Address:
        assert self._address is not None
        return self._address

    def _later(self, delay_s: float, actions: Actions) -> None:
        async def wait_and_perform() -> None:
            await asyncio.sleep(delay_s)
            await self._perform(actions)

        self._spawn(wait_and_perform())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s", error, exc_info=None if isinstance(error, GeminiError) else error)


def _map_rank_page(path: str) -> RankPageFile | None:
    try:
        return RankPageFile(Path(path))
    except OSError as error:
        logger.info("the control page %s of a former life cannot be read: %s", path, error)
        return None
