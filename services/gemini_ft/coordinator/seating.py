"""Which free nodes a job gets: those with the labels it asks for, spread over failure domains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemini_ft.contracts.ids import NodeId
from gemini_ft.contracts.messages import JobSpec
from gemini_ft.coordinator.state import NodeView
from gemini_ft.planning.failure_domains import arrange, refill
from gemini_ft.planning.placement import mixed_placement
from gemini_ft.planning.topology import Topology

__all__ = ["Seating", "eligible", "levels_of", "replacements", "seat"]


@dataclass(frozen=True, slots=True)
class Seating:
    """Nodes for all slots and for as many standbys as there are. `note` tells what the spread cannot reach."""

    slots: dict[int, NodeId]
    standbys: tuple[NodeId, ...]
    note: str


def eligible(spec: JobSpec, nodes: Iterable[NodeView]) -> list[NodeView]:
    """Return the nodes that carry every label of `spec.node_selector`, in their order."""
    wanted = spec.node_selector.items()
    return [node for node in nodes if all(node.labels.get(label) == value for label, value in wanted)]


def levels_of(spec: JobSpec) -> tuple[str, ...]:
    """Return the labels that name failure domains, each once."""
    return tuple(dict.fromkeys(spec.spread))


def seat(spec: JobSpec, candidates: Sequence[NodeView]) -> Seating:
    """Seat a new job; there are enough candidates, the preferred first."""
    found = arrange(_topology(spec, candidates), mixed_placement(spec.num_nodes, spec.num_replicas))
    return Seating(found.slots, found.spares[: spec.num_standbys], found.reason or "")


def replacements(spec: JobSpec, seated: Mapping[int, NodeView], candidates: Sequence[NodeView]) -> list[NodeView]:
    """Return the candidates in the order in which they are wanted: first those that suit the slots without a node."""
    num_vacant = spec.num_nodes - len(seated)
    if not 0 < num_vacant <= len(candidates):
        return list(candidates)
    topology = _topology(spec, [*seated.values(), *candidates])
    placement = mixed_placement(spec.num_nodes, spec.num_replicas)
    found = refill(topology, placement, {slot: node.node_id for slot, node in seated.items()})
    chosen = {node_id for slot, node_id in found.slots.items() if slot not in seated}
    return sorted(candidates, key=lambda node: node.node_id not in chosen)


def _topology(spec: JobSpec, nodes: Iterable[NodeView]) -> Topology:
    return Topology({node.node_id: node.labels for node in nodes}, levels_of(spec))
