"""How things are named and written on all pages."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from gemini_ft.contracts.api import NODE_LABEL, JobPhase, NodeModel

__all__ = [
    "PHASE_SIGNS",
    "duration",
    "memory",
    "node_name",
    "of_steps",
    "phase_text",
    "share",
    "size",
    "step",
    "time_of_day",
    "utc_now",
]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

PHASE_SIGNS: Mapping[JobPhase, str] = {
    JobPhase.PENDING: "\u2026",
    JobPhase.FENCING: "\u21bb",
    JobPhase.ASSIGNED: "\u21bb",
    JobPhase.RUNNING: "\u25b6",
    JobPhase.BLOCKED: "!",
    JobPhase.STOPPING: "\u25b7",
    JobPhase.SUSPENDED: "\u23f8",
    JobPhase.SUCCEEDED: "\u2713",
    JobPhase.FAILED: "\u2717",
    JobPhase.STOPPED: "\u25a0",
}
"""A sign that tells a phase without its colour."""


def phase_text(phase: JobPhase) -> str:
    """Return a phase's sign and word."""
    return f"{PHASE_SIGNS[phase]} {phase}"


def node_name(node: NodeModel) -> str:
    """Return what people call a node: its name in a local stack, else the name of its machine."""
    return node.labels.get(NODE_LABEL) or node.hostname


def step(number: int | None) -> str:
    """Return a step, or that there is none."""
    return "none" if number is None else str(number)


def of_steps(number: int) -> str:
    """Return a number of steps."""
    return "1 step" if number == 1 else f"{number} steps"


def duration(seconds: float) -> str:
    """Return a duration in the unit that people would choose."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, whole = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {whole} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def size(num_bytes: float) -> str:
    """Return a size with a binary unit."""
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            break
        num_bytes /= 1024
    return f"{num_bytes:.3g} {unit}"


def share(part: float) -> str:
    """Return a share in percent."""
    return f"{100 * part:.1f} %"


def time_of_day(at: datetime) -> str:
    """Return date and time in UTC, without the fractions of a second."""
    return f"{at:%Y-%m-%d %H:%M:%S}"


def memory(node: NodeModel) -> str:
    """Return a node's checkpoint memory, against what was planned for it if that is known."""
    used, planned = node.store_used_bytes, node.store_capacity_bytes
    return f"{size(used)} of {size(planned)} ({share(used / planned)})" if planned else size(used)


def utc_now() -> datetime:
    """Return the time of this machine."""
    return datetime.now(UTC)
