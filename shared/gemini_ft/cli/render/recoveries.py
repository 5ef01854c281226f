"""Recoveries, and the waterfall of their phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from gemini_ft.cli.render.cells import NONE, facts, moment, number, printable, table
from gemini_ft.contracts.api import RECOVERY_PHASES, RecoveryDetailModel, RecoveryModel

__all__ = ["recoveries_table", "recovery_details", "waterfall"]

_WIDTH = 48


def recoveries_table(recoveries: Sequence[RecoveryModel]) -> Table:
    """One line a recovery."""
    shown = table(">generation", "outcome", ">restored", ">steps lost", ">ms", "began", "cause")
    for recovery in recoveries:
        shown.add_row(
            number(recovery.generation),
            recovery.outcome,
            number(recovery.restored_step),
            number(recovery.num_steps_lost),
            f"{sum(recovery.phases_ms.values()):.0f}",
            moment(recovery.started_at),
            printable(recovery.cause.partition("\n")[0]),
        )
    return shown


def recovery_details(recovery: RecoveryDetailModel) -> Group:
    """One recovery: its phases as a waterfall, and where every shard came from."""
    head = facts(
        {
            "generation": number(recovery.generation),
            "outcome": recovery.outcome,
            "cause": printable(recovery.cause),
            "finished": number(recovery.finished_step),
            "restored": number(recovery.restored_step),
            "steps lost": number(recovery.num_steps_lost),
            "began": moment(recovery.started_at),
            "notes": printable("\n".join(recovery.notes)),
        }
    )
    shards = table(">rank", "from the first of")
    for rank, nodes in sorted(recovery.sources.items()):
        shards.add_row(number(rank), ", ".join(nodes) or NONE)
    parts: list[RenderableType] = [head, "", waterfall(recovery.phases_ms)]
    return Group(*parts, "", shards) if recovery.sources else Group(*parts)


def waterfall(phases_ms: Mapping[str, float]) -> Table:
    """One line a phase, each bar beginning where the one before ends; the whole width is the whole recovery."""
    known = [name for name in RECOVERY_PHASES if name in phases_ms]
    names = known + sorted(set(phases_ms) - set(known))
    total_ms = sum(phases_ms.values())
    shown = table("phase", ">ms", "")
    elapsed_ms = 0.0
    for name in names:
        first, end = (_column(at, total_ms) for at in (elapsed_ms, elapsed_ms + phases_ms[name]))
        elapsed_ms += phases_ms[name]
        # A phase that is too short to be seen is a thin line.
        bar = "\N{FULL BLOCK}" * (end - first) if end > first else "\N{LEFT ONE EIGHTH BLOCK}"
        shown.add_row(name.replace("_", " "), f"{phases_ms[name]:.0f}", " " * first + bar)
    shown.add_row("in all", f"{total_ms:.0f}", "")
    return shown


def _column(at_ms: float, total_ms: float) -> int:
    return round(at_ms / total_ms * _WIDTH) if total_ms else 0
