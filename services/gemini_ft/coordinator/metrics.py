"""The coordinator's metrics (docs/metrics.md). Labels are bounded: jobs are the open ones, routes are templates."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gemini_ft.coordinator.progress import committed_step, finished_step
from gemini_ft.coordinator.recovery_counts import RecoveryCounts
from gemini_ft.coordinator.state import Cluster, JobPhase, NodeStatus
from gemini_ft.metrics_listener import make_registry

if TYPE_CHECKING:
    from gemini_ft.coordinator.service import Coordinator

__all__ = ["CoordinatorMetrics"]

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class CoordinatorMetrics:
    """What happens is counted here; what is the case is read when it is asked for."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.registry = make_registry(_State(coordinator))
        self.heartbeats = Counter("gemini_ft_coordinator_heartbeats", "Heartbeats heard", registry=self.registry)
        self.nats_reconnects = Counter(
            "gemini_ft_nats_reconnects", "Connections to NATS after the first one", registry=self.registry
        )
        self.recoveries = RecoveryCounts()
        self.registry.register(self.recoveries)
        self.pass_seconds = Histogram(
            "gemini_ft_coordinator_pass_seconds",
            "Time for one look at the whole cluster, and for acting on it",
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "gemini_ft_api_request_seconds",
            "Time until the head of an answer is sent",
            ["method", "route", "status"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )

    def exposition(self) -> bytes:
        """Return all of them in the text format of Prometheus."""
        return generate_latest(self.registry)


class _State(Collector):
    """What is the case, as the newest reading of the database and the newest heartbeats have it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def describe(self) -> Iterator[Metric]:
        """See Collector: the names are not asked for at registration, when there is nothing to read yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        coordinator = self._coordinator
        yield GaugeMetricFamily(
            "gemini_ft_coordinator_leader", "Whether this process leads", value=coordinator.leadership.held
        )
        yield GaugeMetricFamily("gemini_ft_nats_connected", "Whether NATS is connected", value=coordinator.is_connected)
        connections = GaugeMetricFamily("gemini_ft_database_connections", "Connections to Postgres", labels=["state"])
        for state, num_connections in coordinator.num_database_connections().items():
            connections.add_metric([state], num_connections)
        yield connections
        yield from self._of_the_cluster(coordinator.view.newest or Cluster({}, {}))

    def _of_the_cluster(self, cluster: Cluster) -> Iterator[Metric]:
        nodes = [node for node in cluster.nodes.values() if not node.removed]
        by_status = GaugeMetricFamily("gemini_ft_coordinator_nodes", "Registered nodes", labels=["status"])
        statuses = Tally(node.status for node in nodes)
        for status in NodeStatus:
            by_status.add_metric([status.value], statuses[status])
        yield by_status
        num_cordoned = sum(node.cordoned for node in nodes)
        yield GaugeMetricFamily(
            "gemini_ft_coordinator_cordoned_nodes", "Nodes that take no new work", value=num_cordoned
        )
        jobs = [job for job in cluster.jobs.values() if job.phase.outcome is None]
        by_phase = GaugeMetricFamily("gemini_ft_coordinator_jobs", "Open jobs", labels=["phase"])
        phases = Tally(job.phase for job in jobs)
        for phase in JobPhase:
            if phase.outcome is None:
                by_phase.add_metric([phase.value], phases[phase])
        yield by_phase
        generation = GaugeMetricFamily("gemini_ft_job_generation", "Newest generation", labels=["job_id"])
        committed = GaugeMetricFamily("gemini_ft_job_committed_step", "Newest committed version", labels=["job_id"])
        finished = GaugeMetricFamily("gemini_ft_job_finished_step", "Newest step of any rank", labels=["job_id"])
        for job in jobs:
            generation.add_metric([job.job_id], job.generation)
            for family, step in (
                (committed, committed_step(job, cluster, self._coordinator.seen)),
                (finished, finished_step(job, cluster, self._coordinator.seen)),
            ):
                if step is not None:
                    family.add_metric([job.job_id], step)
        yield from (generation, committed, finished)
