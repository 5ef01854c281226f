"""Fixtures of the tests of the cli."""

from coordinator_fixtures import cluster, running, servers, stack

__all__ = ["cluster", "running", "servers", "stack"]
