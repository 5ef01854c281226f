"""`ReplicaService` of one node, put together: store, data plane, replication, restore. See `interface.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gemini_ft.agent.replicas.challenge import Credentials
from gemini_ft.agent.replicas.counts import DamageFound, ReplicaCounts
from gemini_ft.agent.replicas.data_server import DataServer
from gemini_ft.agent.replicas.fetch import ShardFetcher
from gemini_ft.agent.replicas.interface import ReplicaStatus, RestorableCopy, VerifiedCopies
from gemini_ft.agent.replicas.job import Job
from gemini_ft.agent.replicas.pages import ControlPages
from gemini_ft.agent.replicas.peers import ask, open_connection, retry_delays_s
from gemini_ft.agent.replicas.replicator import HolderLink, OwnedShard
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.agent.replicas.store import ReplicaStore
from gemini_ft.contracts.buffer_format import BufferGeometry
from gemini_ft.contracts.data_protocol import AskStore, ReserveReplica, StoreIs
from gemini_ft.contracts.errors import (
    CapacityError,
    ConflictError,
    FencedError,
    GeminiError,
    NotFoundError,
    NoVersionError,
    UnavailableError,
    WaitTimeoutError,
)
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged
from gemini_ft.contracts.messages import Address, Assign, JobSpec

__all__ = ["LocalReplicaService"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _LocalRank:
    """One rank of this node in one generation."""

    shard: OwnedShard
    fetcher: ShardFetcher | None
    restoring: asyncio.Task[RestorableCopy]


class LocalReplicaService:
    """Checkpoint memory of this node in files on tmpfs; implements `ReplicaService`."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._job: Job | None = None
        self._pages = ControlPages(settings.memory_dir)
        self._server = DataServer(settings, lambda: self._job)
        self._ranks: dict[int, _LocalRank] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._inventory: tuple[int, VerifiedCopies] | None = None
        self._ordering = asyncio.Lock()
        self.counts = ReplicaCounts()
        """See `ReplicaService`."""

    async def start(self, preferred_port: int | None) -> Address:
        """See `ReplicaService`."""
        return self._server.start(preferred_port)

    async def open_job(self, job_id: str, job_key: str, spec: JobSpec, node_id: str, incarnation: str) -> None:
        """See `ReplicaService`. Raises ConflictError while another job is open."""
        async with self._ordering:
            credentials = Credentials(job_id, job_key, node_id, incarnation)
            if self._job is not None:
                if self._job.credentials != credentials:
                    raise ConflictError(
                        f"{node_id} takes part in {self._job.credentials.job_id}; {job_id} must wait for its end"
                    )
                return
            store = ReplicaStore(self._settings.memory_dir, job_id, self._settings.memory_limit_bytes)
            try:
                copies = await store.open()
            except BaseException:
                store.close()
                raise
            self._pages = ControlPages(store.folder)
            self._job = Job(credentials, spec, store, counts=self.counts)
            self._note_damaged(copies)

    async def fence(self, generation: int) -> VerifiedCopies:
        """See `ReplicaService`. Raises FencedError for a generation below the fence."""
        job = self._require_job()
        if job.fence is not None and generation < job.fence:
            raise FencedError.of("an order to fence", generation, job.fence)
        # At once: whatever is open meets the new fence at its next message.
        job.fence = generation
        job.changes.notify()
        async with self._ordering:
            if self._inventory is not None and self._inventory[0] == generation:
                return self._inventory[1]
            if job.plan is not None and job.plan.generation == generation:
                # An order that comes late: its generation is under way, and its ranks may be writing.
                return self._note_damaged(await job.store.verify())
            await self._end_generation()
            for rank in job.store.ranks:
                await job.store.replace_locked(rank)
            copies = self._note_damaged(await job.store.verify())
            self._inventory = (generation, copies)
            return copies

    async def assign(self, assign: Assign) -> None:
        """See `ReplicaService`."""
        async with self._ordering:
            job = self._require_job()
            if job.fence is not None and assign.generation < job.fence:
                raise FencedError.of("a recovery plan", assign.generation, job.fence)
            if job.plan is not None and job.plan.generation == assign.generation:
                job.plan = assign
                job.changes.notify()
                return
            await self._end_generation()
            job.fence = assign.generation
            job.store.discard_rolled_back(assign.restore_step, assign.generation)
            if self._inventory is not None and self._inventory[0] == assign.generation:
                self._discard_unknown(job, assign)
            job.plan = assign
            await self._drop_unneeded(job, assign)
            for rank in job.own_ranks:
                self._start_rank(job, assign, rank)
            job.changes.notify()

    def open_rank(self, rank: int, generation: int) -> Path:
        """See `ReplicaService`."""
        local = self._require_rank(rank, generation)
        path = self._pages.create(rank, generation)
        local.shard.publish()
        return path

    async def reserve(
        self, rank: int, world_size: int, data_bytes: int, manifest_bytes: int, timeout: timedelta
    ) -> tuple[Path, Path]:
        """See `ReplicaService`."""
        job, local = self._require_job(), self._ranks.get(rank)
        if local is None:
            raise NotFoundError(f"rank {rank} does not run on this node")
        request = ReserveReplica(
            generation=local.shard.generation,
            rank=rank,
            world_size=world_size,
            data_bytes=data_bytes,
            manifest_bytes=manifest_bytes,
        )
        reserving = [asyncio.ensure_future(self._reserve_here(job, local, request, timeout))]
        for node_id in job.holders(rank):
            reserving.append(asyncio.ensure_future(self._reserve_replica(job, node_id, request, timeout)))
        try:
            await asyncio.gather(*reserving)
        finally:
            for reservation in reserving:
                reservation.cancel()
        pair = job.store.pair(rank)
        assert pair is not None
        return pair[0].path, pair[1].path

    async def restorable_copy(self, rank: int, timeout: timedelta) -> RestorableCopy:
        """See `ReplicaService`."""
        local = self._ranks.get(rank)
        if local is None:
            raise NotFoundError(f"rank {rank} does not run on this node")
        done, _ = await asyncio.wait({local.restoring}, timeout=timeout.total_seconds())
        if not done:
            raise WaitTimeoutError.of(f"a copy of the shard of rank {rank}", timeout)
        if local.restoring.cancelled():
            fence = self._job.fence if self._job is not None else None
            raise FencedError.of(f"rank {rank}", local.shard.generation, fence or local.shard.generation)
        return local.restoring.result()

    def drop_copy(self, rank: int, step: int, detail: str) -> None:
        """See `ReplicaService`."""
        job, local = self._require_job(), self._ranks.get(rank)
        if local is None or not local.restoring.done():
            return
        for _, buffer_file, copy in job.store.copies(rank):
            if copy.step == step:
                _log.error("rank %d found its copy of step %d bad: %s", rank, step, detail, extra={"rank": rank})
                self.counts.num_damaged[DamageFound.RESTORED] += 1
                buffer_file.discard()
                if local.fetcher is not None:
                    local.fetcher.blame_last_source()
                local.restoring = self._spawn(self._restore(job, local.shard, local.fetcher), f"restore rank {rank}")
                return

    def fill_begun(self, message: FillBegun) -> None:
        """See `ReplicaService`. Raises ProtocolError if the buffer does not agree, as do the next two."""
        self._require_rank(message.rank, message.generation).shard.fill_begun(message)

    def staged(self, message: Staged) -> None:
        """See `ReplicaService`."""
        self._require_rank(message.rank, message.generation).shard.staged(message)

    def sealed(self, message: Sealed) -> None:
        """See `ReplicaService`."""
        self._require_rank(message.rank, message.generation).shard.sealed(message)

    def publish_store(self, generation: int, host: str, port: int) -> None:
        """See `ReplicaService`."""
        job = self._require_job()
        job.require_generation("a store", generation)
        job.stores = {generation: Address(host=host, port=port)}
        job.changes.notify()

    async def store_address(self, generation: int, timeout: timedelta) -> Address | None:
        """See `ReplicaService`. Raises FencedError once a newer generation was ordered."""
        job = self._require_job()
        asking: asyncio.Task[Address | None] | None = None
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while True:
                    change = job.changes.next
                    if job.fence is not None and generation < job.fence:
                        raise FencedError.of("the wait for a store", generation, job.fence)
                    if asking is None and job.plan is not None and job.plan.generation == generation:
                        asking = asyncio.ensure_future(self._ask_store(job, job.plan, timeout))
                    if asking is not None and asking.done():
                        return asking.result()
                    changed = asyncio.ensure_future(change.wait())
                    await asyncio.wait({changed, asking} if asking else {changed}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
        except TimeoutError:
            return None
        finally:
            if asking is not None:
                asking.cancel()

    def status(self) -> ReplicaStatus:
        """See `ReplicaService`."""
        if self._job is None:
            return ReplicaStatus(redundancy_whole=False, used_bytes=0, capacity_bytes=0)
        whole = self._job.plan is not None and all(local.shard.whole for local in self._ranks.values())
        return ReplicaStatus(whole, self._job.store.used_bytes, self._job.store.capacity_bytes)

    async def close_job(self) -> None:
        """See `ReplicaService`."""
        async with self._ordering:
            job, self._job = self._job, None
            if job is not None:
                await self._leave(job)
                await job.store.remove()

    async def close(self) -> None:
        """See `ReplicaService`."""
        await self._server.close()
        async with self._ordering:
            job, self._job = self._job, None
            if job is not None:
                await self._leave(job)
                job.store.close()

    # ---- inside

    def _require_job(self) -> Job:
        if self._job is None:
            raise NotFoundError("this node takes part in no job")
        return self._job

    def _note_damaged(self, copies: VerifiedCopies) -> VerifiedCopies:
        self.counts.num_damaged[DamageFound.STORED] += len(copies.damaged)
        return copies

    def _require_rank(self, rank: int, generation: int) -> _LocalRank:
        self._require_job().require_plan(f"rank {rank}", generation)
        local = self._ranks.get(rank)
        if local is None:
            raise NotFoundError(f"rank {rank} does not run on this node in generation {generation}")
        return local

    def _start_rank(self, job: Job, plan: Assign, rank: int) -> None:
        shard = OwnedShard(job, rank, plan.generation, plan.restore_step, self._pages)
        fetcher = None
        if plan.restore_step is not None:
            sources = tuple(node_id for node_id in plan.sources.get(rank, ()) if node_id != job.credentials.node_id)
            fetcher = ShardFetcher(job, rank, plan.restore_step, plan.generation, sources, self._settings)
        restoring = self._spawn(self._restore(job, shard, fetcher), f"restore rank {rank}")
        self._ranks[rank] = _LocalRank(shard, fetcher, restoring)
        for node_id in job.holders(rank):
            link = HolderLink(job, shard, node_id, self._settings)
            self._spawn(link.run(), f"replicate rank {rank} to {node_id}")

    async def _restore(self, job: Job, shard: OwnedShard, fetcher: ShardFetcher | None) -> RestorableCopy:
        """Return the copy that the plan names, from local memory if it is there, else from a peer."""
        assert job.plan is not None
        step, rank = job.plan.restore_step, shard.rank
        if step is None or fetcher is None:
            return RestorableCopy(None, None, "zero")
        source = "local"
        if _find(job, rank, step) is None:
            if self._has_gone_on(job, rank, shard.generation):
                raise NoVersionError(
                    f"rank {rank} has gone on from step {step} in generation {shard.generation}, so that copy is gone",
                    rank=rank,
                    step=step,
                )
            source = "peer"
            await fetcher.run()
        shard.copy_arrived()
        return RestorableCopy(step, _find(job, rank, step), source)

    @staticmethod
    def _has_gone_on(job: Job, rank: int, generation: int) -> bool:
        """True if the rank fills its buffers in this generation already: the agent has restarted beside it."""
        headers = [buffer_file.header() for buffer_file in job.store.pair(rank) or ()]
        return any(header is not None and header.generation == generation for header in headers)

    @staticmethod
    def _discard_unknown(job: Job, plan: Assign) -> None:
        """Discard copies of the restored step that the plan does not count on: they are of a history that was given up.

        Only where this life of the agent has told the plan's maker what it holds: a later one may hold what was fetched
        since.
        """
        for rank, sources in plan.sources.items():
            if job.credentials.node_id not in sources:
                for _, buffer_file, copy in job.store.copies(rank):
                    if copy.step == plan.restore_step:
                        buffer_file.discard()

    async def _drop_unneeded(self, job: Job, plan: Assign) -> None:
        """Free the memory of shards that the plan keeps elsewhere, unless somebody is to fetch them from here."""
        unneeded = set(job.store.ranks) - job.held_ranks
        await job.store.drop(*(rank for rank in unneeded if job.credentials.node_id not in plan.sources.get(rank, ())))

    async def _reserve_here(self, job: Job, local: _LocalRank, request: ReserveReplica, timeout: timedelta) -> None:
        geometry = BufferGeometry.for_shard(request.data_bytes, request.manifest_bytes, self._settings.chunk_bytes)
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                # The files may change while a shard is fetched into them; the rank must map what stays.
                await asyncio.wait({local.restoring})
                self._require_rank(request.rank, request.generation)
                await job.store.reserve(request.rank, request.world_size, geometry)
        except CapacityError as error:
            raise CapacityError(f"{job.credentials.node_id}: {error}", **error.facts) from None
        except TimeoutError:
            what = f"memory for rank {request.rank} on {job.credentials.node_id}"
            raise WaitTimeoutError.of(what, timeout) from None

    async def _reserve_replica(self, job: Job, node_id: str, request: ReserveReplica, timeout: timedelta) -> None:
        last_error = "no attempt was made"
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                for delay_s in retry_delays_s(self._settings):
                    try:
                        async with open_connection(job, node_id, self._settings) as connection:
                            await ask(connection, request, patience=timeout)
                            return
                    except (UnavailableError, WaitTimeoutError, ConflictError) as error:
                        last_error = str(error)
                    await asyncio.sleep(delay_s)
        except TimeoutError:
            what = f"{node_id} to set memory for a replica of rank {request.rank} aside (last: {last_error})"
            raise WaitTimeoutError.of(what, timeout) from None

    async def _ask_store(self, job: Job, plan: Assign, timeout: timedelta) -> Address | None:
        """Ask slot 0 until it knows."""
        if job.slot == 0:
            return await job.store_address(plan.generation, timeout)
        request = AskStore(generation=plan.generation, timeout_s=timeout.total_seconds())
        for delay_s in retry_delays_s(self._settings):
            try:
                async with open_connection(job, plan.slots[0], self._settings) as connection:
                    answer = await ask(connection, request, patience=timeout + self._settings.chunk_timeout)
                if isinstance(answer, StoreIs) and answer.port:
                    return Address(host=answer.host, port=answer.port)
            except (UnavailableError, WaitTimeoutError) as error:
                _log.info("the store of generation %d is not known yet: %s", plan.generation, error)
            await asyncio.sleep(delay_s)
        return None

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, GeminiError):
            _log.error("%s: %s", task.get_name(), error)
        else:
            _log.error("%s ended by an unexpected error", task.get_name(), exc_info=error)

    async def _end_generation(self) -> None:
        """End all transfers of the own ranks and forget their pages."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ranks.clear()
        self._pages.remove_all()

    async def _leave(self, job: Job) -> None:
        await self._end_generation()
        await self._server.close_connections()
        await job.store.settle()
        self._inventory = None


def _find(job: Job, rank: int, step: int) -> int | None:
    return next((index for index, _, copy in job.store.copies(rank) if copy.step == step), None)
