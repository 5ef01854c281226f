"""All tunables of the coordinator, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

__all__ = ["CoordinatorSettings"]


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Times are judged by this process's monotonic clock only."""

    tick: timedelta = timedelta(milliseconds=250)
    """The loop turns this often even if nothing is heard."""

    order_repeat: timedelta = timedelta(seconds=1)
    """An order whose effect is not seen is sent again after this time."""

    silence: timedelta = timedelta(seconds=3)
    """A node without a heartbeat for this time (or four of its intervals) is not handed work, and another process may
    take its identity.
    """

    fence_limit: timedelta = timedelta(minutes=2)
    """A node that sends heartbeats but does not answer the fence for this time is taken for lost."""

    launcher_grace: timedelta = timedelta(seconds=15)
    """A member whose launcher is gone for this time has lost its ranks; a restarted agent hears of its launcher
    sooner.
    """

    record_interval: timedelta = timedelta(milliseconds=500)
    """Newly committed versions, and what a job waits for, are recorded at most this often: recoveries must not wait
    for them.
    """

    database_timeout: timedelta = timedelta(seconds=5)
    """Bound on connecting to Postgres and on every statement."""

    num_control_connections: int = 5
    """To Postgres, for the leader's loop and registration: no number of requests of people holds these up."""

    num_api_connections: int = 15
    """To Postgres, for requests of people; those that find none free wait for `database_timeout` at most."""

    startup_timeout: timedelta = timedelta(seconds=30)
    """Bound on the first connection to Postgres and NATS."""

    leader_retry: timedelta = timedelta(milliseconds=250)
    """A coordinator that does not lead tries this often to take over."""

    leader_ping: timedelta = timedelta(milliseconds=500)
    """The leader checks this often that it still holds the lock."""

    leader_lease: timedelta = timedelta(seconds=2)
    """A leader of which Postgres has not heard for this time leads no longer. A recovery waits for its successor, so
    this is short; four pings fit in.
    """

    agents_need_tokens: bool = False
    """Whether agents must present a token of role `agent` to register; one that is presented is checked in any case."""

    num_kept_versions: int = 1000
    """Recorded versions older than this many steps are dropped."""
