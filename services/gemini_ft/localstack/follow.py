"""Following one job to its end: its events, its ranks' output, its outcome."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import JobModel, JobPhase
from gemini_ft.contracts.errors import UnavailableError
from gemini_ft.contracts.messages import JobOutcome
from gemini_ft.localstack.logs import LogLine
from gemini_ft.localstack.waiting import wait_until

__all__ = ["JobFollower"]

_POLL_S = 0.1
_STOP_TIMEOUT_S = 20.0


class Logs(Protocol):
    """The ranks' logs, wherever they are."""

    def poll(self, *, final: bool) -> Iterator[LogLine]:
        """Yield what is new; `final` yields an unfinished last line too."""


class JobFollower:
    """Shows what happens to one job, until it has ended. A control plane that is away is reported and waited for."""

    def __init__(
        self,
        client: ApiClient,
        job_id: str,
        logs: Logs,
        *,
        on_line: Callable[[LogLine], None],
        on_news: Callable[[str], None],
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._logs = logs
        self._on_line = on_line
        self._on_news = on_news
        self._seen_event = 0
        self._is_away = False

    def follow(self, *, stop_if_blocked: bool) -> JobOutcome:
        """Return how the job ended. With `stop_if_blocked` a job that waits for a person's decision is stopped."""
        while True:
            job = self._look()
            outcome = None if job is None else job.outcome
            self._show_lines(final=outcome is not None)
            if outcome is not None:
                return outcome
            if job is not None and job.phase is JobPhase.BLOCKED and stop_if_blocked:
                self._on_news(f"the job is blocked and nobody is here to decide; stopping it: {job.cause}")
                self._client.stop_job(self._job_id, now=True)
                return JobOutcome.FAILED
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop the job and return when its nodes have let go of it; raises WaitTimeoutError."""
        if self._client.job(self._job_id).outcome is None:
            self._client.stop_job(self._job_id, now=True)
        wait_until(
            lambda: all(node.job_id != self._job_id for node in self._client.nodes() if node.is_alive),
            f"the nodes to leave {self._job_id}",
            _STOP_TIMEOUT_S,
        )
        self._show_lines(final=True)

    def _look(self) -> JobModel | None:
        try:
            job = self._client.job(self._job_id)
            for event in self._client.events(after=self._seen_event, job_id=self._job_id):
                self._seen_event = event.id
                self._on_news(event.summary)
        except UnavailableError as error:
            if not self._is_away:
                self._on_news(f"the control plane cannot be reached, training goes on without it: {error}")
            self._is_away = True
            return None
        if self._is_away:
            self._on_news("the control plane is back")
        self._is_away = False
        return job

    def _show_lines(self, *, final: bool) -> None:
        for line in self._logs.poll(final=final):
            self._on_line(line)
