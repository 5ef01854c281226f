"""One rank agrees with itself; the collective half is tested with real ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gemini_ft.contracts.errors import StateError
from gemini_ft.worker.agreement import Agreed, Agreement


@pytest.mark.parametrize("step", [None, 0, 7])
@pytest.mark.parametrize(("failed", "is_hold_wanted", "request_number"), [(False, True, 3), (True, False, 0)])
def test_a_single_rank_gets_its_own_answer(
    step: int | None, failed: bool, is_hold_wanted: bool, request_number: int
) -> None:
    agreement = Agreement(None, timedelta(seconds=5))
    assert not agreement.launched
    agreement.launch(step, failed, is_hold_wanted, request_number)
    assert agreement.launched
    assert agreement.result() == Agreed(step, failed, is_hold_wanted, request_number)
    assert not agreement.launched
    assert agreement.same(step)


def test_a_single_rank_raises_its_own_error() -> None:
    agreement = Agreement(None, timedelta(seconds=5))

    def act() -> int:
        raise StateError("no", path="x")

    with pytest.raises(StateError, match=r"^no$"):
        agreement.together(act)
    assert agreement.together(lambda: 3) == 3
