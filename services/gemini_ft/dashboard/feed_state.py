"""What the API has said of the cluster so far, and how old that is: reduced from its answers, without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemini_ft.contracts.api import ClusterModel, EventModel, JobModel, NodeModel
from gemini_ft.contracts.errors import GeminiError
from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.dashboard.history import Sample, sample_of

__all__ = ["FeedState", "Freshness"]

_NUM_EVENTS_KEPT = 2000
_NUM_SAMPLES_KEPT = 900
_STALE_AFTER_S = 3.0


@dataclass(frozen=True, slots=True)
class Freshness:
    """How old the data are (None: there are none yet), and the sentence of what keeps them from being renewed."""

    age_s: float | None
    why: str

    @property
    def is_stale(self) -> bool:
        """Whether people are to be told."""
        return bool(self.why) if self.age_s is None else self.age_s > _STALE_AFTER_S


class FeedState:
    """Takes answers in the order in which they come. `version` rises with everything that pages may show."""

    def __init__(self) -> None:
        self.version = 0
        self.cluster: ClusterModel | None = None
        self.nodes: Mapping[NodeId, NodeModel] = {}
        self.jobs: Mapping[JobId, JobModel] = {}
        self.refusal = ""
        """The sentence with which the API has refused the token; nothing will come any more."""
        self._events: deque[EventModel] = deque(maxlen=_NUM_EVENTS_KEPT)
        self._events_of_job: dict[JobId, list[EventModel]] = {}
        self._samples: dict[JobId, deque[Sample]] = {}
        self._renewed_at_s: float | None = None
        self._why = ""

    # ---- what came

    def renew(self, cluster: ClusterModel, nodes: Iterable[NodeModel], jobs: Iterable[JobModel], now_s: float) -> None:
        """Take one reading of everything."""
        self.cluster = cluster
        self.nodes = {node.node_id: node for node in nodes}
        self.jobs = {job.job_id: job for job in jobs}
        self._renewed_at_s, self._why = now_s, ""
        members: dict[JobId, list[NodeModel]] = {}
        for node in self.nodes.values():
            if node.job_id is not None:
                members.setdefault(node.job_id, []).append(node)
        for job in self.jobs.values():
            if job.outcome is None:
                samples = self._samples.setdefault(job.job_id, deque(maxlen=_NUM_SAMPLES_KEPT))
                samples.append(sample_of(job, members.get(job.job_id, ()), now_s))
        for job_id in self._samples.keys() - self.jobs.keys():
            del self._samples[job_id]
        self.version += 1

    def fail(self, error: GeminiError) -> None:
        """Note that a reading failed: what is known stays, and grows old."""
        self._why = str(error)
        self.version += 1

    def refuse(self, error: GeminiError) -> None:
        """Note that the token is not taken any more."""
        self.refusal = str(error)
        self.version += 1

    def happen(self, event: EventModel) -> None:
        """Take an event; one that is known already changes nothing."""
        if event.id <= self.newest_event_id:
            return
        self._events.append(event)
        if event.job_id in self._events_of_job:
            self._append(self._events_of_job[event.job_id], event)
        self.version += 1

    def learn(self, job_id: JobId, events: Iterable[EventModel]) -> None:
        """Take the history of a job, oldest first; from now on its events are kept, however many come."""
        known = self._events_of_job[job_id] = list(events)
        for event in self._events:
            if event.job_id == job_id:
                self._append(known, event)
        self.version += 1

    # ---- what is known

    @property
    def newest_event_id(self) -> int:
        """Where to go on to follow events."""
        return self._events[-1].id if self._events else 0

    @property
    def events(self) -> Sequence[EventModel]:
        """The newest events, oldest first."""
        return self._events

    def events_of(self, job_id: JobId) -> Sequence[EventModel] | None:
        """All events of a job, oldest first; None: they have not been learned yet."""
        return self._events_of_job.get(job_id)

    def samples(self, job_id: JobId) -> Sequence[Sample]:
        """How an open job got on since it was first seen here, oldest first."""
        return self._samples.get(job_id, ())

    def members(self, job_id: JobId) -> list[NodeModel]:
        """The nodes of a job: those in a slot by their slots, then its standbys."""
        found = [node for node in self.nodes.values() if node.job_id == job_id]
        return sorted(found, key=lambda node: (node.slot is None, node.slot or 0))

    def freshness(self, now_s: float) -> Freshness:
        """Return how old everything is."""
        age_s = None if self._renewed_at_s is None else max(0.0, now_s - self._renewed_at_s)
        return Freshness(age_s, self._why)

    @staticmethod
    def _append(events: list[EventModel], event: EventModel) -> None:
        if not events or event.id > events[-1].id:
            events.append(event)
