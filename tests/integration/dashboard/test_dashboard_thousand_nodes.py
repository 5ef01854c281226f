"""A thousand nodes that are alive in a real coordinator: what a change costs the browser is what has changed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import PATIENCE_MS, SCREENSHOTS, Visitor, visitor
from playwright.sync_api import Browser, expect

from benchmarks.api import processes
from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import NodeModel
from gemini_ft.localstack.processes import ManagedProcess
from gemini_ft.localstack.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

NUM_NODES = 1000
NUM_CORDONED = 20


@pytest.fixture(scope="module")
def api(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiClient]:
    with (
        processes(tmp_path_factory.mktemp("coordinator"), NUM_NODES) as (url, token),
        ApiClient(url, token) as found,
    ):
        wait_until(lambda: sum(node.is_alive for node in found.nodes()) == NUM_NODES, "all nodes to be heard", 120)
        yield found


@pytest.fixture
def operator(api: ApiClient, browser: Browser, tmp_path: Path) -> Iterator[Visitor]:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "gemini_ft.dashboard", "--api", api.url, "--listen", "127.0.0.1:0"]
    process = ManagedProcess(
        [*command, "--ready-file", str(ready)],
        name="dashboard",
        log_path=tmp_path / "log",
        parent_death_signal=signal.SIGKILL,
    )
    process.start()
    try:
        wait_until(ready.exists, "the dashboard to be ready", 60)
        with visitor(browser, ready.read_text().strip()) as found:
            found.log_in("token-of-the-benchmark")
            yield found
    finally:
        process.stop()
    assert "Traceback" not in process.log_path.read_text()


def test_what_changes_is_all_that_the_browser_has_to_do(operator: Visitor, api: ApiClient) -> None:
    page = operator.page
    nodes = page.locator(".cluster-map .node")
    expect(nodes).to_have_count(NUM_NODES, timeout=PATIENCE_MS)
    expect(page.locator(".rack-name")).to_have_count(50)
    page.evaluate(
        """() => {
            window.patches = [];
            const map = document.querySelector('.cluster-map');
            new MutationObserver(() => window.patches.push({
                num_changed: Number(map.dataset.numChanged),
                script_ms: Number(map.dataset.patchMs),
                until_shown_ms: Number(map.dataset.shownMs),
            })).observe(map, { attributeFilter: ['data-num-patches'] });
        }"""
    )
    cordoned = list(_first(api, NUM_CORDONED))
    for node in cordoned:
        api.cordon_node(node.node_id)
    expect(page.locator(".node.look-cordoned")).to_have_count(NUM_CORDONED, timeout=PATIENCE_MS)
    page.wait_for_function(
        f"patches.reduce((sum, patch) => sum + patch.num_changed, 0) >= {NUM_CORDONED}", timeout=PATIENCE_MS
    )
    patches = page.evaluate("patches")
    assert sum(patch["num_changed"] for patch in patches) == NUM_CORDONED

    page.locator(f'.node[data-node="{cordoned[0].node_id}"]').click()
    operator.sees(operator.panel("Details"), f"{cordoned[0].hostname}: cordoned")
    rows = operator.panel("All nodes").locator("tbody tr")
    expect(rows).to_have_count(15)
    operator.panel("All nodes").get_by_role("button", name="Next page").click()
    expect(rows.first).not_to_contain_text(cordoned[0].hostname)
    page.get_by_label("Find nodes").fill("cordoned")
    operator.sees(operator.panel("All nodes"), f"of {NUM_CORDONED}")
    operator.keep("cluster-1000-nodes")
    (SCREENSHOTS / "cluster-1000-nodes.json").write_text(json.dumps(patches, indent=1) + "\n")


def _first(api: ApiClient, number: int) -> Iterator[NodeModel]:
    for _, node in zip(range(number), api.nodes(), strict=False):
        yield node
