"""NATS subjects and streams. A node's subjects carry its node id, because a node exists with or without a job."""

from __future__ import annotations

__all__ = [
    "HEARTBEATS",
    "HEARTBEAT_STREAM",
    "IMPORTS_BUCKET",
    "REGISTER",
    "VERDICTS",
    "VERDICT_CONSUMER",
    "VERDICT_STREAM",
    "heartbeat_subject",
    "log_subject",
    "order_subject",
    "verdict_subject",
]

REGISTER = "gemini.register"
HEARTBEATS = "gemini.heartbeat.*"
VERDICTS = "gemini.verdict.>"
VERDICT_STREAM = "GEMINI_VERDICTS"
VERDICT_CONSUMER = "coordinator"
HEARTBEAT_STREAM = "GEMINI_HEARTBEATS"
"""Keeps the newest heartbeat of every node, by which a restarted detector knows whom to expect."""
IMPORTS_BUCKET = "gemini_imports"
"""Key-value bucket with what each job's script imports; the coordinator makes it, agents fill and read it."""


def heartbeat_subject(node_id: str) -> str:
    """Subject on which a node's agent publishes its heartbeats (core NATS: the newest wins, none is kept)."""
    return f"gemini.heartbeat.{node_id}"


def log_subject(node_id: str) -> str:
    """Subject on which an agent answers requests for its ranks' logs."""
    return f"gemini.log.{node_id}"


def order_subject(node_id: str) -> str:
    """Subject on which an agent takes orders, as request and reply."""
    return f"gemini.order.{node_id}"


def verdict_subject(node_id: str) -> str:
    """Subject of the failure detector's verdicts about a node (JetStream)."""
    return f"gemini.verdict.{node_id}"
