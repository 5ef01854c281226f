"""Fixtures of the replica fault tests."""

from replica_cluster import memory_root

__all__ = ["memory_root"]
