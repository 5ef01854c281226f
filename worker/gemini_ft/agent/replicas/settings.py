"""Everything that can be tuned about checkpoint memory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from gemini_ft.agent.replicas.tls import PeerTls
from gemini_ft.contracts.buffer_format import DEFAULT_CHUNK_BYTES

__all__ = ["ReplicaSettings"]


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of one node's checkpoint memory."""

    memory_dir: Path
    """Folder on tmpfs that belongs to this node alone; buffers live in one folder a job below it."""
    host: str = "127.0.0.1"
    """Address that the data plane binds and peers connect to."""
    memory_limit_bytes: int | None = None
    """What all buffers together may take; none: what tmpfs, cgroup and machine allow."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Size of a chunk of a large shard; sockets do best with about 1 MiB."""
    chunk_timeout: timedelta = timedelta(seconds=10)
    """A transfer that makes no progress for this long is given up and its connection opened again."""
    connect_timeout: timedelta = timedelta(seconds=5)
    """Longest wait for a TCP connection, and again for the mutual challenge on it."""
    first_retry: timedelta = timedelta(milliseconds=50)
    """Pause after the first failed attempt to reach a peer; it doubles with each further one."""
    last_retry: timedelta = timedelta(seconds=1)
    """Longest pause between two attempts to reach a peer."""
    num_fetch_rounds: int = 3
    """How often the list of sources is gone through before a shard is given up as lost."""
    max_pending_handshakes: int = 64
    """Connections that may be in the challenge at once; more are closed unheard."""
    tls: PeerTls | None = None
    """Certificates for connections between agents; none: they are authenticated but not encrypted."""
    keepalive_idle: timedelta = timedelta(seconds=10)
    """Silence on a connection after which the kernel begins to probe whether the peer's machine still exists."""
