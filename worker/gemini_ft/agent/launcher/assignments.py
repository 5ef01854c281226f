"""What the launcher needs from its agent: assignments in, news of the ranks out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

__all__ = ["AgentLink", "Assignment"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The place of this node in one generation of the job.

    `group_rank` is the slot, 0..num_slots-1. `host` is the address of this node under which the other nodes
    reach what its launcher serves; slot 0 hosts the generation's store there.
    """

    generation: int
    group_rank: int
    num_slots: int
    host: str


class AgentLink(Protocol):
    """The launcher's line to the agent of its node. Every method may be called from any thread.

    Methods that only tell something return at once and are delivered, in order, when the agent is there (again);
    methods that ask something wait at most for their timeout.
    """

    def next_assignment(self, after_generation: int, timeout: timedelta) -> Assignment:
        """Return the newest assignment whose generation is above `after_generation`.

        A standby parks here: it gets one only when it is given a slot.

        Raises:
            WaitTimeoutError: there is none yet.
            JobClosedError: the job has ended; the fact `outcome` says how.
            GeminiError: the agent refuses this launcher for good (unknown job, wrong number of ranks).
        """
        ...

    def ordered_generation(self) -> int:
        """Return the newest generation that is known to be ordered. Never waits, never raises."""
        ...

    def is_closed(self) -> bool:
        """Return whether the job is known to have ended. Never waits, never raises."""
        ...

    def publish_store(self, generation: int, host: str, port: int) -> None:
        """Tell the other nodes where the generation's store is. Only slot 0 calls this."""
        ...

    def store_address(self, generation: int, timeout: timedelta) -> tuple[str, int]:
        """Return where slot 0 hosts the generation's store.

        Raises:
            WaitTimeoutError: slot 0 has not published it yet.
            JobClosedError: the job has ended.
        """
        ...

    def workers_started(self, generation: int, pids: Mapping[int, int]) -> None:
        """Tell which processes run the generation's ranks of this node, by global rank."""
        ...

    def workers_exited(self, generation: int, exits: Mapping[int, int], detail: str = "") -> None:
        """Tell exit codes of ranks that ended by themselves, by global rank; -n means by signal n.

        `detail` is the end of a failed rank's log.
        """
        ...

    def finished(self, generation: int) -> None:
        """Tell that all ranks of this node have ended with code 0."""
        ...

    def close(self, timeout: timedelta) -> None:
        """Deliver what was told before, for at most `timeout`, then hang up."""
        ...
