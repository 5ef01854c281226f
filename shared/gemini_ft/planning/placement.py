"""Which slots hold which shards (paper section 4, Algorithm 1)."""

from __future__ import annotations

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import Placement

__all__ = ["mixed_placement"]


def mixed_placement(num_slots: int, num_replicas: int) -> Placement:
    """Return slot -> the `num_replicas` slots that hold its shards, itself first.

    Groups of m slots hold each other's shards; when m does not divide N, the last group takes the N mod m slots that
    are left and is a ring of m copies (paper section 4, Algorithm 1). Every slot sends and receives m - 1 replicas.
    For N < 2m there is one group: all slots.

    Raises:
        ConfigurationError: fewer slots than replicas, or no replica at all.
    """
    if num_replicas < 1:
        raise ConfigurationError(f"num_replicas is {num_replicas}; it counts the local copy, so give at least 1")
    if num_slots < num_replicas:
        raise ConfigurationError(
            f"num_replicas is {num_replicas}, but num_nodes is {num_slots}: every copy needs a node of its own; "
            f"give num_replicas of at most {num_slots}, or more nodes"
        )
    first_of_last_group = (num_slots // num_replicas - 1) * num_replicas
    placement: Placement = {}
    for slot in range(num_slots):
        first = min(slot - slot % num_replicas, first_of_last_group)
        size = num_slots - first if first == first_of_last_group else num_replicas
        placement[slot] = tuple(first + (slot - first + distance) % size for distance in range(num_replicas))
    return placement
