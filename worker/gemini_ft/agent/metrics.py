"""The agent's metrics. Each scrape reads what the node knows at that moment; docs/metrics.md explains the names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from gemini_ft.agent.job_state import Rank
from gemini_ft.agent.node import Node
from gemini_ft.agent.replicas.counts import DamageFound
from gemini_ft.agent.replicas.interface import ReplicaService

__all__ = ["AgentMetrics", "LinkState"]


class LinkState(Protocol):
    """What is counted about the line to the control plane."""

    is_connected: bool
    num_connections: int
    num_heartbeats: int


class AgentMetrics(Collector):
    """Metrics of one node; to be collected on the agent's event loop."""

    def __init__(self, node: Node, replicas: ReplicaService, link: LinkState) -> None:
        self._node = node
        self._replicas = replicas
        self._link = link

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._of_node()
        yield from self._of_ranks()
        yield from self._of_memory()
        yield from self._of_link()

    def _of_node(self) -> Iterator[Metric]:
        job = self._node.job
        about = {"node_id": self._node.node_id or "", "job_id": job.job_id if job else ""}
        yield InfoMetricFamily("gemini_ft_agent", "Node and job of this agent", value=about)
        generation = job.generation if job else 0
        yield _gauge("gemini_ft_agent_generation", "Newest generation that this node was fenced to", generation)
        connected = bool(job and job.launcher_connected)
        yield _gauge("gemini_ft_launcher_connected", "Whether the launcher of the job is connected", connected)

    def _of_ranks(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("gemini_ft_rank_running", "Whether the rank's process lives", labels=["rank"])
        finished = GaugeMetricFamily("gemini_ft_rank_finished_step", "Newest step that is through", labels=["rank"])
        committed = GaugeMetricFamily("gemini_ft_rank_committed_step", "Newest committed version", labels=["rank"])
        lag = GaugeMetricFamily(
            "gemini_ft_rank_commit_lag_steps", "Finished steps that a failure now would undo", labels=["rank"]
        )
        stall = CounterMetricFamily(
            "gemini_ft_rank_stall_seconds",
            "Time that training has waited for staging, since its start",
            labels=["rank"],
        )
        skipped = CounterMetricFamily(
            "gemini_ft_rank_skipped_versions", "Steps that were not staged because replication lagged", labels=["rank"]
        )
        for rank in self._ranks():
            label, progress = [str(rank.rank)], rank.progress
            running.add_metric(label, not rank.exited)
            stall.add_metric(label, progress.stall_us / 1e6)
            skipped.add_metric(label, progress.num_skipped)
            if progress.committed_step is not None:
                committed.add_metric(label, progress.committed_step)
            if progress.finished_step is not None:
                finished.add_metric(label, progress.finished_step)
                kept = -1 if progress.committed_step is None else progress.committed_step
                lag.add_metric(label, max(0, progress.finished_step - kept))
        yield from (running, finished, committed, lag, stall, skipped)

    def _of_memory(self) -> Iterator[Metric]:
        status, counts = self._replicas.status(), self._replicas.counts
        yield _gauge(
            "gemini_ft_redundancy_whole",
            "Whether all holders have this node's newest sealed versions",
            status.redundancy_whole,
        )
        yield _gauge("gemini_ft_store_used_bytes", "Memory that checkpoints take", status.used_bytes)
        yield _gauge("gemini_ft_store_capacity_bytes", "Memory that checkpoints may take", status.capacity_bytes)
        yield _counter("gemini_ft_replication_sent_bytes", "Bytes of shards sent to peers", counts.sent_bytes)
        yield _counter(
            "gemini_ft_replication_received_bytes", "Bytes of shards received from peers", counts.received_bytes
        )
        damaged = CounterMetricFamily(
            "gemini_ft_verification_failures", "Copies whose bytes do not match their digests", labels=["found"]
        )
        for found in DamageFound:
            damaged.add_metric([found.value], counts.num_damaged[found])
        yield damaged

    def _of_link(self) -> Iterator[Metric]:
        yield _counter("gemini_ft_heartbeats_sent", "Heartbeats sent", self._link.num_heartbeats)
        yield _gauge("gemini_ft_nats_connected", "Whether NATS is connected", self._link.is_connected)
        yield _counter(
            "gemini_ft_nats_reconnects",
            "Connections to NATS after the first one",
            max(0, self._link.num_connections - 1),
        )

    def _ranks(self) -> list[Rank]:
        ranks = self._node.job.ranks if self._node.job else {}
        return [ranks[rank] for rank in sorted(ranks)]


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_text, value=value)
