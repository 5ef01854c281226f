"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_cluster import Stack
from coordinator_fixtures import cluster, running, servers, stack
from coordinator_processes import Processes

__all__ = ["cluster", "processes", "running", "servers", "stack"]


@pytest.fixture
def processes(stack: Stack, tmp_path: Path) -> Iterator[Processes]:
    found = Processes(stack, tmp_path)
    yield found
    found.end()
