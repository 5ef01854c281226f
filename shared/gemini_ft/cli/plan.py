"""`gemini-ft plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemini_ft.cli._text import closest_first, format_bytes, format_percent, text_table
from gemini_ft.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    from gemini_ft.cli._plan import DomainRisk, Plan, RedundancyOption, SchedulePlan
    from gemini_ft.planning.placement import Strategy

__all__ = ["plan"]

_NUM_VERSIONS = 2
"""A holder keeps one version that is whole and one that is on its way."""


def plan(
    nodes: Annotated[int | None, typer.Option(help="Nodes of the job; by default those of the topology.")] = None,
    replicas: Annotated[int, typer.Option(help="Copies of each shard, the local one included.")] = 2,
    topology: Annotated[
        Path | None, typer.Option(help="YAML or JSON file that says which node is in which rack, zone, ...")
    ] = None,
    idle_spans: Annotated[
        Path | None, typer.Option(help="JSON file with the idle spans of an iteration; adds the traffic schedule.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="best, group, ring, mixed or share.")] = "best",
    shard_bytes: Annotated[
        int | None, typer.Option(help="Bytes that one node checkpoints; adds memory and traffic in bytes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a cluster: who holds whose shards, what that survives, what it costs, and when it is sent.

    \b
    Examples:
      gemini-ft plan --nodes 17 --replicas 2
      gemini-ft plan --topology examples/planning/racks.yaml
      gemini-ft plan --nodes 16 --idle-spans examples/planning/idle-spans.json
      gemini-ft plan --nodes 1000 --replicas 3 --shard-bytes 75200000000 --json
    """
    from gemini_ft.cli._plan import make_plan, plan_schedule
    from gemini_ft.planning.profile import load_profile
    from gemini_ft.planning.topology import load_topology

    if shard_bytes is not None and shard_bytes < 0:
        raise ConfigurationError(f"--shard-bytes is {shard_bytes}; give the bytes that one node checkpoints")
    known = None if topology is None else load_topology(topology)
    num_nodes = nodes if nodes is not None else None if known is None else len(known.nodes)
    if num_nodes is None:
        raise ConfigurationError("how many nodes has the job? Give --nodes, or --topology with a file that lists them")
    planned = make_plan(num_nodes, replicas, _strategy(strategy), known)
    schedule = None if idle_spans is None else plan_schedule(load_profile(idle_spans), replicas)
    if as_json:
        typer.echo(json.dumps(_as_json(planned, schedule, shard_bytes), indent=2))
    else:
        typer.echo("\n".join(_text(planned, schedule, shard_bytes)))


def _strategy(name: str) -> Strategy | None:
    from gemini_ft.planning.placement import Strategy

    if name == "best":
        return None
    try:
        return Strategy(name)
    except ValueError:
        names = ", ".join(closest_first(name, ["best", *Strategy]))
        raise ConfigurationError(f"there is no strategy {name!r}; choose from {names}") from None


def _text(plan: Plan, schedule: SchedulePlan | None, shard_bytes: int | None) -> Iterator[str]:
    from gemini_ft.cli._placement_picture import draw_placement

    copies = "replica" if plan.num_replicas == 1 else "replicas"
    yield f"{plan.num_nodes} nodes, {plan.num_replicas} {copies} (the local one counts): {plan.strategy} placement"
    yield ""
    yield draw_placement(plan.placement, plan.names)
    if plan.arrangement is not None and plan.arrangement.spares:
        yield f"  spare: {', '.join(plan.arrangement.spares)}"
    yield ""
    yield "probability of recovery from memory, all choices of lost nodes equally likely; shards of one version"
    yield _options_table(plan)
    if plan.num_nodes % plan.num_replicas:
        yield f"  group placement is not possible: {plan.num_replicas} does not divide {plan.num_nodes}"
    yield ""
    yield from _cost(next(option for option in plan.options if option.is_chosen), shard_bytes)
    if plan.arrangement is not None and plan.domains:
        yield ""
        yield "failure domains"
        yield from map(_domain_line, plan.domains)
        if plan.arrangement.reason is not None:
            yield f"  {plan.arrangement.reason}"
        yield "  no arrangement is better" if plan.arrangement.is_optimal else "  the best that a bounded search found"
    if schedule is not None:
        yield ""
        yield from _schedule_lines(schedule)


def _options_table(plan: Plan) -> str:
    losses = list(plan.options[0].probabilities)
    header = ["placement", "sets", *(f"{lost} lost" for lost in losses), "keeps", "at most", "sends", "gets at most"]
    rows = [
        [
            f"{'*' if option.is_chosen else ' '} {option.label}",
            str(option.num_sets),
            *(format_percent(option.probabilities[lost]) for lost in losses),
            f"{option.kept_shards_mean:.3g}",
            f"{option.kept_shards_max:g}",
            f"{option.sent_shards:g}",
            f"{option.received_shards_max:g}",
        ]
        for option in plan.options
    ]
    return text_table(header, rows)


def _cost(option: RedundancyOption, shard_bytes: int | None) -> Iterator[str]:
    mean, most = _NUM_VERSIONS * option.kept_shards_mean, _NUM_VERSIONS * option.kept_shards_max
    yield (
        f"a node keeps {_NUM_VERSIONS} versions, {mean:.3g} shards ({most:g} at most), "
        f"and sends {option.sent_shards:g} for each"
    )
    if shard_bytes is not None:
        yield (
            f"with {format_bytes(shard_bytes)} a node: {format_bytes(mean * shard_bytes)} of memory "
            f"({format_bytes(most * shard_bytes)} at most), {format_bytes(option.sent_shards * shard_bytes)} of "
            "traffic a version"
        )


def _domain_line(risk: DomainRisk) -> str:
    about = "about " if risk.is_estimate else ""
    lost = ", ".join(
        f"any {num_lost} lost: {about}{format_percent(probability)}"
        for num_lost, probability in risk.probabilities.items()
    )
    sharing = (
        f"none of {risk.num_sets} sets has two members in one"
        if not risk.num_sets_sharing
        else f"{risk.num_sets_sharing} of {risk.num_sets} sets have two members in one, {risk.num_sets_inside} all"
    )
    return f"  {risk.level} ({risk.num_domains}): {sharing}" + (f"; {lost}" if lost else "")


def _schedule_lines(schedule: SchedulePlan) -> Iterator[str]:
    from gemini_ft.cli._timeline_picture import TIMELINE_LEGEND, draw_timeline

    yield (
        f"traffic of one rank: {schedule.num_chunks} chunks, {schedule.traffic_s:.3g} s of the {schedule.idle_s:.3g} s "
        "that an iteration is idle"
    )
    if schedule.interval is None:
        yield f"  no interval is long enough: {schedule.reason}"
    else:
        yield f"  a checkpoint fits into {schedule.interval} iteration{'s' if schedule.interval > 1 else ''}"
    if schedule.overrun_probability is not None and schedule.delay_s is not None:
        yield (
            f"  the spans vary: the tightest is too short in {format_percent(schedule.overrun_probability)} of the "
            f"iterations, which delays training by {1000 * schedule.delay_s:.3g} ms on average"
        )
    header = ["scheme", "iteration (s)", "added", "receive buffer", "fits"]
    rows = [
        [
            one.scheme.replace("_", " "),
            f"{one.iteration_s:.4g}",
            f"{100 * one.overhead:.2f} %",
            format_bytes(one.buffer_bytes),
            "yes" if one.fits else "no",
        ]
        for one in schedule.predictions
    ]
    yield text_table(header, rows)
    total_s = max(one.iteration_s for one in schedule.predictions)
    yield f"  {TIMELINE_LEGEND}"
    for one in schedule.predictions:
        yield f"  {one.scheme.replace('_', ' '):<10} |{draw_timeline(one, total_s)}|"


def _as_json(plan: Plan, schedule: SchedulePlan | None, shard_bytes: int | None) -> dict[str, Any]:
    from gemini_ft.planning.placement import held_shards

    names = plan.names
    arrangement = plan.arrangement
    chosen = next(option for option in plan.options if option.is_chosen)
    return {
        "num_nodes": plan.num_nodes,
        "num_replicas": plan.num_replicas,
        "strategy": plan.strategy,
        "slots": {str(slot): name for slot, name in sorted(names.items())},
        "holders": {names[slot]: [names[one] for one in holders] for slot, holders in sorted(plan.placement.items())},
        "holds": {names[one]: [names[slot] for slot in held] for one, held in held_shards(plan.placement).items()},
        "options": [asdict(option) for option in plan.options],
        "memory_bytes_max": None if shard_bytes is None else _NUM_VERSIONS * chosen.kept_shards_max * shard_bytes,
        "traffic_bytes": None if shard_bytes is None else chosen.sent_shards * shard_bytes,
        "domains": None
        if arrangement is None
        else {
            "levels": [asdict(risk) for risk in plan.domains],
            "is_optimal": arrangement.is_optimal,
            "reason": arrangement.reason,
            "spares": arrangement.spares,
        },
        "schedule": None if schedule is None else _schedule_json(schedule),
    }


def _schedule_json(schedule: SchedulePlan) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(schedule, name) for name in schedule.__slots__}
    found["predictions"] = [
        {
            "scheme": one.scheme,
            "iteration_s": one.iteration_s,
            "overhead": one.overhead,
            "buffer_bytes": one.buffer_bytes,
            "fits": one.fits,
        }
        for one in schedule.predictions
    ]
    return found
