"""What the agent knows of its job and of the job's ranks on this node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gemini_ft.agent.pages import RankProgress
from gemini_ft.agent.records import JobRecord, ProcessIdentity, RankRecord
from gemini_ft.contracts.messages import Address, Assign, JobOutcome, JobSpec, RankState, RankStatus

__all__ = ["Job", "Rank"]


@dataclass(slots=True)
class Rank:
    """What is known of one rank in one generation."""

    rank: int
    generation: int
    process: ProcessIdentity
    page: str = ""
    said_hello: bool = False
    exited: bool = False
    exit_code: int | None = None
    detail: str = ""
    progress: RankProgress = field(default_factory=RankProgress)
    restored: bool = False
    restored_step: int | None = None
    restore_source: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    restore_error: dict[str, Any] | None = None

    def status(self) -> RankStatus:
        """Return the rank's part of a heartbeat."""
        return RankStatus(
            rank=self.rank,
            generation=self.generation,
            pid=self.process.pid,
            state=RankState.EXITED if self.exited else RankState.RUNNING,
            exit_code=self.exit_code,
            detail=self.detail,
            finished_step=self.progress.finished_step,
            committed_step=self.progress.committed_step,
            sealed_everywhere_step=self.progress.sealed_everywhere_step,
            held_step=self.progress.held_step,
            num_skipped=self.progress.num_skipped,
            stall_us=self.progress.stall_us,
            restored_step=self.restored_step,
            restored=self.restored,
            restore_source=self.restore_source,
            phases_s=self.phases_s,
            restore_error=self.restore_error,
        )


@dataclass(slots=True)
class Job:
    """The job that this node takes part in. `assignment` counts once `is_assignment_taken`."""

    job_id: str
    job_key: str
    spec: JobSpec
    generation: int = 0
    assignment: Assign | None = None
    is_assignment_taken: bool = False
    committed_step: int | None = None
    store: Address | None = None
    """Where the ranks' store of this generation listens, if it is this node that has it."""
    launcher: ProcessIdentity | None = None
    launcher_connected: bool = False
    num_launcher_starts: int = 0
    ranks: dict[int, Rank] = field(default_factory=dict)
    finished: bool = False
    closing: JobOutcome | None = None

    @classmethod
    def of_record(cls, record: JobRecord, closing: JobOutcome | None) -> Job:
        """Rebuild what a former life of the agent wrote down."""
        ranks = {
            r.rank: Rank(r.rank, r.generation, r.process, r.page, exited=r.exited, exit_code=r.exit_code)
            for r in record.ranks
        }
        return cls(
            record.job_id,
            record.job_key,
            record.spec,
            record.generation,
            record.assignment,
            committed_step=record.committed_step,
            store=record.store,
            launcher=record.launcher,
            num_launcher_starts=record.num_launcher_starts,
            ranks=ranks,
            finished=record.finished,
            closing=closing,
        )

    def record(self) -> JobRecord:
        """Return what must be written down."""
        return JobRecord(
            job_id=self.job_id,
            job_key=self.job_key,
            spec=self.spec,
            generation=self.generation,
            assignment=self.assignment,
            committed_step=self.committed_step,
            store=self.store,
            launcher=self.launcher,
            num_launcher_starts=self.num_launcher_starts,
            finished=self.finished,
            ranks=tuple(
                RankRecord(
                    rank=r.rank,
                    generation=r.generation,
                    process=r.process,
                    page=r.page,
                    exited=r.exited,
                    exit_code=r.exit_code,
                )
                for r in self.ranks.values()
            ),
        )

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole job."""
        return self.spec.num_nodes * self.spec.num_ranks_per_node

    @property
    def assigned_generation(self) -> int:
        """Newest generation whose assignment was taken, 0 for none."""
        return self.assignment.generation if self.assignment and self.is_assignment_taken else 0

    def slot_of(self, node_id: str | None) -> int | None:
        """Return the slot of a node in the newest assignment."""
        slots = self.assignment.slots if self.assignment else {}
        return next((slot for slot, occupant in slots.items() if occupant == node_id), None)
