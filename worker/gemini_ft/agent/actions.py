"""What the agent does when `Node` has decided it. Each action may be repeated."""

from __future__ import annotations

from dataclasses import dataclass

from gemini_ft.agent.records import ProcessIdentity

__all__ = [
    "Action",
    "Actions",
    "AnswerParked",
    "Beat",
    "CloseClients",
    "EndProcesses",
    "EnsureLauncher",
    "HoldGeneration",
    "MarkClosed",
    "OpenJob",
    "OrderGeneration",
    "Persist",
    "RequestCheckpoint",
    "WatchProcess",
]


@dataclass(frozen=True, slots=True)
class OpenJob:
    """Open the job's checkpoint memory and its job page."""


@dataclass(frozen=True, slots=True)
class Persist:
    """Write `Node.record()` down; what follows happens only when it is on disk."""


@dataclass(frozen=True, slots=True)
class OrderGeneration:
    """Show the generation in the job page, so that launcher and ranks of older ones stop."""

    generation: int


@dataclass(frozen=True, slots=True)
class HoldGeneration:
    """Show in the job page that the ranks of `generation` are to stop together."""

    generation: int


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """Show in the job page that a version is wanted at the next step; an older request changes nothing."""

    request: int


@dataclass(frozen=True, slots=True)
class MarkClosed:
    """Show in the job page that the job has ended."""


@dataclass(frozen=True, slots=True)
class EndProcesses:
    """SIGKILL them and wait, bounded, until they are gone."""

    processes: tuple[ProcessIdentity, ...]


@dataclass(frozen=True, slots=True)
class CloseClients:
    """Close the connections of ranks whose generation is below `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """Report the end of the process as an event."""

    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class EnsureLauncher:
    """Start a launcher if `Node.wants_launcher` and no other one lives."""


@dataclass(frozen=True, slots=True)
class AnswerParked:
    """Look at the parked requests again."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Send a heartbeat at once."""


Action = (
    OpenJob
    | Persist
    | OrderGeneration
    | HoldGeneration
    | RequestCheckpoint
    | MarkClosed
    | EndProcesses
    | CloseClients
    | WatchProcess
    | EnsureLauncher
    | AnswerParked
    | Beat
)
Actions = tuple[Action, ...]
