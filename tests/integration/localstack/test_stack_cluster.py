"""A local cluster: each process dies alone, everything that comes back is itself again, and nothing is left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import NodeModel
from gemini_ft.contracts.errors import NotFoundError, UnavailableError
from gemini_ft.localstack.processes import Marker, marked_processes
from gemini_ft.localstack.stack import LocalStack

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(tmp_path / "stack", num_nodes=2) as stack:
        yield stack


def _nodes(client: ApiClient) -> dict[str, NodeModel]:
    return {node.name: node for node in client.nodes()}


def test_every_part_may_die_and_return_as_itself(stack: LocalStack) -> None:
    url, token = stack.url, stack.api_token_file.read_text()
    with stack.client() as client:
        before = {name: node.node_id for name, node in _nodes(client).items()}
        assert set(before) == set(stack.nodes) == {"n0", "n1"}
        assert len({node.host for node in stack.nodes.values()}) == 2

        stack.kill_agent("n0")
        assert stack.ended() == {"agent n0"}
        stack.start_agent("n0")
        stack.kill_control_plane()
        assert stack.ended() == {"coordinator", "failure-detector", "nats-server", "postgres"}
        with pytest.raises(UnavailableError, match="cannot be reached"):
            list(client.nodes())
        stack.start_control_plane()
        stack.wait_nodes()

        assert (stack.url, stack.api_token_file.read_text()) == (url, token)
        assert {name: node.node_id for name, node in _nodes(client).items()} == before

    # Each role has had all the permissions that it needs.
    assert "Violation" not in (stack.directory / "nats" / "nats-server.log").read_text()
    # All that came back tells Prometheus of itself, at the address that it had.
    for metrics_url, metric in [
        (f"{url}/metrics", "gemini_ft_coordinator_leader"),
        (stack.detector_metrics_url, "gemini_ft_detector_heartbeats_total"),
        *((node.metrics_url, "gemini_ft_heartbeats_sent_total") for node in stack.nodes.values()),
    ]:
        assert f"\n{metric} " in httpx.get(metrics_url).raise_for_status().text


def test_a_lost_node_is_gone_with_its_memory_and_the_others_stay(stack: LocalStack) -> None:
    lost, kept = stack.nodes["n0"], stack.nodes["n1"]
    stack.kill_node("n0")

    assert not lost.memory.exists()
    assert marked_processes(Marker(stack.marker.run_id, "n0")) == []
    assert kept.agent.running
    assert kept.memory.exists()
    assert stack.add_node().name == "n2"
    stack.wait_nodes()


def test_unknown_names_are_refused_with_the_known_ones(stack: LocalStack) -> None:
    with pytest.raises(NotFoundError, match="there is no node n7; there are n0, n1"):
        stack.kill_agent("n7")
    with pytest.raises(NotFoundError, match="there is no job"):
        stack.kill_rank("job-0123456789", 0)


def test_close_leaves_neither_processes_nor_memory_nor_ports(tmp_path: Path) -> None:
    with LocalStack(num_nodes=1) as stack:
        directory, memory, port = stack.directory, stack.memory, int(stack.url.rpartition(":")[2])
        assert marked_processes(stack.marker)

    assert marked_processes(stack.marker) == []
    assert not memory.exists()
    assert not directory.exists(), "a folder that was not given is a temporary one"
    assert port not in {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.laddr}
    assert stack.marker.run_id.startswith(f"{os.getpid()}-")
