"""A local stack whose every process can be hurt by itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import psutil

from gemini_ft.faults import FAULT_VARIABLE
from gemini_ft.localstack.processes import Marker, kill_processes, marked_processes
from gemini_ft.localstack.stack import LocalStack
from gemini_ft.localstack.waiting import wait_until

__all__ = ["FaultStack"]

_PATIENCE_S = 60.0


class _Server(NamedTuple):
    start: Callable[[], None]
    kill: Callable[[], None]


class FaultStack(LocalStack):
    """See LocalStack."""

    # ---- control plane

    def kill_server(self, name: str) -> None:
        """SIGKILL one process of the control plane, by its name in `ended()`."""
        self._server(name).kill()

    def start_server(self, name: str) -> None:
        """Start it again; returns when it serves."""
        self._server(name).start()

    def http(self, token: str | None = None) -> httpx.Client:
        """A bare client of the REST API, with the right token unless another is given."""
        right = self.api_token_file.read_text().strip()
        return httpx.Client(base_url=f"{self.url}/v1", headers={"Authorization": f"Bearer {token or right}"})

    # ---- nodes

    def arm_agent(self, name: str, fault: str) -> None:
        """Let the agent of a node live its next life with an armed fault point; returns at once."""
        self.kill_agent(name)
        self.nodes[name].agent.start({FAULT_VARIABLE: fault})

    def start_dead(self) -> None:
        """Start again whatever has ended."""
        if self.ended() - {node.agent.name for node in self.nodes.values()}:
            self.kill_control_plane()
            self.start_control_plane()
        for name, node in self.nodes.items():
            if not node.agent.running:
                self.start_agent(name)

    def wait_agent_killed(self, name: str, what: str, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until the agent of a node has been killed by itself."""
        agent = self.nodes[name].agent
        wait_until(lambda: not agent.running, what, timeout_s)
        assert agent.returncode == -signal.SIGKILL, f"{agent.name} ended by itself: {agent.log_tail()}"

    def kill_node_processes(self, *names: str) -> None:
        """SIGKILL every process of some nodes at the same instant; their memory and state stay."""
        kill_processes([process for name in names for process in self.node_processes(name)], _PATIENCE_S)

    @contextmanager
    def stopped(self, *processes: psutil.Process) -> Iterator[None]:
        """SIGSTOP some processes meanwhile; those that were killed meanwhile stay dead."""
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                if process.is_running():
                    process.resume()

    def node_processes(self, name: str) -> list[psutil.Process]:
        """All processes of a node."""
        return marked_processes(Marker(self.marker.run_id, name))

    def _server(self, name: str) -> _Server:
        services = {service.process.name: service for service in self._services}
        if name in services:
            return _Server(services[name].start, services[name].process.kill)
        servers = {"postgres": self._postgres, "nats-server": self._nats}
        return _Server(servers[name].start, servers[name].kill)
