"""Who is logged in, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gemini_ft.contracts.api import CallerModel, Role
from gemini_ft.dashboard.sessions import LIFETIME, Sessions


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def caller(role: Role, job_ids: list[str] | None = None) -> CallerModel:
    return CallerModel(name="someone", role=role, job_ids=job_ids)


def test_a_session_is_found_by_its_name_alone_until_it_ends() -> None:
    sessions = Sessions()
    first, second = (sessions.begin("secret", caller(Role.VIEWER)) for _ in range(2))
    assert first.session_id != second.session_id
    assert "secret" not in first.session_id
    assert sessions.use(first.session_id) is first
    sessions.end(first.session_id)
    sessions.end(first.session_id)
    assert sessions.use(first.session_id) is None
    assert sessions.use(None) is None
    assert sessions.use(second.session_id) is second


def test_a_session_that_nobody_uses_ends() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    session_id = sessions.begin("secret", caller(Role.VIEWER)).session_id
    for _ in range(3):
        clock.now_s += LIFETIME.total_seconds()
        assert sessions.use(session_id) is not None
    clock.now_s += LIFETIME.total_seconds() + 1
    assert sessions.use(session_id) is None


def test_the_least_used_makes_room() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    oldest = sessions.begin("secret", caller(Role.VIEWER))
    used = sessions.begin("secret", caller(Role.VIEWER))
    for _ in range(999):
        clock.now_s += 1
        assert sessions.use(used.session_id) is used
        sessions.begin("secret", caller(Role.VIEWER))
    assert sessions.use(oldest.session_id) is None
    assert sessions.use(used.session_id) is used


@pytest.mark.parametrize(
    ("role", "job_ids", "may_change", "may_change_nodes"),
    [
        (Role.VIEWER, None, False, False),
        (Role.OPERATOR, ["job-0000000001"], True, False),
        (Role.OPERATOR, None, True, True),
    ],
)
def test_who_may_change_what(role: Role, job_ids: list[str] | None, may_change: bool, may_change_nodes: bool) -> None:
    session = Sessions().begin("secret", caller(role, job_ids))
    assert (session.may_change, session.may_change_nodes) == (may_change, may_change_nodes)
