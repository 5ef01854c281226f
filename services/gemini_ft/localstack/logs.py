"""Following the ranks' log files while they are written."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LogLine", "RankLogFollower"]

_GENERATION = re.compile(r"generation-(\d+)")
_RANK = re.compile(r"rank-(\d+)\.log")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class LogLine:
    """One line of one rank, without its end."""

    generation: int
    rank: int
    text: str


class RankLogFollower:
    """Returns what has been added to `.../generation-<g>/rank-<r>.log` below some folders since the last call."""

    def __init__(self, folders: Iterable[Path], *, job_id: str = "") -> None:
        """`job_id` restricts it to logs that have the job in their path."""
        self._folders = list(folders)
        self._job_id = job_id
        self._read_bytes: dict[Path, int] = {}
        self._unfinished: dict[Path, bytes] = {}

    def poll(self, *, final: bool = False) -> Iterator[LogLine]:
        """Yield the new whole lines, oldest generation first; `final` yields an unfinished last line too."""
        for generation, rank, path in self._logs():
            with path.open("rb") as log:
                log.seek(self._read_bytes.get(path, 0))
                while piece := log.read(_READ_BYTES):
                    self._read_bytes[path] = log.tell()
                    *lines, rest = (self._unfinished.get(path, b"") + piece).split(b"\n")
                    self._unfinished[path] = rest
                    yield from (LogLine(generation, rank, _decode(line)) for line in lines)
            rest = self._unfinished.get(path, b"")
            if final and rest:
                self._unfinished[path] = b""
                yield LogLine(generation, rank, _decode(rest))

    def _logs(self) -> list[tuple[int, int, Path]]:
        found = []
        for folder in self._folders:
            for path in folder.rglob("rank-*.log"):
                generation = _GENERATION.fullmatch(path.parent.name)
                rank = _RANK.fullmatch(path.name)
                if generation and rank and self._job_id in str(path):
                    found.append((int(generation[1]), int(rank[1]), path))
        return sorted(found)


def _decode(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
