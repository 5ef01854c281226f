"""What the agent writes down, so that its next life continues where this one ended."""

from __future__ import annotations

from typing import Literal

from gemini_ft.contracts.frames import Message
from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.contracts.messages import Address, Assign, JobSpec

__all__ = ["JobRecord", "NodeRecord", "ProcessIdentity", "RankRecord"]


class ProcessIdentity(Message):
    """A process that cannot be mistaken for a later one with its pid. `started` is empty if it was gone already."""

    pid: int
    started: str


class RankRecord(Message):
    """A rank's process and its control page."""

    rank: int
    generation: int
    process: ProcessIdentity
    page: str
    exited: bool
    exit_code: int | None


class NodeRecord(Message):
    """`node.json`: the identity that the coordinator issued, and the port at which peers remember this node."""

    version: Literal[1] = 1
    node_id: NodeId | None = None
    data_port: int | None = None


class JobRecord(Message):
    """`job.json`: the job this node takes part in, and the fence."""

    version: Literal[1] = 1
    job_id: JobId
    job_key: str
    spec: JobSpec
    generation: int
    assignment: Assign | None
    committed_step: int | None
    store: Address | None
    launcher: ProcessIdentity | None
    num_launcher_starts: int
    finished: bool
    ranks: tuple[RankRecord, ...]
