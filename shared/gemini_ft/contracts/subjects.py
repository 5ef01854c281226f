"""NATS subjects and streams. A node's subjects carry its node id, because a node exists with or without a job."""

from __future__ import annotations

__all__ = [
    "HEARTBEATS",
    "REGISTER",
    "VERDICTS",
    "VERDICT_STREAM",
    "heartbeat_subject",
    "order_subject",
    "verdict_subject",
]

REGISTER = "gemini.register"
HEARTBEATS = "gemini.heartbeat.*"
VERDICTS = "gemini.verdict.>"
VERDICT_STREAM = "GEMINI_VERDICTS"


def heartbeat_subject(node_id: str) -> str:
    """Subject on which a node's agent publishes its heartbeats (core NATS: the newest wins, none is kept)."""
    return f"gemini.heartbeat.{node_id}"


def order_subject(node_id: str) -> str:
    """Subject on which an agent takes orders, as request and reply."""
    return f"gemini.order.{node_id}"


def verdict_subject(node_id: str) -> str:
    """Subject of the failure detector's verdicts about a node (JetStream)."""
    return f"gemini.verdict.{node_id}"
