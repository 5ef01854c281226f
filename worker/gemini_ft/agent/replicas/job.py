"""What this node knows of its job: fence, plan, who owns and who holds which shard, and where stores listen."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta

from gemini_ft.agent.replicas._changes import Changes
from gemini_ft.agent.replicas.challenge import Credentials
from gemini_ft.agent.replicas.counts import ReplicaCounts
from gemini_ft.agent.replicas.store import ReplicaStore
from gemini_ft.contracts.errors import ConflictError, FencedError, UnavailableError
from gemini_ft.contracts.messages import Address, Assign, JobSpec

__all__ = ["Job"]


@dataclass(slots=True)
class Job:
    """State of the one job of a node. `changes` is notified when fence, plan or stores change."""

    credentials: Credentials
    spec: JobSpec
    store: ReplicaStore
    fence: int | None = None
    """Generations below this one are refused; none: this life of the agent has not been told yet, and refuses all."""
    plan: Assign | None = None
    stores: dict[int, Address] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)
    counts: ReplicaCounts = field(default_factory=ReplicaCounts)

    def require_generation(self, who: str, generation: int) -> None:
        """Refuse whoever is not of the current generation.

        Raises:
            FencedError: an older generation.
            UnavailableError: a generation that this node has not been fenced to yet; to be tried again.
        """
        if self.fence is not None and generation < self.fence:
            raise FencedError.of(who, generation, self.fence)
        if generation != self.fence:
            known = "no generation" if self.fence is None else f"generation {self.fence}"
            raise UnavailableError(
                f"{self.credentials.node_id} knows of {known} yet, but {who} is at generation {generation}"
            )

    def require_plan(self, who: str, generation: int) -> Assign:
        """As `require_generation`, and the plan of that generation must be here; return it."""
        self.require_generation(who, generation)
        if self.plan is None or self.plan.generation != generation:
            raise UnavailableError(
                f"{self.credentials.node_id} has not taken the plan of generation {generation} yet, which {who} follows"
            )
        return self.plan

    def require_owner(self, node_id: str, rank: int, generation: int) -> None:
        """The shard of `rank` may be written here only by its owner, and only if this node is one of its holders.

        Raises:
            ConflictError: it is not so in the plan; beside what `require_plan` raises.
        """
        plan = self.require_plan(f"rank {rank} on {node_id}", generation)
        slot = rank // self.spec.num_ranks_per_node
        if plan.slots.get(slot) != node_id:
            raise ConflictError(
                f"rank {rank} belongs to {plan.slots.get(slot)} in generation {generation}, not to {node_id}"
            )
        if self.credentials.node_id not in self._nodes(plan, slot)[1:]:
            raise ConflictError(f"{self.credentials.node_id} does not hold rank {rank} in generation {generation}")

    @property
    def slot(self) -> int | None:
        """Slot of this node in the plan; none for a standby."""
        slots = self.plan.slots if self.plan is not None else {}
        return next((slot for slot, node_id in slots.items() if node_id == self.credentials.node_id), None)

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """Ranks that run on this node."""
        if (slot := self.slot) is None:
            return ()
        first = slot * self.spec.num_ranks_per_node
        return tuple(range(first, first + self.spec.num_ranks_per_node))

    def holders(self, rank: int) -> tuple[str, ...]:
        """Nodes that keep a replica of an own rank, apart from this one."""
        assert self.plan is not None
        return self._nodes(self.plan, rank // self.spec.num_ranks_per_node)[1:]

    @property
    def held_ranks(self) -> frozenset[int]:
        """Ranks whose shards the plan keeps on this node: its own and its peers'."""
        if self.plan is None:
            return frozenset()
        num_ranks = self.spec.num_ranks_per_node
        return frozenset(
            rank
            for slot in self.plan.placement
            if self.credentials.node_id in self._nodes(self.plan, slot)
            for rank in range(slot * num_ranks, (slot + 1) * num_ranks)
        )

    def address(self, node_id: str) -> Address:
        """Newest known address of a node; raises UnavailableError if there is none."""
        address = self.plan.addresses.get(node_id) if self.plan is not None else None
        if address is None:
            raise UnavailableError(f"no address of {node_id} is known yet")
        return address

    async def store_address(self, generation: int, timeout: timedelta) -> Address | None:
        """Wait until the store of `generation` was published on this node; None if it was not in time.

        Raises:
            FencedError: the job has gone on to a newer generation.
        """
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while True:
                    change = self.changes.next
                    if self.fence is not None and generation < self.fence:
                        raise FencedError.of("the wait for a store", generation, self.fence)
                    if generation in self.stores:
                        return self.stores[generation]
                    await change.wait()
        except TimeoutError:
            return None

    @staticmethod
    def _nodes(plan: Assign, slot: int) -> tuple[str, ...]:
        return tuple(plan.slots[holder] for holder in plan.placement.get(slot, ()) if holder in plan.slots)
