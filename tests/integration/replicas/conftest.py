"""Fixtures of the replica tests."""

from replica_cluster import cluster, memory_root

__all__ = ["cluster", "memory_root"]
