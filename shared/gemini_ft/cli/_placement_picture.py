"""A placement as text: a matrix while it fits on a screen, then a summary of its groups and rings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gemini_ft.contracts.messages import Placement
from gemini_ft.planning.placement import held_shards, replica_sets

__all__ = ["draw_placement"]

_LARGEST_MATRIX = 40
_NUM_SHOWN = 3


def draw_placement(placement: Placement, names: Mapping[int, str]) -> str:
    """Return who holds the shards of whom; `names` are the nodes in the slots."""
    return _matrix(placement, names) if len(placement) <= _LARGEST_MATRIX else _summary(placement, names)


def _matrix(placement: Placement, names: Mapping[int, str]) -> str:
    slots = sorted(placement)
    width = max(len(name) for name in names.values())
    margin = " " * (width + 4)
    lines = ["  a row is a node, a column the slot whose shards it holds: # its own, o a copy for a peer"]
    if len(slots) > 10:
        lines.append(margin + "".join(str(slot // 10) if slot % 10 == 0 else " " for slot in slots).rstrip())
    lines.append(margin + "".join(str(slot % 10) for slot in slots))
    for holder, held in held_shards(placement).items():
        cells = ("#" if slot == holder else "o" if slot in held else "." for slot in slots)
        lines.append(f"  {names[holder]:<{width}}  {''.join(cells)}")
    return "\n".join(lines)


def _summary(placement: Placement, names: Mapping[int, str]) -> str:
    groups, rings, others = [], [], []
    for members in _components(placement):
        holders = [placement[slot] for slot in members]
        if all(set(one) == set(members) for one in holders):
            groups.append(members)
        elif _is_ring(members, holders):
            rings.append(members)
        else:
            others.append(members)
    lines = []
    for size, count in sorted(Counter(map(len, groups)).items()):
        alike = [group for group in groups if len(group) == size]
        shown = _shortened([f"[{' '.join(names[slot] for slot in group)}]" for group in alike], "")
        lines.append(f"  {count} group{'s' if count > 1 else ''} of {size} that hold each other's shards: {shown}")
    for ring in rings:
        shown = _shortened([names[slot] for slot in ring], "> ")
        num_copies = len(placement[ring[0]]) - 1
        next_ones = "the next one" if num_copies == 1 else f"the next {num_copies}"
        lines.append(f"  1 ring of {len(ring)}, each held by {next_ones} too: {shown} > {names[ring[0]]}")
    for members in others:
        for slots in replica_sets({slot: placement[slot] for slot in members}):
            owners = " ".join(names[slot] for slot in members if set(placement[slot]) == slots)
            lines.append(f"  [{' '.join(names[slot] for slot in sorted(slots))}] hold the shards of {owners}")
    return "\n".join(lines)


def _components(placement: Placement) -> list[list[int]]:
    """Slots that hold each other's shards, directly or not, in ascending order."""
    neighbours: dict[int, set[int]] = {slot: set() for slot in placement}
    for slot, holders in placement.items():
        for holder in holders:
            neighbours[slot].add(holder)
            neighbours[holder].add(slot)
    found, seen = [], set[int]()
    for first in sorted(placement):
        if first in seen:
            continue
        component, to_visit = {first}, [first]
        while to_visit:
            new = neighbours[to_visit.pop()] - component
            component |= new
            to_visit.extend(new)
        seen |= component
        found.append(sorted(component))
    return found


def _is_ring(members: Sequence[int], holders: Sequence[Sequence[int]]) -> bool:
    size = len(members)
    return all(
        tuple(one) == tuple(members[(position + distance) % size] for distance in range(len(one)))
        for position, one in enumerate(holders)
    )


def _shortened(items: Sequence[str], separator: str) -> str:
    if len(items) > 2 * _NUM_SHOWN:
        items = [*items[:_NUM_SHOWN], "...", items[-1]]
    return f" {separator}".join(items)
