"""Copying a state into a mapped buffer: small and host-mutable parts at the call, large ones behind training.

What only `optimizer.step()` changes (parameters and optimizer state) is copied in a thread while forward and backward
run. The optimizer's pre-step hook waits for the rest. A tensor that something else changes meanwhile is noticed by its
version counter, and the version is not sealed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import xxhash

from gemini_ft.contracts.buffer_format import ShardBuffer
from gemini_ft.contracts.errors import GeminiError, StateError, WaitTimeoutError
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged
from gemini_ft.faults import fault_point
from gemini_ft.worker._blocks import dense_block
from gemini_ft.worker.agent_client import AgentClient
from gemini_ft.worker.device_copy import BlockCopier, copier_for
from gemini_ft.worker.state_codec import FlatState

__all__ = ["Stager", "storages_of"]

_LATE_BYTES = 16 << 10
_CHUNKS_A_NOTICE = 8


def storages_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Return the addresses of all memory that only the optimizers' steps change: parameters and optimizer state."""
    tensors: list[object] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            tensors += group["params"]
        for param, state in optimizer.state.items():
            tensors += [param, *state.values()]
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and isinstance(tensor, torch.Tensor)
    }


@dataclass(frozen=True, slots=True)
class _Plan:
    """Order of the blocks in the buffer: first those that are copied at the call, then those behind training."""

    now: tuple[int, ...]
    late: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, flat: FlatState, late_storages: Collection[int]) -> _Plan:
        roots = [i for i, spec in enumerate(flat.specs) if spec.alias_of is None]
        late = tuple(i for i in roots if _may_be_late(flat, i, late_storages))
        now = tuple(sorted(set(roots) - set(late)))
        offsets, end = [0] * len(flat.specs), 0
        for index in (*now, *late):
            offsets[index] = end
            end += flat.specs[index].num_bytes
        for index, spec in enumerate(flat.specs):
            if spec.alias_of is not None:
                offsets[index] = offsets[spec.alias_of]
        return cls(now, late, tuple(offsets), end)


def _may_be_late(flat: FlatState, index: int, late_storages: Collection[int]) -> bool:
    tensor = flat.tensors[index]
    return (
        flat.specs[index].num_bytes >= _LATE_BYTES
        and tensor.untyped_storage().data_ptr() in late_storages
        # Tensors made in inference mode do not count their changes.
        and not tensor.is_inference()
    )


class _ChunkWriter:
    """Writes blocks one after another, and a digest for every chunk that is full."""

    def __init__(self, buffer: ShardBuffer, num_bytes: int, on_chunk: Callable[[int], None]) -> None:
        self._buffer = buffer
        self._num_bytes = num_bytes
        self._on_chunk = on_chunk
        self._copiers: dict[torch.device, BlockCopier] = {}
        self._data = buffer.data(num_bytes)
        self._hasher = xxhash.xxh3_128()
        self._end = 0

    def prepare(self, devices: Iterable[torch.device]) -> None:
        for device in devices:
            copier = self._copiers.setdefault(device, copier_for(device))
            copier.prepare()

    def write(self, block: torch.Tensor) -> None:
        copier, chunk_bytes, start = self._copiers[block.device], self._buffer.geometry.chunk_bytes, 0
        while start < block.numel():
            size = min(block.numel() - start, chunk_bytes - self._end % chunk_bytes)
            if self._end % chunk_bytes == 0:
                fault_point("rank.before_chunk")
            source = copier.copy(block[start : start + size], self._data[self._end : self._end + size])
            self._hasher.update(source)
            start += size
            self._end += size
            if self._end % chunk_bytes == 0 or self._end == self._num_bytes:
                index = (self._end - 1) // chunk_bytes
                self._buffer.set_chunk_digest(index, self._hasher.digest())
                self._hasher.reset()
                fault_point("rank.after_chunk")
                self._on_chunk(index + 1)


@dataclass(frozen=True, slots=True)
class _Task:
    step: int
    buffer: ShardBuffer
    flat: FlatState
    plan: _Plan
    writer: _ChunkWriter
    versions: tuple[int, ...]


class Stager:
    """Fills buffers of one rank; at most one version is being staged at a time."""

    def __init__(self, client: AgentClient, wait_timeout: timedelta) -> None:
        self._client = client
        self._wait_timeout = wait_timeout
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: GeminiError | None = None
        self._thread = threading.Thread(target=self._run, name="gemini-ft-staging", daemon=True)
        self._thread.start()

    @property
    def error(self) -> GeminiError | None:
        """Why the last version could not be staged."""
        return self._error

    def begin(
        self,
        step: int,
        flat: FlatState,
        late_storages: Collection[int],
        buffer: ShardBuffer,
        buffer_index: int,
        base_step: int | None,
    ) -> None:
        """Begin to stage `flat` as `step`; everything but parameters and optimizer state is copied on return.

        Raises:
            CapacityError: the state is larger than what was reserved.
        """
        me = self._client.identity
        plan = _Plan.of(flat, late_storages)
        fault_point("rank.before_filling")
        buffer.begin(me.job_id, me.generation, me.rank, me.world_size, step, plan.num_bytes)
        fault_point("rank.after_filling")
        self._client.fill_begun(
            FillBegun(
                generation=me.generation,
                rank=me.rank,
                step=step,
                buffer=buffer_index,
                data_bytes=plan.num_bytes,
                base_step=base_step,
            )
        )
        fault_point("rank.after_fill_begun")
        writer = _ChunkWriter(buffer, plan.num_bytes, lambda num_chunks: self._report(step, num_chunks))
        writer.prepare({flat.tensors[i].device for i in (*plan.now, *plan.late)})
        for index in plan.now:
            writer.write(dense_block(flat.tensors[index]))
        versions = tuple(flat.tensors[i]._version for i in plan.late)
        self._idle.clear()
        self._tasks.put(_Task(step, buffer, flat, plan, writer, versions))

    def wait(self) -> None:
        """Wait until nothing is being staged.

        Raises:
            WaitTimeoutError: the staging thread did not finish in time.
        """
        if not self._idle.wait(self._wait_timeout.total_seconds()):
            raise WaitTimeoutError.of(f"the staging thread of rank {self._client.identity.rank}", self._wait_timeout)

    def close(self) -> None:
        """Finish what is being staged and end the thread."""
        self._tasks.put(None)
        self._thread.join(self._wait_timeout.total_seconds())

    def _report(self, step: int, num_chunks: int) -> None:
        if num_chunks % _CHUNKS_A_NOTICE == 0:
            self._client.staged(self._notice(step, num_chunks))

    def _notice(self, step: int, num_chunks: int) -> Staged:
        me = self._client.identity
        return Staged(generation=me.generation, rank=me.rank, step=step, num_chunks=num_chunks)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._finish(task)
            except GeminiError as error:
                self._error = error
            except Exception as error:  # the loop must hear of it at the next agreement, whatever it is
                self._error = StateError(f"staging of step {task.step} failed: {error!r}", path="")
            finally:
                self._idle.set()

    def _finish(self, task: _Task) -> None:
        for index in task.plan.late:
            task.writer.write(dense_block(task.flat.tensors[index]))
        for index, version in zip(task.plan.late, task.versions, strict=True):
            if task.flat.tensors[index]._version != version:
                path = task.flat.specs[index].path
                raise StateError(
                    f"tensor {path} was changed outside optimizer.step() while step {task.step} was being copied; "
                    "change it before checkpointer.step() is called, or keep it out of the optimizer",
                    path=path,
                )
        num_chunks = task.buffer.header().num_chunks
        self._client.staged(self._notice(task.step, num_chunks))
        fault_point("rank.before_sealed")
        header = task.buffer.seal(task.flat.manifest(task.plan.offsets).to_json())
        fault_point("rank.after_sealed")
        me = self._client.identity
        self._client.sealed(
            Sealed(generation=me.generation, rank=me.rank, step=task.step, shard_digest=header.shard_digest.hex())
        )
        fault_point("rank.after_sealed_sent")
