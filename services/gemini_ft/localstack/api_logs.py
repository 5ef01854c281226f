"""Following the ranks' logs through the API, where their files are on other machines."""

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import JobModel, JobPhase
from gemini_ft.contracts.errors import NotFoundError, UnavailableError
from gemini_ft.contracts.messages import MAX_LOG_BYTES
from gemini_ft.localstack.logs import LogLine

__all__ = ["ApiLogFollower"]

_NUM_READS_A_POLL = 16
"""So many ranks at a time, in turn: what is shown of a large job comes late, and its coordinator is spared."""
_ASSIGNED = (JobPhase.ASSIGNED, JobPhase.RUNNING, JobPhase.STOPPING)


@dataclass
class _Place:
    """How far a rank's logs were read."""

    rank: int
    generation: int = 1
    offset: int = 0
    unfinished: str = ""


class ApiLogFollower:
    """Returns what the ranks of a job have written since the last call, one generation after the other."""

    def __init__(self, client: ApiClient, job: JobModel) -> None:
        self._client = client
        self._job_id = job.job_id
        self._places = deque(_Place(rank) for rank in range(job.spec.num_nodes * job.spec.num_ranks_per_node))

    def poll(self, *, final: bool = False) -> Iterator[LogLine]:
        """Yield new whole lines; `final` reads all logs to their ends. What cannot be read now is left for later."""
        try:
            newest = _newest_assigned(self._client.job(self._job_id))
        except UnavailableError:
            return
        for _ in range(len(self._places) if final else min(len(self._places), _NUM_READS_A_POLL)):
            place = self._places[0]
            self._places.rotate(-1)
            while (yield from self._read(place, newest)) and final:
                pass
            if final and place.unfinished:
                yield LogLine(place.generation, place.rank, place.unfinished)
                place.unfinished = ""

    def _read(self, place: _Place, newest: int) -> Generator[LogLine, None, bool]:
        """Yield the lines of one part; return whether there is more that can be read at once."""
        try:
            part = self._client.log(
                self._job_id,
                place.rank,
                generation=place.generation,
                offset=place.offset,
                max_bytes=MAX_LOG_BYTES,
            )
        except UnavailableError:
            return False
        except NotFoundError:  # the generation was never assigned, or the rank wrote nothing in it
            is_end = True
        else:
            place.offset, is_end = part.next_offset, part.is_end
            *lines, place.unfinished = (place.unfinished + part.text).split("\n")
            for line in lines:
                yield LogLine(place.generation, place.rank, line.rstrip("\r"))
        if is_end and place.generation < newest:
            # Ranks of a generation have ended before the next one was assigned: nothing comes after this end.
            if place.unfinished:
                yield LogLine(place.generation, place.rank, place.unfinished)
            place.generation, place.offset, place.unfinished = place.generation + 1, 0, ""
            return True
        return not is_end


def _newest_assigned(job: JobModel) -> int:
    """The newest generation whose ranks may have begun; of an ended job the newest of all."""
    return job.generation if job.phase in _ASSIGNED or job.outcome is not None else job.generation - 1
