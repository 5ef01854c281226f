"""What a rank writes, as it writes it."""

from __future__ import annotations

import time

from nicegui import ui

from gemini_ft.contracts.api import JobModel
from gemini_ft.contracts.errors import GeminiError
from gemini_ft.contracts.ids import JobId
from gemini_ft.dashboard.dashboard import Visit

__all__ = ["RankLog"]

_TAIL_LINES = 200
_MOST_LINES = 1000
_PERIOD_S = 0.9


class RankLog:
    """Reads on while it is shown; begins with the last lines, and again with every generation."""

    def __init__(self, visit: Visit, job_id: JobId) -> None:
        self._visit = visit
        self._job_id = job_id
        self._rank: int | None = None
        self._at: tuple[int, int] | None = None
        self._generation = 0
        self._rest = ""
        self._read_at_s = 0.0
        self._choice = ui.select({}, label="rank", on_change=lambda event: self.read(event.value))
        self._choice.props('dense outlined aria-label="Rank"').style("min-width: 10em")
        self._says = ui.label("Choose a rank.").classes("faint")
        self._lines = ui.log(max_lines=_MOST_LINES).classes("log").props('role="log" tabindex="0" aria-label="Log"')
        self._lines.visible = False

    def read(self, rank: int | None) -> None:
        """Show the log of this rank from now on."""
        if rank != self._rank:
            self._rank = rank
            self._lines.visible = rank is not None
            self._choice.value = rank
            self._begin()
            self._visit.again()

    async def show(self, job: JobModel) -> None:
        """Show what has been written since the last time."""
        num_ranks = job.spec.num_nodes * job.spec.num_ranks_per_node
        if len(self._choice.options) != num_ranks:
            self._choice.set_options({rank: f"rank {rank}" for rank in range(num_ranks)})
        if job.generation != self._generation:
            self._generation = job.generation
            self._begin()
        if self._rank is None or time.monotonic() - self._read_at_s < _PERIOD_S:
            return
        self._read_at_s = time.monotonic()
        generation, offset = self._at or (None, None)
        tail = _TAIL_LINES if offset is None else None
        try:
            part = await self._visit.api.log(
                self._job_id, self._rank, generation=generation, offset=offset, tail_lines=tail
            )
        except GeminiError as error:
            self._says.text = str(error)
            return
        self._at = (part.generation, part.next_offset)
        self._says.text = f"rank {self._rank} of generation {part.generation}, on {part.node_id}"
        *lines, self._rest = (self._rest + part.text).split("\n")
        if lines:
            self._lines.push("\n".join(line.rpartition("\r")[2] or line for line in lines))

    def _begin(self) -> None:
        self._at, self._rest, self._read_at_s = None, "", 0.0
        self._lines.clear()
