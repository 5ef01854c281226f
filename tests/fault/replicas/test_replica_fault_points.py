"""Kill an agent before and after each write of the protocol; nothing that was committed is ever lost or wrong.

The test is the ranks and the coordinator: it fills real buffers and drives two agent processes through checkpoints, a
recovery with a damaged and a rolled back copy, and more checkpoints. One agent is armed with one fault point. Whenever
it dies it is started again, the plan is repeated and the rank says again what stands, as in real life.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from replica_cluster import MANIFEST, flip_bit, map_file, shard_bytes
from replica_process import ReplicaProcess, ReplicaProcessDiedError

from gemini_ft.contracts.buffer_format import BufferState, ShardBuffer, digest
from gemini_ft.contracts.control_page import RankPage
from gemini_ft.contracts.handshake import new_job_key
from gemini_ft.contracts.messages import Address, Assign, JobSpec
from gemini_ft.faults import FAULT_POINTS

JOB_ID = "job-drill"
SIZE_BYTES = 40_000
NUM_NODES = 2
POINTS = sorted(name for name in FAULT_POINTS if not name.startswith("rank."))


class Drill:
    """Two nodes of one rank each, m = 2."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names = [f"node-{index}" for index in range(NUM_NODES)]
        self.key = new_job_key()
        self.spec = JobSpec(name="drill", num_nodes=NUM_NODES, num_ranks_per_node=1, num_replicas=2)
        self.generation = 0
        self.plan: Assign | None = None
        self.processes: list[ReplicaProcess] = []
        self.addresses: list[Address] = []
        self.pages: dict[int, RankPage] = {}
        self.buffers: dict[int, list[ShardBuffer]] = {}
        self.said: dict[int, list[tuple[str, dict[str, object]]]] = {}
        self.committed: int | None = None
        self.num_deaths = 0

    def start(self, fault: str | None) -> None:
        for node, name in enumerate(self.names):
            self.processes.append(ReplicaProcess(name, self.root / name, fault if node == 0 else None))
            self.addresses.append(Address(host="127.0.0.1", port=1))
        for node in range(NUM_NODES):
            self.open(node)

    def open(self, node: int) -> None:
        try:
            address = self.processes[node].call(
                "open", job_id=JOB_ID, job_key=self.key, spec=self.spec.model_dump(), name=self.names[node]
            )
            self.addresses[node] = Address(**address)
        except ReplicaProcessDiedError:
            self.revive(node)

    def call(self, node: int, method: str, **arguments: object) -> object:
        """Call the agent of a node; if it dies, start it again and call again."""
        while True:
            try:
                return self.processes[node].call(method, partial(self.revive_others, node), **arguments)
            except ReplicaProcessDiedError:
                self.revive(node)

    def revive(self, node: int) -> None:
        """What happens after an agent was killed: a new life, the plan with its new address, the rank's hello."""
        self.num_deaths += 1
        assert self.processes[node].end() == -9
        self.processes[node] = ReplicaProcess(self.names[node], self.root / self.names[node])
        self.open(node)
        if self.plan is not None and self.plan.generation == self.generation:
            self.send_plan()
            if node in self.said:
                self.hello(node)
                for method, arguments in self.said[node]:
                    self.call(node, method, **arguments)
        elif self.generation:
            self.call(node, "fence", generation=self.generation)

    def revive_others(self, node: int) -> None:
        for other, process in enumerate(self.processes):
            if other != node and process.has_died:
                self.revive(other)

    def hello(self, rank: int) -> None:
        path = self.call(rank, "open_rank", rank=rank, generation=self.generation)
        self.pages[rank] = RankPage(map_file(Path(str(path))))

    def send_plan(self) -> None:
        assert self.plan is not None
        addresses = dict(zip(self.names, self.addresses, strict=True))
        self.plan = self.plan.model_copy(update={"addresses": addresses})
        for node in range(NUM_NODES):
            self.call(node, "assign", plan=self.plan.model_dump_json())

    def recover(self) -> int | None:
        """Fence, plan and assign as the coordinator does; return the restored step."""
        self.generation += 1
        self.said.clear()
        held: dict[tuple[int, int], set[str]] = {}
        digests: dict[tuple[int, int], set[str]] = {}
        for node, name in enumerate(self.names):
            for copy in self.call(node, "fence", generation=self.generation)["held"]:  # type: ignore[index]
                held.setdefault((copy["rank"], copy["step"]), set()).add(name)
                digests.setdefault((copy["rank"], copy["step"]), set()).add(copy["shard_digest"])
        assert all(len(found) == 1 for found in digests.values())
        step = max((step for _, step in held if all((rank, step) in held for rank in range(NUM_NODES))), default=None)
        assert self.committed is None or (step is not None and step >= self.committed)
        self.plan = Assign(
            job_id=JOB_ID,
            generation=self.generation,
            slots=dict(enumerate(self.names)),
            addresses=dict(zip(self.names, self.addresses, strict=True)),
            placement={0: (0, 1), 1: (1, 0)},
            restore_step=step,
            sources={
                rank: tuple(sorted(held[rank, step], key=lambda name: name != self.names[rank]))
                for rank in range(NUM_NODES)
                if step is not None
            },
        )
        self.send_plan()
        for rank in range(NUM_NODES):
            self.said[rank] = []
            self.hello(rank)
        for rank in range(NUM_NODES):
            paths = self.call(
                rank, "reserve", rank=rank, world_size=NUM_NODES, data_bytes=SIZE_BYTES, manifest_bytes=100
            )
            self.buffers[rank] = [ShardBuffer.open(map_file(Path(path))) for path in paths]  # type: ignore[attr-defined]
        for rank in range(NUM_NODES):
            found, index, _ = self.call(rank, "restorable_copy", rank=rank)  # type: ignore[misc]
            assert found == step
            if step is not None:
                header = self.buffers[rank][index].verify()
                assert header.step == step
                assert bytes(self.buffers[rank][index].data(SIZE_BYTES)) == shard_bytes(rank, step, SIZE_BYTES)
        if step is not None:
            self.wait_sealed_everywhere(step)
        self.committed = step
        return step

    def stage(self, rank: int, step: int) -> None:
        """One version of one rank, said to its agent as a rank says it."""
        headers = [buffer.header() for buffer in self.buffers[rank]]
        index = next(i for i, h in enumerate(headers) if (h.state, h.step) != (BufferState.SEALED, self.committed))
        buffer, data = self.buffers[rank][index], shard_bytes(rank, step, SIZE_BYTES)
        who = {"generation": self.generation, "rank": rank, "step": step}
        self.said[rank] = []
        header = buffer.begin(JOB_ID, self.generation, rank, NUM_NODES, step, SIZE_BYTES)
        self.say(rank, "fill_begun", who | {"buffer": index, "data_bytes": SIZE_BYTES, "base_step": self.committed})
        for chunk, view in buffer.chunks(header):
            start = chunk * buffer.geometry.chunk_bytes
            view[:] = data[start : start + len(view)]
            buffer.set_chunk_digest(chunk, digest(view))
            if chunk == header.num_chunks // 2:
                self.say(rank, "staged", who | {"num_chunks": chunk + 1})
        self.say(rank, "staged", who | {"num_chunks": header.num_chunks})
        sealed = buffer.seal(MANIFEST)
        self.say(rank, "sealed", who | {"shard_digest": sealed.shard_digest.hex()})

    def say(self, rank: int, method: str, arguments: dict[str, object]) -> None:
        self.said[rank].append((method, arguments))
        self.call(rank, method, **arguments)

    def checkpoint(self, step: int) -> None:
        for rank in range(NUM_NODES):
            self.stage(rank, step)
        self.wait_sealed_everywhere(step)
        self.committed = step

    def wait_sealed_everywhere(self, step: int) -> None:
        self.wait(
            f"step {step} to be sealed everywhere",
            lambda: all(self.pages[rank].sealed_everywhere_step == step for rank in range(NUM_NODES)),
        )

    def wait(self, what: str, condition: Callable[[], bool], patience_s: float = 30) -> None:
        """Wait for a condition, and bring back to life whoever dies meanwhile."""
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
            self.revive_others(-1)
            time.sleep(0.002)

    def end(self) -> None:
        for process in self.processes:
            process.end()


@pytest.fixture
def drill(memory_root: Path) -> Iterator[Drill]:
    drill = Drill(memory_root)
    yield drill
    drill.end()


@pytest.mark.parametrize(
    ("point", "nth"),
    [(point, 1) for point in POINTS] + [(point, 3) for point in POINTS if not point.startswith("store.")],
)
def test_an_agent_killed_at_this_point_costs_no_committed_version(drill: Drill, point: str, nth: int) -> None:
    drill.start(f"{point}:{nth}=kill")
    assert drill.recover() is None
    for step in range(3):
        drill.checkpoint(step)
    # Rank 0 gets ahead of rank 1, and its copy of what was committed rots: the recovery rolls back and fetches.
    drill.stage(0, 3)
    drill.wait("rank 0 to be ahead", lambda: drill.pages[0].sealed_everywhere_step == 3)
    flip_bit(drill.root / "node-0" / JOB_ID, 0, 2)
    assert drill.recover() == 2
    for step in (3, 4):
        drill.checkpoint(step)
    assert drill.recover() == 4
    assert drill.num_deaths == 1
