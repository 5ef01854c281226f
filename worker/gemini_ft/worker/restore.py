"""Bringing a rank's state back: a verified local copy, loaded in place with one copy, once all ranks have one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from gemini_ft.contracts.buffer_format import BufferHeader, ShardBuffer
from gemini_ft.contracts.errors import GeminiError, IntegrityError, NoVersionError, ProtocolError, StateError
from gemini_ft.contracts.local_protocol import BadCopy, Restore, RestoreReply
from gemini_ft.faults import fault_point
from gemini_ft.worker.agent_client import AgentClient
from gemini_ft.worker.agreement import Agreement
from gemini_ft.worker.optimizer_state import predicted_optimizer_state
from gemini_ft.worker.rng import RngState
from gemini_ft.worker.state_codec import FlatState, Manifest, flatten, unflatten
from gemini_ft.worker.stateful import PredictsState, Stateful

__all__ = ["RestorableShard", "find_shard", "find_shards_together", "load_parts", "predicted_state"]

_PARK_S = 5.0


@dataclass(frozen=True, slots=True)
class RestorableShard:
    """A verified copy of this rank's shard; without a step the job starts from zero."""

    step: int | None
    buffer_index: int | None = None
    buffer: ShardBuffer | None = None
    manifest: Manifest | None = None


def predicted_state(parts: Mapping[str, Stateful]) -> FlatState:
    """Return the state of all parts as it will be after the first step; what does not exist yet is on meta.

    Raises:
        StateError: a part cannot be kept; the sentence names it.
    """
    return flatten({name: _predicted(part) for name, part in parts.items()}, allow_meta=True)


def _predicted(part: Stateful) -> Mapping[str, Any]:
    if isinstance(part, torch.optim.Optimizer):
        return predicted_optimizer_state(part)
    if isinstance(part, PredictsState):
        return part.predicted_state_dict()
    return part.state_dict()


def find_shard(client: AgentClient, buffers: tuple[ShardBuffer, ShardBuffer], timeout: timedelta) -> RestorableShard:
    """Wait for the agent's copy of the step in the recovery plan, and check all of it; a bad one is reported.

    Raises:
        NoVersionError: every copy in memory is bad or gone.
        WaitTimeoutError: the agent had no copy in time.
    """
    me = client.identity
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        fault_point("rank.before_restore")
        request = Restore(
            request_id=0, generation=me.generation, rank=me.rank, timeout_s=min(_PARK_S, left.total_seconds())
        )
        reply = client.ask(request, f"a verified copy of rank {me.rank}'s shard", left)
        if not isinstance(reply, RestoreReply):
            raise ProtocolError(f"the agent answered a restore request with {reply.kind}")
        if reply.step is None or reply.buffer is None:
            return RestorableShard(None)
        buffer = buffers[reply.buffer]
        try:
            return RestorableShard(reply.step, reply.buffer, buffer, _checked_manifest(client, buffer, reply.step))
        except (IntegrityError, ProtocolError) as error:
            bad = BadCopy(request_id=0, generation=me.generation, rank=me.rank, step=reply.step, detail=str(error))
            client.ask(bad, "the answer to the report of a bad copy", left)


def _checked_manifest(client: AgentClient, buffer: ShardBuffer, step: int) -> Manifest:
    me = client.identity
    header = buffer.verify()
    _check_header(header, me.job_id, me.rank, me.world_size, step)
    try:
        manifest = Manifest.from_json(buffer.manifest())
    except StateError as error:
        raise IntegrityError(str(error), where="manifest") from error
    for spec, offset in zip(manifest.tensors, manifest.offsets, strict=True):
        if offset < 0 or offset + spec.num_bytes > header.data_bytes:
            raise IntegrityError(f"the manifest places tensor {spec.path} outside the data", where="manifest")
    return manifest


def _check_header(header: BufferHeader, job_id: str, rank: int, world_size: int, step: int) -> None:
    found = (header.job_id, header.rank, header.step)
    if found != (job_id, rank, step):
        raise ProtocolError(f"the agent's copy is of (job, rank, step) {found}, not {(job_id, rank, step)}")
    if header.world_size != world_size:
        raise NoVersionError(
            f"the version in memory is of {header.world_size} ranks, this job has {world_size}; "
            "another world size cannot be restored from memory"
        )


def load_parts(parts: Mapping[str, Stateful], shard: RestorableShard, live: FlatState) -> None:
    """Load a verified shard into the parts, in order and RNG last; every rank calls it at the same time.

    Raises:
        StateError: a part refuses its state.
    """
    buffer, manifest = shard.buffer, shard.manifest
    if buffer is None or manifest is None:
        return
    data = buffer.data(buffer.header().data_bytes)

    def fill(index: int, block: torch.Tensor) -> None:
        start = manifest.offsets[index]
        source = np.frombuffer(data[start : start + block.numel()], dtype=np.uint8)
        if block.device.type == "cpu":
            np.copyto(block.numpy(), source)
        else:
            block.copy_(torch.from_numpy(source))

    state = unflatten(manifest, fill, live)
    data.release()
    for name in sorted(parts, key=lambda name: isinstance(parts[name], RngState)):
        part = parts[name]
        try:
            part.load_state_dict(state[name])
        except GeminiError:
            raise
        except Exception as error:
            raise StateError(f"{name} ({type(part).__name__}) refused its state: {error}", path=name) from error
    fault_point("rank.after_restore")


def find_shards_together(
    agreement: Agreement, find: Callable[[], RestorableShard], match: Callable[[RestorableShard], None]
) -> RestorableShard:
    """Find and match this rank's shard, and return it when every rank has one of the same step; collective.

    Raises:
        GeminiError: the error of the lowest rank that failed, the same on every rank; nothing has been loaded.
    """

    def find_and_match() -> RestorableShard:
        shard = find()
        match(shard)
        return shard

    shard = agreement.together(find_and_match)
    if not agreement.same(shard.step):
        raise ProtocolError(f"the ranks were given different steps to restore; this rank was given {shard.step}")
    return shard
