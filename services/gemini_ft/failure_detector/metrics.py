"""The detector's metrics, read from its newest state at each scrape; docs/metrics.md explains the names."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gemini_ft.contracts.messages import VerdictKind
from gemini_ft.failure_detector.judge import NodeState
from gemini_ft.failure_detector.service import FailureDetector

__all__ = ["DetectorMetrics"]


class DetectorMetrics(Collector):
    """Metrics of one detector; to be collected on its event loop."""

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        detector = self._detector
        # One series a node that is known: failed ones are forgotten after a while.
        phi = GaugeMetricFamily("gemini_ft_detector_phi", "Suspicion that the node has failed", labels=["node_id"])
        nodes: Counter[NodeState] = Counter()
        for node_id, (state, suspicion) in detector.suspicions().items():
            phi.add_metric([node_id], suspicion)
            nodes[state] += 1
        yield phi
        by_status = GaugeMetricFamily("gemini_ft_detector_nodes", "Nodes, as they were judged last", labels=["status"])
        for state in NodeState:
            by_status.add_metric([state.value], nodes[state])
        yield by_status
        yield GaugeMetricFamily(
            "gemini_ft_detector_holding",
            "Whether nobody is judged, because the detector suspects itself",
            value=detector.holds_verdicts,
        )
        yield CounterMetricFamily(
            "gemini_ft_detector_heartbeats", "Heartbeats heard", value=float(detector.num_heartbeats)
        )
        verdicts = CounterMetricFamily("gemini_ft_detector_verdicts", "Verdicts", labels=["kind"])
        for kind in VerdictKind:
            verdicts.add_metric([kind.value], detector.num_verdicts[kind])
        yield verdicts
        yield GaugeMetricFamily(
            "gemini_ft_detector_unpublished_verdicts", "Verdicts that wait for NATS", value=detector.num_unpublished
        )
        yield GaugeMetricFamily("gemini_ft_nats_connected", "Whether NATS is connected", value=detector.is_connected)
        yield CounterMetricFamily(
            "gemini_ft_nats_reconnects",
            "Connections to NATS after the first one",
            value=max(0, detector.num_connections - 1),
        )
