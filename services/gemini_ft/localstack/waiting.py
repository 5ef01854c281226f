"""Bounded waits that say what they wait for."""

import time
from collections.abc import Callable

from gemini_ft.contracts.errors import WaitTimeoutError

_POLL_S = 0.005


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Return as soon as `condition()` is true; raises WaitTimeoutError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise WaitTimeoutError.of(what, timeout_s)
        time.sleep(_POLL_S)
