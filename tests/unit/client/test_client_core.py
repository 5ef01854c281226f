"""The core of the client, without I/O: streams, refusals, patience, and what may be repeated."""

from __future__ import annotations

import json
from datetime import timedelta
from inspect import signature
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.client import calls
from gemini_ft.client.call import Call, ListCall, Patience, Reply, authorization, base_url
from gemini_ft.client.operations import Operations
from gemini_ft.client.sse import EventDecoder, ServerSentEvent
from gemini_ft.contracts.api import Decision, JobModel, Role
from gemini_ft.contracts.errors import (
    AuthenticationError,
    ConfigurationError,
    ConflictError,
    GeminiError,
    InvalidRequestError,
    NotFoundError,
    PreconditionFailedError,
    ProtocolError,
    TooManyStreamsError,
    UnavailableError,
)
from gemini_ft.contracts.messages import JobSpec
from gemini_ft.coordinator.api.app import openapi_document

SPEC = JobSpec(name="job", num_nodes=2, num_ranks_per_node=1)

# ---- streams


@given(st.lists(st.tuples(st.text(), st.integers(0, 9)), max_size=5), st.lists(st.integers(1, 7)), st.booleans())
def test_a_stream_in_any_pieces_is_the_same_events(
    sent: list[tuple[str, int]], sizes: list[int], carriage_returns: bool
) -> None:
    """Whatever is in the data, U+2028 and the like too: it is JSON, so that no line end is."""
    end = "\r\n" if carriage_returns else "\n"
    lines = [f": ping{end}{end}"]
    lines += [f"data: {json.dumps(text, ensure_ascii=False)}{end}id: {number}{end}{end}" for text, number in sent]
    stream = "".join(lines).encode()
    decoder = EventDecoder()
    found: list[ServerSentEvent] = []
    for size in (*sizes, len(stream)):
        piece, stream = stream[:size], stream[size:]
        found += decoder.feed(piece)
    assert [(json.loads(event.data), event.id) for event in found] == [(text, str(number)) for text, number in sent]


def test_an_event_without_id_keeps_the_one_before_and_data_may_have_lines() -> None:
    decoder = EventDecoder("7")
    assert list(decoder.feed(b"data: a\ndata: b\n\nevent: x\n\ndata:c\nid: 8\n\ndata: unfinished")) == [
        ServerSentEvent("a\nb", "7"),
        ServerSentEvent("c", "8"),
    ]


# ---- refusals


def _refused(status: int, kind: str = "", headers: dict[str, str] | None = None, **more: Any) -> GeminiError:
    body = {"type": f"urn:gemini-ft:problem:{kind}", "title": "t", "status": status, "detail": "what to change"}
    with pytest.raises(GeminiError) as raised:
        calls.job("job-1").read(Reply(status, headers or {}, json.dumps(body | more).encode() if kind else b"<html>"))
    return raised.value


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (401, "authentication", AuthenticationError),
        (404, "not-found", NotFoundError),
        (409, "conflict", ConflictError),
        (412, "precondition-failed", PreconditionFailedError),
        (422, "configuration", ConfigurationError),
        (422, "idempotency-key-reused", ConfigurationError),
        (409, "of-a-newer-coordinator", ConflictError),
        (503, "unavailable", UnavailableError),
        (500, "internal", GeminiError),
    ],
)
def test_a_problem_is_the_error_that_the_coordinator_raised(
    status: int, kind: str, expected: type[GeminiError]
) -> None:
    error = _refused(status, kind)
    assert type(error) is expected or issubclass(type(error), expected)
    assert (str(error), error.status, error.problem) == ("what to change", status, kind)


def test_the_fields_of_a_problem_are_facts() -> None:
    fields = [{"field": "num_nodes", "message": "is 0"}]
    invalid = _refused(422, "invalid-request", errors=fields)
    assert isinstance(invalid, InvalidRequestError)
    assert (invalid.field, invalid.errors[0].message) == ("num_nodes", "is 0")
    busy = _refused(429, "too-many-streams", {"retry-after": "5"})
    assert isinstance(busy, TooManyStreamsError)
    assert busy.retry_after_s == 5


def test_what_is_no_problem_document_counts_by_its_status() -> None:
    error = _refused(502)
    assert isinstance(error, UnavailableError)
    assert str(error) == "GET /v1/jobs/job-1 was answered with HTTP 502: <html>"


def test_an_answer_of_something_else_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"GET /v1/jobs/job-1 cannot be understood: .*is it a coordinator's"):
        calls.job("job-1").read(Reply(200, {}, b'{"hello": "world"}'))


def test_fields_of_a_newer_coordinator_are_ignored() -> None:
    body = {name: None for name in JobModel.model_fields} | {
        "job_id": "job-1",
        "spec": SPEC.model_dump(mode="json") | {"invented_later": 1},
        "phase": "running",
        "generation": 1,
        "hold_reason": "",
        "waiting_for": "",
        "cause": "",
        "checkpoint_requests": 0,
        "num_recoveries_without_progress": 0,
        "slots": {"0": "node-1"},
        "standbys": [],
        "created_at": "2026-01-01T00:00:00Z",
        "invented_later": {},
    }
    job, etag = calls.job_and_etag("job-1").read(Reply(200, {"etag": '"x"'}, json.dumps(body).encode()))
    assert (job.spec, job.slots, etag) == (SPEC, {0: "node-1"}, '"x"')


# ---- what may be repeated


@pytest.mark.parametrize(
    ("call", "repeatable"),
    [
        (calls.job("job-1"), True),
        (calls.create_job(SPEC), True),
        (calls.stop_job("job-1", if_match='"x"'), True),
        (calls.relabel_node("node-1", {"rack": "r1"}), True),
        (calls.relabel_node("node-1", {"rack": "r1"}, if_match='"x"'), False),
        (calls.delete_job("job-1"), False),
        (calls.readiness(), False),
    ],
)
def test_a_request_is_repeated_only_if_that_cannot_do_it_twice(call: Call[Any], repeatable: bool) -> None:
    assert call.may_be_sent_again(UnavailableError("cut", was_sent=True)) is repeatable
    assert call.may_be_sent_again(UnavailableError("refused", was_sent=False))
    assert call.may_be_sent_again(UnavailableError("503")) is repeatable
    assert not call.may_be_sent_again(ConflictError("not now"))


def test_every_post_has_a_key_of_its_own() -> None:
    keys = {calls.create_job(SPEC).headers["Idempotency-Key"] for _ in range(3)}
    assert len(keys) == 3
    assert all(key.isascii() and key.isprintable() and len(key) <= 200 for key in keys)
    assert calls.create_job(SPEC, idempotency_key="mine").headers["Idempotency-Key"] == "mine"


def test_patience_grows_ends_and_is_renewed() -> None:
    now = 0.0
    patience = Patience(timedelta(seconds=2), lambda: now)
    error = UnavailableError("away")
    for pause_s in (0.1, 0.2, 0.4, 0.8):
        assert patience.pause_s(error) == pause_s
        now += pause_s
    with pytest.raises(UnavailableError, match="away"):
        patience.pause_s(error)
    patience.heard()
    assert patience.pause_s(error) == 0.1
    assert patience.pause_s(TooManyStreamsError("busy", retry_after_s=1)) == 1
    with pytest.raises(UnavailableError):
        Patience(timedelta(0), lambda: now).pause_s(error)


# ---- where and who


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "http://h:1/v1", " http://h:1/v1/ "])
def test_a_url_is_taken_as_people_have_it(given: str) -> None:
    assert base_url(given) == "http://h:1"


@pytest.mark.parametrize("given", ["", "h:1", "ftp://h", "http://", "http:///v1"])
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a coordinator's URL"):
        base_url(given)


@pytest.mark.parametrize("given", ["", "  \n", "two words", "schl\N{LATIN SMALL LETTER U WITH DIAERESIS}ssel"])
def test_what_is_no_token_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError, match="the API token is empty or has characters"):
        authorization(given)


def test_ids_cannot_leave_their_place_in_the_path() -> None:
    assert calls.job("../nodes?x=1#").path == "/v1/jobs/..%2Fnodes%3Fx%3D1%23"


# ---- all of the API

ARGUMENTS = {
    "decision": Decision.STOP,
    "generation": 111,
    "job_id": "{job_id}",
    "labels": {},
    "name": "ci",
    "node_id": "{node_id}",
    "rank": 222,
    "role": Role.VIEWER,
    "spec": SPEC,
    "step": 333,
    "token_id": "{token_id}",
}
PLACES = {"%7B": "{", "%7D": "}", "111": "{generation}", "222": "{rank}", "333": "{step}"}
NOT_FOR_CLIENTS = {"GET /metrics"}


def test_the_client_asks_for_every_operation_of_the_api_and_for_nothing_else() -> None:
    asked = set()
    for name in calls.__all__:
        make = getattr(calls, name)
        required = [one.name for one in signature(make).parameters.values() if one.default is one.empty]
        made = make(**{argument: ARGUMENTS[argument] for argument in required})
        if isinstance(made, ListCall):
            made = made.page(None)
        path = made.path
        for written, place in PLACES.items():
            path = path.replace(written, place)
        asked.add(f"{getattr(made, 'method', 'GET')} {path}")
    document = openapi_document()
    known = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert asked == known - NOT_FOR_CLIENTS
    assert set(calls.__all__) == {name for name in vars(Operations) if not name.startswith("_")}
