"""The losses that the training wrote down, and whether two runs are the same."""

import itertools
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from gemini_ft.contracts.errors import ProtocolError

__all__ = ["LossLine", "LossLogs", "differing_steps"]


@dataclass(frozen=True)
class LossLine:
    """One finished step of one rank; `loss` is a hexadecimal float, so that nothing is rounded.

    `at` is this machine's monotonic clock, which all of its processes share.
    """

    step: int
    rank: int
    generation: int
    loss: str
    at: float
    committed_step: int | None


class LossLogs:
    """The files `PATH.RANK` of one run, followed while they are written."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self._paths = [path.with_name(f"{path.name}.{rank}") for rank in range(num_ranks)]
        self._read_bytes = [0] * num_ranks
        self.lines: list[LossLine] = []
        self._of_rank: list[list[LossLine]] = [[] for _ in range(num_ranks)]

    def poll(self) -> list[LossLine]:
        """Return the lines that were added since the last call; a line without its end is left for the next one."""
        added = []
        for rank, path in enumerate(self._paths):
            try:
                with path.open("rb") as file:
                    file.seek(self._read_bytes[rank])
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes[rank] += len(whole)
            lines = [_parse(line, path) for line in whole.splitlines()]
            self._of_rank[rank] += lines
            added += lines
        self.lines += added
        return added

    @property
    def last_step(self) -> int:
        """Newest step that every rank has finished, in whatever generation; -1 before the first."""
        return min((max((line.step for line in lines), default=-1) for lines in self._of_rank), default=-1)

    @property
    def committed_step(self) -> int:
        """Newest version that some rank said to be committed; -1 before the first."""
        return max((line.committed_step for line in self.lines if line.committed_step is not None), default=-1)

    def first_finished_at(self, generation: int) -> float | None:
        """When all ranks had finished a step in `generation` or a newer one; None if some has not yet."""
        moments = []
        for lines in self._of_rank:
            first = next((line.at for line in lines if line.generation >= generation), None)
            if first is None:
                return None
            moments.append(first)
        return max(moments, default=None)

    @property
    def num_redone(self) -> int:
        """Steps that were finished more than once, counted as often as they were repeated, on the rank with most."""
        return max((len(lines) - len({line.step for line in lines}) for lines in self._of_rank), default=0)

    def median_step_s(self) -> float | None:
        """Median time between consecutive steps of one rank within a generation; None if there are none."""
        gaps = [
            line.at - before.at
            for lines in self._of_rank
            for before, line in itertools.pairwise(lines)
            if (before.generation, before.step + 1) == (line.generation, line.step)
        ]
        return statistics.median(gaps) if gaps else None


def differing_steps(run: LossLogs, reference: LossLogs, num_steps: int) -> tuple[int, ...]:
    """The steps of `run` that are not those of `reference`, bit for bit, every repetition on every rank included.

    A step that no rank of `run` or not every rank of `reference` has written down differs as well.
    """
    expected = {(line.step, line.rank): line.loss for line in reference.lines}
    found: dict[int, list[LossLine]] = defaultdict(list)
    for line in run.lines:
        found[line.step].append(line)
    return tuple(
        step
        for step in range(num_steps)
        if not found[step] or any(expected.get((step, line.rank)) != line.loss for line in found[step])
    )


def _parse(text: bytes, path: Path) -> LossLine:
    try:
        entry = json.loads(text)
        return LossLine(
            step=entry["step"],
            rank=entry["rank"],
            generation=entry["generation"],
            loss=entry["loss"],
            at=entry["at"],
            committed_step=entry.get("committed_step"),
        )
    except (ValueError, KeyError) as error:
        raise ProtocolError(f"{path} holds a line that is no loss: {text[:200]!r}") from error
