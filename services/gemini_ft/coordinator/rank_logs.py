"""Reads the logs of ranks from the agents that keep them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from pydantic import ValidationError

from gemini_ft.contracts.errors import NotFoundError, UnavailableError, from_wire
from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.contracts.messages import LogPiece, LogRefused, ReadLog, log_replies
from gemini_ft.contracts.subjects import log_subject
from gemini_ft.coordinator.broker import BROKER_ERRORS
from gemini_ft.coordinator.queries import Queries
from gemini_ft.coordinator.service import Coordinator

__all__ = ["LogText", "RankLogs"]

_TIMEOUT = timedelta(seconds=3)


@dataclass(frozen=True, slots=True)
class LogText:
    """A part of one generation's log: what is in the bytes [offset, next_offset)."""

    node_id: NodeId
    generation: int
    offset: int
    next_offset: int
    text: str
    is_end: bool


class RankLogs:
    """Asks the node in whose slot a rank ran."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._ask = coordinator.ask
        self._queries: Queries = coordinator.queries

    async def generation(self, job_id: JobId) -> int | None:
        """Return the newest generation that has been assigned; None: there is none yet."""
        found = await self._queries.plan(job_id)
        return None if found is None else found[0]

    async def read(self, job_id: JobId, rank: int, num_ranks_per_node: int, question: ReadLog) -> LogText:
        """Return a part of a log; a character that is only half there at its end is left for the next.

        Raises:
            NotFoundError: the generation was never assigned, the job has no such rank, or its node has no such log.
            UnavailableError: the node does not answer.
        """
        found = await self._queries.plan(job_id, question.generation)
        if found is None:
            which = "any generation" if question.generation is None else f"generation {question.generation}"
            raise NotFoundError(f"{job_id} has not been assigned in {which}, so there are no logs of it", job_id=job_id)
        generation, plan = found
        node_id = plan.slots.get(rank // num_ranks_per_node)
        if node_id is None:
            raise NotFoundError(
                f"{job_id} has no rank {rank}; it has {len(plan.slots) * num_ranks_per_node} ranks", job_id=job_id
            )
        piece = await self._piece(node_id, question.model_copy(update={"generation": generation}))
        data = piece.data[: len(piece.data) - _num_bytes_of_half_a_character(piece.data)]
        if not data and not piece.is_end:
            data = piece.data  # it is no text at all, and must not hold up its reader
        text = data.decode(errors="replace")
        return LogText(node_id, piece.generation, piece.offset, piece.offset + len(data), text, piece.is_end)

    async def _piece(self, node_id: NodeId, question: ReadLog) -> LogPiece:
        where = f"the log of rank {question.rank} is on {node_id}"
        try:
            answer = await self._ask(log_subject(node_id), question.model_dump_json().encode(), _TIMEOUT)
            reply = log_replies.validate_json(answer)
        except BROKER_ERRORS as error:
            raise UnavailableError(f"{where}, which does not answer: {error or 'timeout'}", node_id=node_id) from error
        except ValidationError as error:
            raise UnavailableError(f"{where}, whose answer cannot be understood", node_id=node_id) from error
        if isinstance(reply, LogRefused):
            raise from_wire(reply.error)
        return reply


def _num_bytes_of_half_a_character(data: bytes) -> int:
    """How many bytes at the end begin a character of UTF-8 whose rest is missing."""
    for num_bytes in range(1, min(3, len(data)) + 1):
        lead = data[-num_bytes]
        if lead & 0b1100_0000 != 0b1000_0000:  # not a continuation
            expected = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
            return num_bytes if num_bytes < expected else 0
    return 0
