"""Jobs, their ranks and their placement."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from gemini_ft.cli.render.cells import NONE, facts, moment, number, phase, printable, table
from gemini_ft.contracts.api import JobModel, JobRankModel, PlacementModel

__all__ = ["job_details", "jobs_table", "placement_table", "ranks_table"]


def jobs_table(jobs: Sequence[JobModel]) -> Table:
    """One line a job."""
    shown = table("job", "name", "phase", ">generation", ">nodes", ">committed", ">finished", "created", "remark")
    for job in jobs:
        shown.add_row(
            job.job_id,
            printable(job.spec.name),
            phase(job.phase),
            number(job.generation),
            number(job.spec.num_nodes),
            number(job.committed_step),
            number(job.finished_step),
            moment(job.created_at),
            _remark(job),
        )
    return shown


def job_details(job: JobModel) -> Group:
    """Everything about one job."""
    spec = job.spec
    world = f"{spec.num_nodes} nodes with {spec.num_ranks_per_node} ranks each, {spec.num_replicas} replicas"
    head = facts(
        {
            "job": job.job_id,
            "name": printable(spec.name),
            "command": printable(shlex.join(spec.command)),
            "folder": printable(spec.working_directory),
            "world": world + (f", {spec.num_standbys} standbys" if spec.num_standbys else ""),
            "phase": phase(job.phase),
            "generation": number(job.generation),
            "committed": _step(job.committed_step),
            "finished": _step(job.finished_step),
            "restored": _step(job.restored_step),
            "final": _step(job.final_step),
            "held for": job.hold_reason,
            "waiting for": printable(job.waiting_for),
            "cause": printable(job.cause),
            "created": moment(job.created_at),
        }
    )
    seats = table(">slot", "node")
    for slot, node_id in sorted(job.slots.items()):
        seats.add_row(number(slot), node_id)
    for node_id in job.standbys:
        seats.add_row("standby", node_id)
    return Group(head, "", seats) if job.slots or job.standbys else Group(head)


def ranks_table(ranks: Sequence[JobRankModel]) -> Table:
    """One line a rank."""
    shown = table(
        *(">rank", ">slot", "node", ">pid", "state", ">generation", ">finished", ">sealed", ">committed", ">restored"),
        *("from", ">stall ms"),
    )
    for rank in ranks:
        state = str(rank.state) if rank.exit_code is None else f"{rank.state} ({rank.exit_code})"
        shown.add_row(
            number(rank.rank),
            number(rank.slot),
            rank.node_id,
            number(rank.pid),
            f"{state}, held" if rank.held_step is not None else state,
            number(rank.generation),
            number(rank.finished_step),
            number(rank.sealed_everywhere_step),
            number(rank.committed_step),
            number(rank.restored_step),
            rank.restore_source or NONE,
            f"{rank.stall_us / 1000:.1f}",
        )
    return shown


def placement_table(placed: PlacementModel) -> RenderableType:
    """One line a slot: who sits there, and where its shards are kept."""
    shown = table(">slot", "node", "holders")
    for slot, holders in sorted(placed.placement.items()):
        kept = ", ".join(f"{holder} ({placed.slots.get(holder, NONE)})" for holder in holders)
        shown.add_row(number(slot), placed.slots.get(slot, NONE), kept)
    return shown


def _step(step: int | None) -> str:
    return "" if step is None else f"step {step}"


def _remark(job: JobModel) -> str:
    if job.waiting_for:
        return printable(f"waiting for {job.waiting_for}")
    if job.final_step is not None:
        return f"holds step {job.final_step}"
    return printable(job.cause.partition("\n")[0])
