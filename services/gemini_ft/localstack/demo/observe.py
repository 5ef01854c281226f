"""What the demo sees of the running job: the losses that the ranks write, the API, and the memory folders."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import EventModel, JobModel, NodeModel, RankModel
from gemini_ft.contracts.buffer_format import HEADER_PAGE_BYTES, BufferGeometry, ShardBuffer
from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES
from gemini_ft.contracts.errors import CapacityError, ProtocolError, UnavailableError
from gemini_ft.contracts.messages import RankState
from gemini_ft.localstack.demo.losses import LossLogs
from gemini_ft.localstack.demo.records import MemoryRecord
from gemini_ft.localstack.stack import LocalNode, LocalStack

__all__ = ["JobObserver", "Stalls", "memory_of", "shard_bytes"]

_API_PERIOD_S = 0.2
_MEMORY_PERIOD_S = 0.5
_HEADER_ONLY = BufferGeometry(capacity_bytes=0, chunk_bytes=1, manifest_capacity_bytes=0)


@dataclass
class Stalls:
    """How long each rank has waited for checkpoints, over all generations."""

    _newest: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def add(self, rank: RankModel) -> None:
        """Take what a heartbeat says; a rank counts afresh in each generation."""
        if rank.finished_step is not None:
            first = 0 if rank.restored_step is None else rank.restored_step + 1
            self._newest[rank.generation, rank.rank] = (rank.stall_us, rank.finished_step + 1 - first)

    def per_step_ms(self) -> dict[int, float]:
        """rank -> mean stall of a finished step."""
        totals: dict[int, tuple[int, int]] = {}
        for (_, rank), (stall_us, num_steps) in self._newest.items():
            before = totals.get(rank, (0, 0))
            totals[rank] = (before[0] + stall_us, before[1] + num_steps)
        return {rank: stall_us / 1000 / num_steps for rank, (stall_us, num_steps) in totals.items() if num_steps}


class JobObserver:
    """The newest known state of one job. `poll` is cheap and may be called in a tight loop."""

    def __init__(self, stack: LocalStack, client: ApiClient, job: JobModel, losses: LossLogs) -> None:
        self._stack = stack
        self._client = client
        self.losses = losses
        self.job = job
        self.nodes: list[NodeModel] = []
        self.events: list[EventModel] = []
        self.api_answers = True
        self.stalls = Stalls()
        self.memory: dict[str, MemoryRecord] = {}
        self._api_due = self._memory_due = time.monotonic()

    def poll(self) -> None:
        """Look again at whatever is due."""
        self.losses.poll()
        if time.monotonic() >= self._api_due:
            self._ask_api()
            self._api_due = time.monotonic() + _API_PERIOD_S
        if time.monotonic() >= self._memory_due:
            self._measure_memory()
            self._memory_due = time.monotonic() + _MEMORY_PERIOD_S

    @property
    def members(self) -> list[NodeModel]:
        """The nodes in the job's slots, by slot."""
        by_id = {node.node_id: node for node in self.nodes}
        return [by_id[node_id] for _, node_id in sorted(self.job.slots.items()) if node_id in by_id]

    def is_whole(self, step: int) -> bool:
        """Whether every rank of the job's generation has a version of `step` or newer on all its holders.

        The newest version is always on its way there, so "all of the newest" would hardly ever be seen.
        """
        spec = self.job.spec
        ranks = [
            rank
            for node in self.members
            if node.is_alive
            for rank in node.ranks
            if rank.generation == self.job.generation and rank.state is RankState.RUNNING
        ]
        return len(ranks) == spec.num_nodes * spec.num_ranks_per_node and all(
            rank.sealed_everywhere_step is not None and rank.sealed_everywhere_step >= step for rank in ranks
        )

    def _ask_api(self) -> None:
        try:
            self.job = self._client.job(self.job.job_id)
            self.nodes = list(self._client.nodes())
            after = self.events[-1].id if self.events else 0
            self.events += self._client.events(after=after, job_id=self.job.job_id)
        except UnavailableError:
            self.api_answers = False
            return
        self.api_answers = True
        for node in self.members:
            for rank in node.ranks:
                self.stalls.add(rank)

    def _measure_memory(self) -> None:
        spec = self.job.spec
        shard = max((shard_bytes(node.memory) for node in self._stack.nodes.values()), default=0)
        if not shard:
            return
        bound = 2 * spec.num_replicas * shard * spec.num_ranks_per_node
        for node in self._stack.nodes.values():
            used = max(memory_of(node), self.memory[node.name].used_bytes if node.name in self.memory else 0)
            self.memory[node.name] = MemoryRecord(node=node.name, used_bytes=used, bound_bytes=bound)


def memory_of(node: LocalNode) -> int:
    """Bytes that the node's memory folder really takes."""
    return sum(size for _, size in _files(node.memory))


def shard_bytes(memory: Path) -> int:
    """Size of the largest shard that a memory folder holds; 0 without any."""
    return max((_data_bytes(path) for path, size in _files(memory) if size > CONTROL_PAGE_BYTES), default=0)


def _data_bytes(path: Path) -> int:
    """What the header of a buffer says; 0 if it is none, or is being written."""
    try:
        # A copy of the page: a mapping of a file that is being replaced could end this process.
        with path.open("rb") as file:
            page = file.read(HEADER_PAGE_BYTES)
        return ShardBuffer(memoryview(page), _HEADER_ONLY).header().data_bytes
    except (FileNotFoundError, CapacityError, ProtocolError):
        return 0


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if path.is_file():
            yield path, status.st_blocks * 512
