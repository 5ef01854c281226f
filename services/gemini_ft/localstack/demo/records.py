"""What the demo writes down: plain values that go to the report and to `--json`."""

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["ALL_RANKS", "DETECT", "SET_UP", "DemoRecord", "DrillRecord", "MemoryRecord", "StallRecord"]

ALL_RANKS = "all ranks"
"""Name of the digest over all ranks, beside those of each."""

DETECT = "detect"
"""Phase from the failure to the fence."""
SET_UP = "set_up"
"""Phase in which the script builds model and engine, until it asks for its state; what the other phases leave."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DrillRecord(_Record):
    """One drill: what was broken, and what it cost.

    `step_after_ms` runs from the first SIGKILL to the end of the first step that all ranks have finished after it,
    and is the sum of the phases; drills that stop no training have neither.
    """

    key: str
    title: str
    what: str
    at_step: int
    step_after_ms: float | None = None
    phases_ms: dict[str, float] = {}
    restored_step: int | None = None
    num_steps_lost: int | None = None
    whole_again_ms: float | None = None
    num_steps_meanwhile: int | None = None
    num_commits_meanwhile: int | None = None


class MemoryRecord(_Record):
    """Checkpoint memory of one node, measured in its tmpfs folder, against its bound of 2 x m x shard."""

    node: str
    used_bytes: int
    bound_bytes: int

    @property
    def share(self) -> float:
        """Of the bound; above 1.05 is too much."""
        return self.used_bytes / self.bound_bytes


class StallRecord(_Record):
    """How long the training loop waited for checkpoints, a step, over all ranks and generations."""

    mean_ms: float
    max_ms: float
    """Of the rank that waited longest."""
    step_ms: float
    """Median duration of a step of the disturbed run."""
    step_without_ms: float
    """The same in the undisturbed run, which makes no checkpoints."""


class DemoRecord(_Record):
    """All that one run of the demo has shown."""

    version: str
    machine: dict[str, Any]
    num_steps: int
    seed: int
    num_ranks: int
    num_replicas: int
    drills: tuple[DrillRecord, ...]
    num_steps_redone: int
    differing_steps: tuple[int, ...]
    digests: dict[str, str]
    reference_digests: dict[str, str]
    stall: StallRecord | None
    memory: tuple[MemoryRecord, ...]
    duration_s: float

    @property
    def identical(self) -> bool:
        """Whether the disturbed run is, bit for bit, the undisturbed one."""
        return not self.differing_steps and bool(self.digests) and self.digests == self.reference_digests

    @property
    def memory_is_bounded(self) -> bool:
        """Whether no node took more than its bound and 5 %."""
        return all(node.share <= 1.05 for node in self.memory)

    @property
    def success(self) -> bool:
        """What the exit code says."""
        return self.identical and self.memory_is_bounded
