"""A small client of the coordinator's REST API."""

from datetime import datetime
from types import TracebackType
from typing import Any

import httpx
from pydantic import BaseModel, TypeAdapter

from gemini_ft.contracts.errors import (
    AuthenticationError,
    ConfigurationError,
    ConflictError,
    GeminiError,
    NotFoundError,
    UnavailableError,
)
from gemini_ft.contracts.messages import JobOutcome, JobSpec, RankState

__all__ = ["NODE_LABEL", "ApiClient", "EventInfo", "JobInfo", "NodeInfo", "RankInfo", "RecoveryInfo"]

NODE_LABEL = "local-node"
"""Label by which the nodes of a local stack are told apart."""

_TIMEOUT_S = 5.0
_ERROR_OF_STATUS: dict[int, type[GeminiError]] = {
    401: AuthenticationError,
    404: NotFoundError,
    409: ConflictError,
    422: ConfigurationError,
}


class RankInfo(BaseModel):
    """A rank as its agent saw it last."""

    rank: int
    generation: int
    pid: int
    state: RankState
    exit_code: int | None = None
    finished_step: int | None = None
    committed_step: int | None = None
    sealed_everywhere_step: int | None = None
    restored_step: int | None = None
    num_skipped: int = 0
    stall_us: int = 0


class NodeInfo(BaseModel):
    """A node; figures from its newest heartbeat, if the coordinator has heard one."""

    node_id: str
    hostname: str
    labels: dict[str, str]
    status: str
    job_id: str | None
    slot: int | None
    heard_s_ago: float | None = None
    assigned_generation: int = 0
    ranks: list[RankInfo] = []

    @property
    def name(self) -> str:
        """What people call it: its name in a local stack, else its id."""
        return self.labels.get(NODE_LABEL, self.node_id)

    @property
    def is_alive(self) -> bool:
        """Whether it sends heartbeats."""
        return self.status == "alive" and self.heard_s_ago is not None


class JobInfo(BaseModel):
    """A job."""

    job_id: str
    spec: JobSpec
    phase: str
    generation: int
    waiting_for: str
    cause: str
    committed_step: int | None
    finished_step: int | None
    restored_step: int | None
    slots: dict[int, str]
    standbys: list[str]

    @property
    def outcome(self) -> JobOutcome | None:
        """How it ended; None while it has not."""
        return JobOutcome(self.phase) if self.phase in list(JobOutcome) else None


class RecoveryInfo(BaseModel):
    """One recovery; phases in milliseconds."""

    generation: int
    cause: str
    outcome: str
    restored_step: int | None
    num_steps_lost: int | None
    phases_ms: dict[str, float]
    started_at: datetime


class EventInfo(BaseModel):
    """Something that happened."""

    id: int
    kind: str
    job_id: str | None
    node_id: str | None
    generation: int | None
    message: str

    @property
    def summary(self) -> str:
        """The first line; what follows is the end of a log."""
        return self.message.partition("\n")[0]


class _EventPage(BaseModel):
    events: list[EventInfo]


class ApiClient:
    """One method a route. Errors of the API become errors of the tree; UnavailableError if it cannot be reached."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._http = httpx.Client(
            base_url=f"{url}/v1", headers={"Authorization": f"Bearer {token.strip()}"}, timeout=_TIMEOUT_S
        )

    def create_job(self, spec: JobSpec) -> JobInfo:
        return JobInfo.model_validate(self._ask("POST", "/jobs", json=spec.model_dump(mode="json")))

    def job(self, job_id: str) -> JobInfo:
        return JobInfo.model_validate(self._ask("GET", f"/jobs/{job_id}"))

    def stop_job(self, job_id: str) -> JobInfo:
        return JobInfo.model_validate(self._ask("POST", f"/jobs/{job_id}/stop"))

    def recoveries(self, job_id: str) -> list[RecoveryInfo]:
        """Newest first."""
        return TypeAdapter(list[RecoveryInfo]).validate_python(self._ask("GET", f"/jobs/{job_id}/recoveries"))

    def nodes(self) -> list[NodeInfo]:
        return TypeAdapter(list[NodeInfo]).validate_python(self._ask("GET", "/nodes"))

    def events(self, after: int = 0, job_id: str | None = None) -> list[EventInfo]:
        """Those after the event with id `after`, oldest first."""
        chosen = {} if job_id is None else {"job_id": job_id}
        return _EventPage.model_validate(self._ask("GET", "/events", params={"after": after, **chosen})).events

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "ApiClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, path: str, **request: Any) -> Any:
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise UnavailableError(f"the API at {self._url} cannot be reached: {error}", url=self._url) from error
        if response.is_success:
            return response.json()
        try:
            detail = response.json()["detail"]
        except (ValueError, KeyError, TypeError):
            detail = f"{method} {path} was answered with HTTP {response.status_code}: {response.text[:200]}"
        kind = UnavailableError if response.status_code >= 500 else GeminiError
        raise _ERROR_OF_STATUS.get(response.status_code, kind)(detail, status=response.status_code)
