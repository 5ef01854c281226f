"""The cluster as a picture: where each node stands, how it looks, and who holds whose shards."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemini_ft.contracts.api import JobModel, NodeModel, NodeStatus, PlacementModel, VersionDetailModel
from gemini_ft.contracts.ids import JobId, NodeId
from gemini_ft.dashboard.words import node_name

__all__ = [
    "Arc",
    "Cell",
    "ClusterPicture",
    "Look",
    "Rack",
    "arcs_of_node",
    "arcs_of_rank",
    "changes",
    "cluster_picture",
    "look_of",
]

_WIDTH = 1200.0
_LEAST_WIDTH = 640.0
_GAP = 16.0
_TITLE = 22.0
_SIDES = ((16, 96.0), (64, 64.0), (256, 44.0))
_SMALLEST_SIDE = 26.0


class Look(enum.StrEnum):
    """What a node's sign and colour tell; of several the first that fits."""

    FAILED = "failed"
    SUSPECTED = "suspected"
    SILENT = "not heard yet"
    DRAINING = "draining"
    CORDONED = "cordoned"
    TRAINING = "in a job"
    STANDBY = "standby"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Cell:
    """A node: its upper left corner, its look, its short name, and all that is said of it in words."""

    x: float
    y: float
    look: Look
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Rack:
    """The frame around the nodes of one rack."""

    label: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """All nodes by rack. `side` is that of a node's square."""

    width: float
    height: float
    side: float
    racks: tuple[Rack, ...]
    cells: Mapping[NodeId, Cell]


@dataclass(frozen=True, slots=True)
class Arc:
    """Shards of `source` are kept by `target`. `is_whole` false: the copy there is not complete."""

    source: NodeId
    target: NodeId
    is_whole: bool = True


def look_of(node: NodeModel) -> Look:
    """Return what is to be seen of a node first."""
    if node.status is not NodeStatus.ALIVE:
        return Look.FAILED if node.status is NodeStatus.FAILED else Look.SUSPECTED
    if node.heard_s_ago is None:
        return Look.SILENT
    if node.draining or node.cordoned:
        return Look.DRAINING if node.draining and node.slot is not None else Look.CORDONED
    if node.slot is not None:
        return Look.TRAINING
    return Look.FREE if node.job_id is None else Look.STANDBY


def cluster_picture(nodes: Iterable[NodeModel], jobs: Mapping[JobId, JobModel]) -> ClusterPicture:
    """Lay nodes out by zone and rack, in the order of their labels; within a rack as they have registered."""
    by_rack: dict[str, list[NodeModel]] = {}
    for node in nodes:
        by_rack.setdefault(_rack_of(node), []).append(node)
    num_nodes = sum(map(len, by_rack.values()))
    side = next((side for most, side in _SIDES if num_nodes <= most), _SMALLEST_SIDE)
    racks, cells = [], {}
    x = y = row_height = 0.0
    for label, members in sorted(by_rack.items(), key=lambda rack: _in_order(rack[0])):
        num_columns = max(1, min(math.ceil(math.sqrt(2 * len(members))), int((_WIDTH - _GAP) / side)))
        width = max(num_columns * side, 4 * _TITLE) + _GAP
        height = math.ceil(len(members) / num_columns) * side + _TITLE + _GAP / 2
        if x and x + width > _WIDTH:
            x, y, row_height = 0.0, y + row_height + _GAP, 0.0
        racks.append(Rack(label, x, y, width, height))
        for index, node in enumerate(members):
            row, column = divmod(index, num_columns)
            cells[node.node_id] = Cell(
                x + _GAP / 2 + column * side, y + _TITLE + row * side, look_of(node), node_name(node), _text(node, jobs)
            )
        x, row_height = x + width + _GAP, max(row_height, height)
    taken = max((rack.x + rack.width for rack in racks), default=0.0)
    return ClusterPicture(max(taken, _LEAST_WIDTH), y + row_height, side, tuple(racks), cells)


def changes(old: ClusterPicture | None, new: ClusterPicture) -> dict[str, Any]:
    """Return what turns the picture `old` into `new`, as the page's element takes it; empty if nothing does."""
    found: dict[str, Any] = {}
    if old is None or (old.width, old.height, old.side, old.racks) != (new.width, new.height, new.side, new.racks):
        found["frame"] = {
            "width": new.width,
            "height": new.height,
            "side": new.side,
            "racks": [asdict(rack) for rack in new.racks],
        }
    before = {} if old is None else old.cells
    changed = {node_id: asdict(cell) for node_id, cell in new.cells.items() if before.get(node_id) != cell}
    if changed:
        found["cells"] = changed
    gone = sorted(before.keys() - new.cells.keys())
    if gone:
        found["gone"] = gone
    return found


def arcs_of_node(node: NodeModel, placement: PlacementModel) -> list[Arc]:
    """Return arcs to the nodes that keep this one's shards, then from those whose shards this one keeps."""
    if node.slot is None:
        return []
    mine = _others(placement.placement.get(node.slot, ()), node.slot)
    theirs = [slot for slot, holders in sorted(placement.placement.items()) if node.slot in _others(holders, slot)]
    to = [Arc(node.node_id, placement.slots[slot]) for slot in mine if slot in placement.slots]
    return to + [Arc(placement.slots[slot], node.node_id) for slot in theirs if slot in placement.slots]


def arcs_of_rank(rank: int, node_id: NodeId, version: VersionDetailModel) -> list[Arc]:
    """Return arcs from a rank's node to the others that hold its shard of a version."""
    return [
        Arc(node_id, holder.node_id, shard.is_sealed_everywhere)
        for shard in version.ranks
        if shard.rank == rank
        for holder in shard.holders
        if holder.node_id != node_id
    ]


def _others(holders: Sequence[int], slot: int) -> list[int]:
    return [holder for holder in holders if holder != slot]


def _rack_of(node: NodeModel) -> str:
    named = [f"{kind} {node.labels[kind]}" for kind in ("zone", "rack") if kind in node.labels]
    return ", ".join(named) or "no rack"


def _in_order(label: str) -> list[tuple[int, str]]:
    """Numbers count as such: rack 10 comes after rack 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", label)]


def _text(node: NodeModel, jobs: Mapping[JobId, JobModel]) -> str:
    """What a screen reader says, and what is shown when the pointer rests on the node."""
    said = [node_name(node), look_of(node).value]
    if node.job_id is not None:
        job = jobs.get(node.job_id)
        said.append(f"job {node.job_id if job is None else job.spec.name}")
    if node.slot is not None:
        said.append(f"slot {node.slot}")
    said += [f"rank {rank.rank} {rank.state}" for rank in node.ranks if rank.generation == node.assigned_generation]
    return ", ".join(said)
