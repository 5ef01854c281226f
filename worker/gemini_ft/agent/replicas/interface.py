"""What the agent needs of checkpoint memory.

One ReplicaService lives in an agent. It owns the tmpfs folder and the data plane, and never talks to the control
plane. All methods run on the agent's event loop; work that would block the loop goes to threads inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from gemini_ft.agent.replicas.counts import ReplicaCounts
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged
from gemini_ft.contracts.messages import Address, Assign, HeldVersion, JobSpec

__all__ = ["ReplicaService", "ReplicaStatus", "RestorableCopy", "VerifiedCopies"]


@dataclass(frozen=True, slots=True)
class VerifiedCopies:
    """Result of checking every sealed copy of this node; `damaged` holds one sentence for each bad one."""

    held: tuple[HeldVersion, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestorableCopy:
    """Buffer `buffer` of a rank holds a verified copy of `step`; `source` is `local` or `peer`.

    No step means: start from zero.
    """

    step: int | None
    buffer: int | None
    source: str


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """What a heartbeat tells about checkpoint memory."""

    redundancy_whole: bool
    used_bytes: int
    capacity_bytes: int


class ReplicaService(Protocol):
    """Checkpoint memory of one node for at most one job."""

    @property
    def counts(self) -> ReplicaCounts:
        """What was done since the start."""

    async def start(self, preferred_port: int | None) -> Address:
        """Open the data plane, on the port of the agent's former life if that is free, and return its address."""

    async def open_job(self, job_id: str, job_key: str, spec: JobSpec, node_id: str, incarnation: str) -> None:
        """Take up a job: adopt the buffers that a former life left, remove leaked ones, accept peers that hold the key.

        Idempotent. Buffers of other jobs that no live process has locked are removed.
        """

    async def fence(self, generation: int) -> VerifiedCopies:
        """Refuse every older generation from now on, then check every byte of the sealed copies and report them.

        The caller has already ended the ranks of this node. A buffer that some process still locks is replaced by a
        copy in a new file, so that a rank which could not be ended writes into nothing. Idempotent for one generation.
        """

    async def assign(self, assign: Assign) -> None:
        """Carry out a recovery plan: discard copies newer than the restored step, fetch what the own ranks lack,
        re-replicate.

        Returns when the plan is taken, not when the transfers are through. With the same generation again: take new
        addresses.

        Raises:
            FencedError: the plan is older than the fence.
        """

    def open_rank(self, rank: int, generation: int) -> Path:
        """Make a fresh control page for a rank of this generation and return its path.

        Raises:
            FencedError: the rank is of an older generation.
        """

    async def reserve(
        self, rank: int, world_size: int, data_bytes: int, manifest_bytes: int, timeout: timedelta
    ) -> tuple[Path, Path]:
        """Set aside both buffers of a local rank, here and on all its holders.

        Buffers that fit and hold a version are kept.

        Raises:
            CapacityError: too little memory here or on a holder; the sentence names node, number and knob.
            WaitTimeoutError: a holder did not answer in time.
        """

    async def restorable_copy(self, rank: int, timeout: timedelta) -> RestorableCopy:
        """Wait until a verified local copy of the planned step is there.

        Raises:
            NoVersionError: no copy is left in memory; the caller asks for a new recovery.
            WaitTimeoutError: the transfer did not end in time.
        """

    def drop_copy(self, rank: int, step: int, detail: str) -> None:
        """The rank found its local copy bad: discard it and begin to fetch the next one."""

    def fill_begun(self, message: FillBegun) -> None:
        """The rank has begun to fill a buffer; raises FencedError for an old generation, as do the next two."""

    def staged(self, message: Staged) -> None:
        """Chunks are in place; stream them to the holders."""

    def sealed(self, message: Sealed) -> None:
        """The buffer is sealed; send the seal, and set `sealed_everywhere_step` when all holders have acknowledged."""

    def publish_store(self, generation: int, host: str, port: int) -> None:
        """This node is slot 0, and the store of `generation` listens here."""

    async def store_address(self, generation: int, timeout: timedelta) -> Address | None:
        """Return where the store of `generation` listens, asking slot 0's agent; None if it is not known in time."""

    def status(self) -> ReplicaStatus:
        """Return figures for the heartbeat."""

    async def close_job(self) -> None:
        """Free the job's memory and end its transfers."""

    async def close(self) -> None:
        """Close the data plane; buffers stay for the next life of the agent."""
