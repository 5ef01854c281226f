"""The end of the demo, for people: what each failure cost, and whether the run is the undisturbed one."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gemini_ft.localstack.demo.records import ALL_RANKS, DETECT, SET_UP, DemoRecord, DrillRecord

__all__ = ["render_report"]

_PHASES = {
    DETECT: "detect",
    "fence": "fence",
    "plan": "plan",
    "re_rendezvous": "re-rendezvous",
    SET_UP: "set up",
    "reserve": "reserve",
    "fetch": "fetch",
    "load": "load",
    "first_step": "first step",
}


def render_report(record: DemoRecord) -> RenderableType:
    """Everything that `record` shows, as tables and a verdict."""
    return Group(_failures(record), *_figures(record), *_comparison(record), _verdict(record))


def _failures(record: DemoRecord) -> Table:
    shown = [phase for phase in _PHASES if any(phase in drill.phases_ms for drill in record.drills)]
    table = Table(title="What each failure cost (ms)", title_justify="left")
    table.add_column("drill")
    for phase in shown:
        table.add_column(_PHASES[phase], justify="right")
    for heading in ("kill to next step", "steps lost", "whole again"):
        table.add_column(heading, justify="right")
    for drill in record.drills:
        phases = [_ms(drill.phases_ms.get(phase)) for phase in shown]
        lost = "-" if drill.num_steps_lost is None else str(drill.num_steps_lost)
        table.add_row(_name(drill), *phases, _ms(drill.step_after_ms), lost, _ms(drill.whole_again_ms))
    return table


def _name(drill: DrillRecord) -> str:
    meanwhile = (
        ""
        if drill.num_steps_meanwhile is None
        else f"\n{drill.num_steps_meanwhile} steps and {drill.num_commits_meanwhile} commits meanwhile"
    )
    return f"({drill.key}) {drill.title}{meanwhile}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _figures(record: DemoRecord) -> Iterator[Text]:
    yield Text(f"Steps: {record.num_steps} on {record.num_ranks} ranks; {record.num_steps_redone} done again.")
    if record.stall is not None:
        stall = record.stall
        yield Text(
            f"Checkpoint stall: {stall.mean_ms:.1f} ms a step on average, {stall.max_ms:.1f} ms on the slowest rank "
            f"(a step takes {stall.step_ms:.0f} ms here, {stall.step_without_ms:.0f} ms without checkpoints)."
        )
    for node in record.memory:
        yield Text(
            f"Checkpoint memory of {node.node}: {_mib(node.used_bytes)} MiB, {node.share:.1%} of 2 x m x shard = "
            f"{_mib(node.bound_bytes)} MiB."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"


def _comparison(record: DemoRecord) -> Iterator[Text]:
    yield Text("Digest of the final model and optimizer state of all ranks (xxh3-128):")
    for name, digests in (("disturbed run", record.digests), ("undisturbed run", record.reference_digests)):
        yield Text(f"  {name:<15}  {digests.get(ALL_RANKS, 'missing')}", style="bold")


def _verdict(record: DemoRecord) -> Text:
    if record.success:
        return Text(
            f"Success: {record.num_steps} losses and the final state are bit-identical to the undisturbed run "
            f"({record.duration_s:.0f} s).",
            style="bold green",
        )
    reasons = []
    if record.differing_steps:
        steps = ", ".join(str(step) for step in record.differing_steps[:10])
        reasons.append(f"the losses of {len(record.differing_steps)} steps differ (first: {steps})")
    if record.digests != record.reference_digests or not record.digests:
        reasons.append("the final states differ")
    reasons += [f"{node.node} took {node.share:.1%} of its memory" for node in record.memory if node.share > 1.05]
    return Text(f"Failure: {'; '.join(reasons)}.", style="bold red")
