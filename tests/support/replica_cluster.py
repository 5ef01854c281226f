"""Several nodes' checkpoint memory in one process: real sockets on loopback, real files on tmpfs."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import pytest

from gemini_ft.agent.replicas.interface import RestorableCopy, VerifiedCopies
from gemini_ft.agent.replicas.service import LocalReplicaService
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.contracts.buffer_format import BufferHeader, ShardBuffer, digest
from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, RankPage
from gemini_ft.contracts.handshake import new_job_key
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged
from gemini_ft.contracts.messages import Address, Assign, JobSpec

PATIENCE = timedelta(seconds=20)
JOB_ID = "job-under-test"
MANIFEST = b'{"tensors": []}'


async def eventually(what: str, condition: Callable[[], object], patience: timedelta = PATIENCE) -> None:
    """Wait until `condition` holds; fail with `what` if it does not within `patience`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience.total_seconds()
    while not condition():
        assert loop.time() < deadline, f"waited {patience} for {what}"
        await asyncio.sleep(0.005)


@lru_cache(maxsize=64)
def shard_bytes(rank: int, step: int, size_bytes: int) -> bytes:
    """Bytes that no other (rank, step) has."""
    return random.Random(f"{rank}/{step}").randbytes(size_bytes)


class Rank:
    """What the worker library does with its node's memory, over the real files, without a process of its own."""

    def __init__(self, service: LocalReplicaService, rank: int, world_size: int, generation: int) -> None:
        self.service = service
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.page = RankPage(map_file(service.open_rank(rank, generation), CONTROL_PAGE_BYTES))
        self.buffers: list[ShardBuffer] = []
        self._locks: list[object] = []

    async def reserve(self, size_bytes: int, manifest_bytes: int = 256, timeout: timedelta = PATIENCE) -> None:
        paths = await self.service.reserve(self.rank, self.world_size, size_bytes, manifest_bytes, timeout)
        for path in paths:
            file = path.open("r+b")
            fcntl.flock(file, fcntl.LOCK_SH)
            self._locks.append(file)
            self.buffers.append(ShardBuffer.open(map_file(path)))

    def die(self) -> None:
        """What the kernel does at the end of a process."""
        for file in self._locks:
            file.close()  # type: ignore[attr-defined]
        self._locks.clear()

    def begin(self, step: int, data: bytes, base_step: int | None) -> int:
        """Write FILLING and tell the agent; return the index of the buffer."""
        headers = [buffer.header() for buffer in self.buffers]
        index = next(i for i, h in enumerate(headers) if h.step != base_step or h.state.name != "SEALED")
        self.buffers[index].begin(JOB_ID, self.generation, self.rank, self.world_size, step, len(data))
        self.announce(step, index, len(data), base_step)
        return index

    def announce(self, step: int, index: int, data_bytes: int, base_step: int | None) -> None:
        """Tell the agent what is being filled."""
        self.service.fill_begun(
            FillBegun(
                generation=self.generation,
                rank=self.rank,
                step=step,
                buffer=index,
                data_bytes=data_bytes,
                base_step=base_step,
            )
        )

    def come_back(self, service: LocalReplicaService) -> None:
        """Say hello to the next life of the agent."""
        self.service = service
        self.page = RankPage(map_file(service.open_rank(self.rank, self.generation), CONTROL_PAGE_BYTES))

    def stage(self, step: int, data: bytes, index: int, first: int, last: int) -> None:
        """Copy chunks first..last-1 and tell the agent."""
        self.copy_in(data, index, first, last)
        self.service.staged(Staged(generation=self.generation, rank=self.rank, step=step, num_chunks=last))

    def copy_in(self, data: bytes, index: int, first: int, last: int) -> None:
        """Copy chunks first..last-1 and their digests."""
        buffer = self.buffers[index]
        size = buffer.geometry.chunk_bytes
        for chunk in range(first, last):
            piece = data[chunk * size : (chunk + 1) * size]
            buffer.chunk(chunk, len(data))[:] = piece
            buffer.set_chunk_digest(chunk, digest(piece))

    def seal(self, step: int, index: int) -> BufferHeader:
        header = self.buffers[index].seal(MANIFEST)
        self.service.sealed(
            Sealed(generation=self.generation, rank=self.rank, step=step, shard_digest=header.shard_digest.hex())
        )
        return header

    def checkpoint(self, step: int, data: bytes, base_step: int | None) -> BufferHeader:
        """A whole checkpoint at once."""
        index = self.begin(step, data, base_step)
        self.stage(step, data, index, 0, self.buffers[index].header().num_chunks)
        return self.seal(step, index)

    async def sealed_everywhere(self, step: int) -> None:
        await eventually(
            f"step {step} of rank {self.rank} to be sealed everywhere",
            lambda: self.page.sealed_everywhere_step == step,
        )

    async def restored_bytes(self, timeout: timedelta = PATIENCE) -> tuple[RestorableCopy, bytes]:
        copy = await self.service.restorable_copy(self.rank, timeout)
        assert copy.buffer is not None
        header = self.buffers[copy.buffer].verify()
        return copy, bytes(self.buffers[copy.buffer].data(header.data_bytes))


@dataclass
class Node:
    """One node: its settings outlive its agent."""

    name: str
    settings: ReplicaSettings
    spec: JobSpec
    job_key: str
    service: LocalReplicaService = field(init=False)
    address: Address = field(init=False)

    async def start_agent(self, job_id: str = JOB_ID) -> None:
        self.service = LocalReplicaService(self.settings)
        self.address = await self.service.start(None)
        await self.service.open_job(job_id, self.job_key, self.spec, self.name, new_incarnation())

    @property
    def folder(self) -> Path:
        return self.settings.memory_dir / JOB_ID

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


class Cluster:
    """N nodes of L ranks with m replicas, placed in a ring, and optionally standbys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: dict[str, Node] = {}
        self.slots: dict[int, str] = {}
        self.generation = 0
        self.num_replicas = 2
        self.num_ranks_per_node = 1
        self.job_key = new_job_key()
        self.plan: Assign | None = None
        self._made: list[Rank] = []
        self.addresses: dict[str, Address] = {}
        """Addresses that differ from the nodes' own, for instance of a proxy."""

    async def start(
        self,
        num_nodes: int,
        *,
        num_ranks_per_node: int = 1,
        num_replicas: int = 2,
        num_standbys: int = 0,
        **settings: object,
    ) -> None:
        self.num_ranks_per_node, self.num_replicas = num_ranks_per_node, num_replicas
        for index in range(num_nodes + num_standbys):
            await self.add_node(f"node-{index}", num_nodes, **settings)
        self.slots = {slot: f"node-{slot}" for slot in range(num_nodes)}

    async def add_node(self, name: str, num_nodes: int, **settings: object) -> Node:
        spec = JobSpec(
            name="test", num_nodes=num_nodes, num_ranks_per_node=self.num_ranks_per_node, num_replicas=self.num_replicas
        )
        base = ReplicaSettings(
            memory_dir=self.root / name,
            chunk_timeout=timedelta(seconds=5),
            first_retry=timedelta(milliseconds=5),
            last_retry=timedelta(milliseconds=50),
        )
        node = Node(name, replace(base, **settings), spec, self.job_key)  # type: ignore[arg-type]
        self.nodes[name] = node
        await node.start_agent()
        return node

    async def fence(self, only: tuple[str, ...] | None = None) -> dict[str, VerifiedCopies]:
        """Raise the generation and fence every node that is in a slot or named."""
        self.generation += 1
        return {
            name: await node.service.fence(self.generation)
            for name, node in self.nodes.items()
            if only is None or name in only
        }

    async def assign(
        self,
        restore_step: int | None,
        sources: dict[int, tuple[str, ...]] | None = None,
        only: tuple[str, ...] | None = None,
    ) -> Assign:
        """Send the plan to the nodes in its slots, or only to some."""
        num_slots = len(self.slots)
        self.plan = Assign(
            job_id=JOB_ID,
            generation=self.generation,
            slots=self.slots,
            addresses={name: self.addresses.get(name, node.address) for name, node in self.nodes.items()},
            placement={
                slot: tuple((slot + i) % num_slots for i in range(self.num_replicas)) for slot in range(num_slots)
            },
            restore_step=restore_step,
            sources=sources or {},
        )
        for name in self.slots.values() if only is None else only:
            await self.nodes[name].service.assign(self.plan)
        return self.plan

    async def begin(self, restore_step: int | None = None, lost: tuple[str, ...] = ()) -> None:
        """Fence and assign, as the coordinator does for every generation."""
        inventories = await self.fence(tuple(name for name in self.nodes if name not in lost))
        held: dict[int, list[str]] = {}
        for name, copies in inventories.items():
            for version in copies.held:
                if version.step == restore_step:
                    held.setdefault(version.rank, []).append(name)
        await self.assign(restore_step, {rank: tuple(names) for rank, names in held.items()})

    def rank(self, rank: int) -> Rank:
        node = self.nodes[self.slots[rank // self.num_ranks_per_node]]
        made = Rank(node.service, rank, len(self.slots) * self.num_ranks_per_node, self.generation)
        self._made.append(made)
        return made

    async def ranks(self, size_bytes: int) -> list[Rank]:
        """All ranks of the generation, with memory reserved."""
        ranks = [self.rank(rank) for rank in range(len(self.slots) * self.num_ranks_per_node)]
        await asyncio.gather(*(rank.reserve(size_bytes) for rank in ranks))
        return ranks

    def copy_at(self, name: str, rank: int, step: int) -> bytes | None:
        """Bytes of the sealed copy in a node's files, read as any other process would."""
        for path in sorted(self.nodes[name].folder.glob(f"rank{rank}.[01]")):
            buffer = ShardBuffer.open(map_file(path, 0))
            header = buffer.header()
            if header.state.name == "SEALED" and header.step == step:
                buffer.verify()
                return bytes(buffer.data(header.data_bytes))
        return None

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.service.close()
        for rank in self._made:
            rank.die()


def flip_bit(folder: Path, rank: int, step: int, offset: int = 5000) -> None:
    """Flip one bit of the data of a sealed copy in a node's files."""
    for path in folder.glob(f"rank{rank}.[01]"):
        view = map_file(path, 0)
        header = ShardBuffer.open(view).header()
        if header.state.name == "SEALED" and header.step == step:
            view[4096 + offset] ^= 0x10
            return
    raise AssertionError(f"no copy of rank {rank} at step {step} in {folder}")


def map_file(path: Path, size_bytes: int = 0) -> memoryview:
    """Map a file as another process would."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), size_bytes))


@pytest.fixture
def memory_root() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="gemini-test-", dir="/dev/shm"))
    yield root
    shutil.rmtree(root)


@pytest.fixture
async def cluster(memory_root: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(memory_root)
    yield cluster
    await cluster.close()
