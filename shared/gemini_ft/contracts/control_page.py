"""Control pages: small shared files through which agent, launcher and ranks see each other's progress without a
message.

Every field is one aligned 64-bit word with one writer, so a reader never sees half of a value. A page is
trusted only by processes of the generation that it was made for; the agent makes a new file for each
generation. Steps are stored plus one, so that zero means none.
"""

from __future__ import annotations

from typing import Final

__all__ = ["CONTROL_PAGE_BYTES", "JobPage", "RankPage"]

CONTROL_PAGE_BYTES: Final = 4096
_WORDS_A_LINE = 8


class _Page:
    """A page of words; every word has a cache line of its own."""

    def __init__(self, view: memoryview) -> None:
        self._words = view[:CONTROL_PAGE_BYTES].cast("Q")

    def _get(self, field: int) -> int:
        return self._words[field * _WORDS_A_LINE]

    def _set(self, field: int, value: int) -> None:
        self._words[field * _WORDS_A_LINE] = value

    def _get_step(self, field: int) -> int | None:
        value = self._get(field)
        return value - 1 if value else None

    def _set_step(self, field: int, step: int | None) -> None:
        self._set(field, 0 if step is None else step + 1)

    def release(self) -> None:
        """Let go of the mapping, so that it can be closed."""
        self._words.release()


class JobPage(_Page):
    """Written by the agent, read by the launcher and the ranks of one job on one node. It outlives generations."""

    @property
    def ordered_generation(self) -> int:
        """Newest generation that the coordinator has ordered, as far as this node knows. Older ranks must stop."""
        return self._get(0)

    @ordered_generation.setter
    def ordered_generation(self, generation: int) -> None:
        self._set(0, generation)

    @property
    def closed(self) -> bool:
        """True once the job has ended."""
        return bool(self._get(1))

    @closed.setter
    def closed(self, closed: bool) -> None:
        self._set(1, int(closed))

    @property
    def hold_generation(self) -> int:
        """Newest generation that is to be held; ranks of another one take no notice."""
        return self._get(2)

    @hold_generation.setter
    def hold_generation(self, generation: int) -> None:
        self._set(2, generation)

    @property
    def checkpoint_request(self) -> int:
        """Newest request for a version outside the interval, made of this generation; 0 for none."""
        return self._get(3)

    @checkpoint_request.setter
    def checkpoint_request(self, request: int) -> None:
        self._set(3, request)


class RankPage(_Page):
    """One rank in one generation. The agent writes the first group of fields, the rank the second."""

    @property
    def sealed_everywhere_step(self) -> int | None:
        """Newest step of this rank's shard that is sealed on all its holders. Written by the agent."""
        return self._get_step(0)

    @sealed_everywhere_step.setter
    def sealed_everywhere_step(self, step: int | None) -> None:
        self._set_step(0, step)

    @property
    def replication_healthy(self) -> bool:
        """True while every holder is connected, so that waiting for a seal makes sense. Written by the agent."""
        return bool(self._get(1))

    @replication_healthy.setter
    def replication_healthy(self, healthy: bool) -> None:
        self._set(1, int(healthy))

    @property
    def damaged_step(self) -> int | None:
        """Step whose staged bytes a holder refused because they are damaged here. Written by the agent."""
        return self._get_step(2)

    @damaged_step.setter
    def damaged_step(self, step: int | None) -> None:
        self._set_step(2, step)

    @property
    def finished_step(self) -> int | None:
        """Newest step that the rank has finished. Written by the rank."""
        return self._get_step(8)

    @finished_step.setter
    def finished_step(self, step: int | None) -> None:
        self._set_step(8, step)

    @property
    def committed_step(self) -> int | None:
        """Newest version that all ranks have agreed to be committed. Written by the rank."""
        return self._get_step(9)

    @committed_step.setter
    def committed_step(self, step: int | None) -> None:
        self._set_step(9, step)

    @property
    def stall_us(self) -> int:
        """Microseconds that the training loop has waited for checkpoints so far. Written by the rank."""
        return self._get(10)

    @stall_us.setter
    def stall_us(self, microseconds: int) -> None:
        self._set(10, microseconds)

    @property
    def num_skipped(self) -> int:
        """Steps that were not staged because the version before was not committed yet. Written by the rank."""
        return self._get(11)

    @num_skipped.setter
    def num_skipped(self, num_skipped: int) -> None:
        self._set(11, num_skipped)

    @property
    def held_step(self) -> int | None:
        """Committed step at which the rank waits for the end of its generation. Written by the rank."""
        return self._get_step(12)

    @held_step.setter
    def held_step(self, step: int | None) -> None:
        self._set_step(12, step)
