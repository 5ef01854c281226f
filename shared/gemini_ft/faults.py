"""Fault points: named places before and after each write of the protocol, where a test may strike.

`GEMINI_FT_FAULT="NAME[:NTH]=ACTION"` arms one of them in a process: at the NTH passage (default: the first) it
does `kill` (SIGKILL to itself), `stop` (SIGSTOP), `delay:SECONDS` or `raise` (FaultInjectedError). Without it
a fault point costs one comparison.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Final

from gemini_ft.contracts.errors import ConfigurationError, GeminiError

__all__ = ["FAULT_POINTS", "FAULT_VARIABLE", "FaultInjectedError", "arm", "fault_point"]

FAULT_VARIABLE: Final = "GEMINI_FT_FAULT"

FAULT_POINTS: Final = frozenset(
    {
        # replica store of an agent
        "store.before_allocate",
        "store.before_rename",
        "store.after_rename",
        "store.before_discard",
        "store.after_discard",
        "store.before_verify",
        "store.after_verify",
        # an agent that sends a version: an owner to a holder, a source to a fetcher
        "sender.before_begin",
        "sender.after_begin",
        "sender.before_chunk",
        "sender.before_seal",
        "sender.after_seal",
        # an agent that receives a version
        "receiver.before_filling",
        "receiver.after_filling",
        "receiver.before_chunk_digest",
        "receiver.after_chunk_digest",
        "receiver.before_sealed",
        "receiver.after_sealed",
        # what follows on either side
        "holder.before_ack",
        "holder.after_ack",
        "owner.before_ack_recorded",
        "owner.after_ack_recorded",
        "owner.before_sealed_everywhere",
        "owner.after_sealed_everywhere",
        # the training process
        "rank.before_filling",
        "rank.after_filling",
        "rank.after_fill_begun",
        "rank.before_chunk",
        "rank.after_chunk",
        "rank.before_sealed",
        "rank.after_sealed",
        "rank.after_sealed_sent",
        "rank.before_agree",
        "rank.after_agree",
        "rank.before_restore",
        "rank.after_restore",
    }
)

_SPECIFICATION = re.compile(r"(?P<name>[a-z_.]+)(:(?P<nth>[1-9]\d*))?=(?P<action>kill|stop|raise|delay:\d+(\.\d+)?)")


class FaultInjectedError(GeminiError):
    """An armed fault point struck with `raise`."""

    code = "fault_injected"


@dataclass(slots=True)
class _Fault:
    name: str
    num_passages_left: int
    action: str


def fault_point(name: str) -> None:
    """Do what `name` is armed with; nothing, in production."""
    if _armed is not None and _armed.name == name:
        _strike(_armed)


def arm(specification: str | None) -> None:
    """Arm one fault point of this process, in place of any other; None disarms.

    Raises:
        ConfigurationError: the specification is malformed, or names no fault point.
    """
    global _armed
    if specification is None:
        _armed = None
        return
    match = _SPECIFICATION.fullmatch(specification)
    if match is None:
        raise ConfigurationError(
            f"{FAULT_VARIABLE} is {specification!r}; it must read NAME[:NTH]=kill, =stop, =raise or =delay:SECONDS"
        )
    if match["name"] not in FAULT_POINTS:
        raise ConfigurationError(
            f"{FAULT_VARIABLE} names {match['name']!r}, which is none of: {', '.join(sorted(FAULT_POINTS))}"
        )
    _armed = _Fault(match["name"], int(match["nth"] or 1), match["action"])


def _strike(fault: _Fault) -> None:
    fault.num_passages_left -= 1
    if fault.num_passages_left != 0:
        return
    action, _, seconds = fault.action.partition(":")
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "delay":
            time.sleep(float(seconds))
        case _:
            raise FaultInjectedError(f"the fault point {fault.name} was armed to raise here")


_armed: _Fault | None = None
arm(os.environ.get(FAULT_VARIABLE))
