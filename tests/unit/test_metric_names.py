"""The names of metrics are a promise: dashboards and alerts of other people are built on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Metric

from gemini_ft.agent.control_link import ControlLink
from gemini_ft.agent.metrics import AgentMetrics
from gemini_ft.agent.node import Node
from gemini_ft.agent.replicas.service import LocalReplicaService
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.settings import CoordinatorSettings
from gemini_ft.failure_detector.metrics import DetectorMetrics
from gemini_ft.failure_detector.service import FailureDetector
from gemini_ft.failure_detector.settings import DetectorSettings
from gemini_ft.security.nats_access import NatsAccess

ROOT = Path(__file__).parents[2]
NATS = NatsAccess(url="nats://127.0.0.1:1")

EVERYWHERE = {"gemini_ft_nats_connected": "gauge", "gemini_ft_nats_reconnects_total": "counter"}
AGENT = EVERYWHERE | {
    "gemini_ft_agent_generation": "gauge",
    "gemini_ft_agent_info": "gauge",
    "gemini_ft_heartbeats_sent_total": "counter",
    "gemini_ft_launcher_connected": "gauge",
    "gemini_ft_rank_commit_lag_steps": "gauge",
    "gemini_ft_rank_committed_step": "gauge",
    "gemini_ft_rank_finished_step": "gauge",
    "gemini_ft_rank_running": "gauge",
    "gemini_ft_rank_skipped_versions_total": "counter",
    "gemini_ft_rank_stall_seconds_total": "counter",
    "gemini_ft_redundancy_whole": "gauge",
    "gemini_ft_replication_received_bytes_total": "counter",
    "gemini_ft_replication_sent_bytes_total": "counter",
    "gemini_ft_store_capacity_bytes": "gauge",
    "gemini_ft_store_used_bytes": "gauge",
    "gemini_ft_verification_failures_total": "counter",
}
DETECTOR = EVERYWHERE | {
    "gemini_ft_detector_heartbeats_total": "counter",
    "gemini_ft_detector_holding": "gauge",
    "gemini_ft_detector_nodes": "gauge",
    "gemini_ft_detector_phi": "gauge",
    "gemini_ft_detector_unpublished_verdicts": "gauge",
    "gemini_ft_detector_verdicts_total": "counter",
}
COORDINATOR = EVERYWHERE | {
    "gemini_ft_api_request_seconds": "histogram",
    "gemini_ft_coordinator_cordoned_nodes": "gauge",
    "gemini_ft_coordinator_heartbeats_total": "counter",
    "gemini_ft_coordinator_jobs": "gauge",
    "gemini_ft_coordinator_leader": "gauge",
    "gemini_ft_coordinator_nodes": "gauge",
    "gemini_ft_coordinator_pass_seconds": "histogram",
    "gemini_ft_database_connections": "gauge",
    "gemini_ft_job_committed_step": "gauge",
    "gemini_ft_job_finished_step": "gauge",
    "gemini_ft_job_generation": "gauge",
    "gemini_ft_recoveries_total": "counter",
    "gemini_ft_recovery_phase_seconds": "histogram",
}
ALL = AGENT | DETECTOR | COORDINATOR


def exposed(metrics: Iterable[Metric]) -> dict[str, str]:
    """Names as a scrape shows them, with their types."""
    suffix = {"counter": "_total", "info": "_info"}
    shown_as = {"info": "gauge"}
    return {metric.name + suffix.get(metric.type, ""): shown_as.get(metric.type, metric.type) for metric in metrics}


class NoNode:
    """ControlLink asks its node for nothing before it runs."""


def test_the_agents_names_are_frozen(tmp_path: Path) -> None:
    replicas = LocalReplicaService(ReplicaSettings(tmp_path))
    link: Any = ControlLink(NATS, timedelta(seconds=1), NoNode())  # type: ignore[arg-type]
    node = Node(new_incarnation(), None, max_launcher_starts=1)
    assert exposed(AgentMetrics(node, replicas, link).collect()) == AGENT


def test_the_detectors_names_are_frozen() -> None:
    detector = FailureDetector(NATS, DetectorSettings())
    assert exposed(DetectorMetrics(detector).collect()) == DETECTOR


def test_the_coordinators_names_are_frozen() -> None:
    coordinator = Coordinator("postgresql://u:p@127.0.0.1:1/x", NATS, CoordinatorSettings())
    found = exposed(coordinator.metrics.registry.collect())
    assert {name: kind for name, kind in found.items() if not name.startswith("process_")} == COORDINATOR


def test_the_documentation_lists_each_metric_with_its_type() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    assert dict(re.findall(r"^\| `(gemini_ft_\w+)` \| (\w+) \|", text, re.MULTILINE)) == ALL


def named_in(expression: str) -> set[str]:
    names = set(re.findall(r"gemini_ft_\w+", expression))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_alerts_name_only_metrics_that_exist() -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 0
    for rule in rules:
        assert named_in(rule["expr"]), rule["alert"]
        assert named_in(rule["expr"]) <= ALL.keys(), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert {"summary", "description"} == set(rule["annotations"]), rule["alert"]


def test_prometheus_scrapes_every_kind_of_process_and_reads_the_alerts() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert {scrape["job_name"] for scrape in config["scrape_configs"]} == {"coordinator", "failure-detector", "agent"}
    for name in config["rule_files"]:
        assert (ROOT / "deploy/prometheus" / name).is_file()


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    panels = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown: set[str] = set()
    for panel in panels:
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            for target in panel["targets"]:
                shown |= named_in(target["expr"])
    assert shown == ALL.keys()


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", sorted(ALL))
def test_names_end_in_a_base_unit_or_say_what_they_count(name: str) -> None:
    assert not re.search(r"_(ms|milliseconds|us|microseconds|kb|mb|kib|mib|minutes|hours|percent)(_|$)", name)
    assert name.endswith("_total") == (ALL[name] == "counter")
