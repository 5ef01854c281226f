"""Fixtures of the dashboard's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import chromium
from coordinator_fixtures import cluster, running, servers, stack
from playwright.sync_api import Browser

__all__ = ["browser", "cluster", "running", "servers", "stack"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ended with each file: Playwright leaves no room for another event loop meanwhile."""
    with chromium() as found:
        yield found
