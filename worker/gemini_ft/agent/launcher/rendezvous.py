"""The rendezvous handler `gemini`: torch elastic learns from the agent which generation to join, and as whom.

Each generation has a fresh store. Restarted ranks that met the old one would read the addresses of dead processes,
and Gloo then fails or hangs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from gemini_ft.agent.launcher.assignments import AgentLink, Assignment
from gemini_ft.contracts.errors import GeminiError, JobClosedError, WaitTimeoutError

__all__ = ["GeminiRendezvousHandler", "create_handler_factory"]

_PARK = timedelta(seconds=1)
_ASK = timedelta(seconds=1)
_CONNECT_S = 1.0
_NUM_KEPT_STORES = 2

logger = logging.getLogger(__name__)


class _SupersededError(Exception):
    """A newer generation was ordered while this one was being joined."""


class GeminiRendezvousHandler(RendezvousHandler):
    """See RendezvousHandler. The agent's assignments take the place of a vote among launchers.

    Args:
        link: the line to the agent; closed by `shutdown`.
        store_timeout: longest wait for the store of a generation that stays the newest one.
        store_io_timeout: longest single operation on a store.
        while_parked: called about once a second while this node has nothing to run.
    """

    def __init__(
        self,
        link: AgentLink,
        job_id: str,
        store_timeout: timedelta = timedelta(minutes=10),
        store_io_timeout: timedelta = timedelta(seconds=60),
        while_parked: Callable[[], None] = lambda: None,
    ) -> None:
        self.link = link
        self.closed: JobClosedError | None = None
        self._job_id = job_id
        self._store_timeout = store_timeout
        self._store_io_timeout = store_io_timeout
        self._while_parked = while_parked
        self._assignment: Assignment | None = None
        # A store is dropped two generations later: until then ranks of other nodes may not have heard of their end.
        self._stores: deque[TCPStore] = deque(maxlen=_NUM_KEPT_STORES)

    @property
    def generation(self) -> int:
        """Generation that was joined last; 0 before the first."""
        return self._assignment.generation if self._assignment else 0

    @property
    def use_agent_store(self) -> bool:
        """See RendezvousHandler."""
        return True

    def get_backend(self) -> str:
        """See RendezvousHandler."""
        return "gemini"

    def get_run_id(self) -> str:
        """See RendezvousHandler."""
        return self._job_id

    def is_closed(self) -> bool:
        """See RendezvousHandler."""
        return self.closed is not None or self.link.is_closed()

    def set_closed(self) -> None:
        """See RendezvousHandler. No effect: the coordinator alone closes a job."""

    def num_nodes_waiting(self) -> int:
        """Return 1 when the ranks must leave this generation: a newer one is ordered, or the job is closed."""
        return int(self.link.ordered_generation() > self.generation or self.link.is_closed())

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the newest generation above the last one; a standby waits here until it is given a slot.

        Raises:
            RendezvousGracefulExitError: the job has ended.
            RendezvousTimeoutError: slot 0 did not open its store, and nobody ordered another generation.
            RendezvousClosedError: the agent refuses this launcher.
        """
        after = self.generation
        while True:
            try:
                assignment = self._await_assignment(after)
                store, host, port = self._join_store(assignment)
                break
            except _SupersededError as superseded:
                logger.info("%s", superseded)
                # The assignment that follows may not be here yet; the agent parks us until it is.
                after = self.link.ordered_generation() - 1
            except JobClosedError as error:
                self.closed = error
                raise RendezvousGracefulExitError(str(error)) from error
            except WaitTimeoutError as error:
                raise RendezvousTimeoutError(str(error)) from error
            except GeminiError as error:
                raise RendezvousClosedError(str(error)) from error
        self._assignment = assignment
        self._stores.append(store)
        # Ranks started by torch's own agent get no other word of it: torch copies this environment into them.
        os.environ["GEMINI_FT_GENERATION"] = str(assignment.generation)
        logger.info(
            "joined generation %d as slot %d",
            assignment.generation,
            assignment.group_rank,
            extra={"generation": assignment.generation},
        )
        return RendezvousInfo(store, assignment.group_rank, assignment.num_slots, RendezvousStoreInfo(host, port))

    def shutdown(self) -> bool:
        """See RendezvousHandler. Called by torch in a `finally`: with no error on its way, all ranks ended well."""
        if sys.exc_info()[0] is None and self.closed is None and self.generation:
            self.link.finished(self.generation)
        self.link.close(timedelta(seconds=5))
        self._stores.clear()
        return True

    def _await_assignment(self, after: int) -> Assignment:
        while True:
            try:
                return self.link.next_assignment(after, _PARK)
            except WaitTimeoutError as error:
                logger.debug("still parked: %s", error)
                self._while_parked()

    def _join_store(self, assignment: Assignment) -> tuple[TCPStore, str, int]:
        if assignment.group_rank == 0:
            store = self._host_store(assignment.host)
            self.link.publish_store(assignment.generation, assignment.host, store.port)
            return store, assignment.host, store.port
        deadline = time.monotonic() + self._store_timeout.total_seconds()
        while True:
            what = f"slot 0 to open the store of generation {assignment.generation}"
            try:
                host, port = self.link.store_address(assignment.generation, _ASK)
                what += f" at {host}:{port}"
                return self._connect(host, port), host, port
            except (WaitTimeoutError, OSError, DistError) as error:
                logger.debug("%s: %s", what, error)
            newest = self.link.ordered_generation()
            if newest > assignment.generation:
                raise _SupersededError(f"left generation {assignment.generation} for {newest} while joining it")
            if time.monotonic() > deadline:
                raise WaitTimeoutError.of(what, self._store_timeout)
            time.sleep(0.01)

    def _host_store(self, host: str) -> TCPStore:
        # torch would listen on every interface; given a socket it listens there only.
        try:
            listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise RendezvousConnectionError(f"slot 0 cannot listen at its own address {host}: {error}") from error
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=self._store_io_timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def _connect(self, host: str, port: int) -> TCPStore:
        # Probed first: torch retries a refused connection slowly and prints a stack each time.
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
        return TCPStore(host, port, is_master=False, timeout=self._store_io_timeout)


def create_handler_factory() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point `torchrun.handlers`: torch calls it without arguments and expects the creator of handlers."""
    return _create_handler


def _create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler for `torchrun --rdzv-backend=gemini --rdzv-endpoint=<agent socket> --rdzv-id=<job>`."""
    from gemini_ft.agent.launcher.agent_link import SocketAgentLink

    num_local_ranks = params.get_as_int("nproc_per_node", None)
    os.environ["GEMINI_FT_AGENT_SOCKET"] = params.endpoint
    os.environ["GEMINI_FT_JOB"] = params.run_id
    link = SocketAgentLink(params.endpoint, params.run_id, num_local_ranks or 0)
    return GeminiRendezvousHandler(link, params.run_id)
