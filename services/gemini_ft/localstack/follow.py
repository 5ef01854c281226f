"""Following one job to its end: its events, its ranks' output, its outcome."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gemini_ft.contracts.errors import UnavailableError
from gemini_ft.contracts.messages import JobOutcome
from gemini_ft.localstack.client import ApiClient, JobInfo
from gemini_ft.localstack.logs import LogLine, RankLogFollower
from gemini_ft.localstack.waiting import wait_until

__all__ = ["JobFollower"]

_POLL_S = 0.1
_STOP_TIMEOUT_S = 20.0


class JobFollower:
    """Shows what happens to one job, until it has ended. A control plane that is away is reported and waited for."""

    def __init__(
        self,
        client: ApiClient,
        job_id: str,
        log_dirs: Iterable[Path],
        *,
        on_line: Callable[[LogLine], None],
        on_news: Callable[[str], None],
    ) -> None:
        """`log_dirs` are the nodes' log folders as far as this machine can read them."""
        self._client = client
        self._job_id = job_id
        self._logs = RankLogFollower(log_dirs, job_id=job_id)
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
            if job is not None and job.phase == "blocked" and stop_if_blocked:
                self._on_news(f"the job is blocked and nobody is here to decide; stopping it: {job.cause}")
                self._client.stop_job(self._job_id)
                return JobOutcome.FAILED
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop the job and return when its nodes have let go of it; raises WaitTimeoutError."""
        if self._client.job(self._job_id).outcome is None:
            self._client.stop_job(self._job_id)
        wait_until(
            lambda: all(node.job_id != self._job_id for node in self._client.nodes() if node.is_alive),
            f"the nodes to leave {self._job_id}",
            _STOP_TIMEOUT_S,
        )
        self._show_lines(final=True)

    def _look(self) -> JobInfo | None:
        try:
            job = self._client.job(self._job_id)
            for event in self._client.events(self._seen_event, self._job_id):
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
