"""A whole cluster on this machine: the control plane and a number of nodes, each process killable by itself."""

import importlib.util
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import psutil

from gemini_ft.client.api_client import ApiClient
from gemini_ft.contracts.api import NODE_LABEL
from gemini_ft.contracts.errors import ConfigurationError, NotFoundError, UnavailableError
from gemini_ft.contracts.messages import RankState
from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.localstack._guard import Guard
from gemini_ft.localstack._ports import ReservedPort
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.localstack.postgres import PostgresServer
from gemini_ft.localstack.processes import ManagedProcess, Marker, kill_marked, kill_processes, marked_processes
from gemini_ft.localstack.waiting import wait_until
from gemini_ft.security.nats_config import credentials_file, role_authorization
from gemini_ft.security.secret_files import read_or_create_secret, write_secret

__all__ = ["LocalNode", "LocalStack", "dashboard_is_installed"]

_START_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 10.0
_TMPFS = Path("/dev/shm")
_FIRST_HOST = 2
"""127.0.0.1 is the control plane's; nodes are 127.0.0.2 and up."""
_HEARTBEAT_INTERVAL_S = "0.25"


class _Service:
    """A process of ours that says through a ready file that it serves."""

    def __init__(self, name: str, argv: list[str], directory: Path, env: Mapping[str, str]) -> None:
        self._ready_file = directory / f"{name}.ready"
        self.process = ManagedProcess(
            [sys.executable, "-m", *argv, "--ready-file", str(self._ready_file)],
            name=name,
            log_path=directory / f"{name}.log",
            env=env,
            parent_death_signal=signal.SIGKILL,
        )

    def start(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        self.process.start()
        wait_until(self._is_ready, f"{self.process.name} to be ready", _START_TIMEOUT_S)

    def _is_ready(self) -> bool:
        if not self.process.running:
            raise UnavailableError(
                f"{self.process.name} ended with status {self.process.returncode} instead of starting; "
                f"its log says: {self.process.log_tail()}"
            )
        return self._ready_file.exists()


class LocalNode:
    """One machine of the cluster: an agent with a loopback address, a state folder and memory of its own."""

    def __init__(
        self, name: str, host: str, directory: Path, memory: Path, agent: ManagedProcess, metrics_port: ReservedPort
    ) -> None:
        self.name = name
        self.host = host
        self.directory = directory
        self.memory = memory
        self.agent = agent
        self.metrics_port = metrics_port

    @property
    def log_dir(self) -> Path:
        """Where launcher and ranks of this node write."""
        return self.directory / "logs"

    @property
    def metrics_url(self) -> str:
        """Where the agent serves its metrics."""
        return f"http://{self.metrics_port.address}/metrics"

    @property
    def has_learned(self) -> bool:
        """Whether the node's launcher knows what to preload before the next start of its ranks."""
        return any(self.directory.glob("state/launcher/learned-*.json"))


class LocalStack:
    """Postgres, NATS, coordinator, failure detector and `num_nodes` agents, as processes of this machine.

    Nothing that ends is started again unless asked for. Ports, secrets and data stay the same when the control
    plane is killed and started again. Leaving the context, or the end of this process in any way, ends all
    processes and removes all memory; `directory` stays if it was given.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        num_nodes: int,
        dashboard: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`env` is added to the environment of every process. With `dashboard` there is one, too.

        Raises:
            ConfigurationError: a dashboard is wanted, and not installed.
        """
        if dashboard and not dashboard_is_installed():
            raise ConfigurationError("the dashboard is not installed; install gemini-ft[dashboard], or do without it")
        self.marker = Marker(f"{os.getpid()}-{secrets.token_hex(4)}")
        temporary = None if directory else Path(tempfile.mkdtemp(prefix="gemini-ft-"))
        self.directory = (directory or temporary or Path()).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.memory = (_TMPFS if _TMPFS.is_dir() else self.directory) / f"gemini-ft-{self.marker.run_id}"
        self.memory.mkdir(mode=0o700)
        self._guard = Guard(self.marker, [self.memory, *filter(None, [temporary])])
        self._env = {**os.environ, **(env or {}), **self.marker.environment()}
        self._postgres = PostgresServer(self.directory / "postgres", env=self._env)
        users = {"authorization": role_authorization(self._nats_credentials)}
        self._nats = NatsServer(self.directory / "nats", extra=users, env=self._env)
        self._port: ReservedPort | None = None
        self._detector_metrics_port: ReservedPort | None = None
        self._services: list[_Service] = []
        self._has_dashboard = dashboard
        self._dashboard_port: ReservedPort | None = None
        self._dashboard: _Service | None = None
        self._num_nodes = num_nodes
        self.nodes: dict[str, LocalNode] = {}

    # ---- whole stack

    def start(self) -> None:
        """Return when the control plane serves and all nodes have registered."""
        self._port = ReservedPort()
        self._detector_metrics_port = ReservedPort()
        read_or_create_secret(self.api_token_file)
        self.start_control_plane()
        if self._has_dashboard:
            self._dashboard_port = ReservedPort()
            self._dashboard = self._make_dashboard()
            self._dashboard.start()
        for _ in range(self._num_nodes):
            self.add_node()
        self.wait_nodes()

    def close(self) -> None:
        """End everything and remove what was in memory; harmless when repeated."""
        for service in filter(None, [self._dashboard, *self._services]):
            service.process.stop()
        for node in self.nodes.values():
            node.agent.kill()
        self._postgres.stop()
        self._nats.stop()
        self._guard.close()
        services = [self._port, self._detector_metrics_port, self._dashboard_port]
        ports = [*services, *(node.metrics_port for node in self.nodes.values())]
        for port in filter(None, ports):
            port.release()
        self._port = self._detector_metrics_port = self._dashboard_port = None

    def __enter__(self) -> "LocalStack":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- control plane

    @property
    def url(self) -> str:
        """Of the REST API. Raises UnavailableError before the start."""
        return f"http://{_started(self._port).address}"

    @property
    def detector_metrics_url(self) -> str:
        """Where the failure detector serves its metrics. Raises UnavailableError before the start."""
        return f"http://{_started(self._detector_metrics_port).address}/metrics"

    @property
    def dashboard_url(self) -> str:
        """Of the dashboard. Raises UnavailableError if there is none."""
        return f"http://{_started(self._dashboard_port).address}"

    @property
    def api_token_file(self) -> Path:
        return self.directory / "api-token"

    def client(self) -> ApiClient:
        """A client of the REST API that tells at once when it cannot be reached; its caller closes it."""
        return ApiClient(self.url, self.api_token_file.read_text(), patience=timedelta(0))

    def start_control_plane(self) -> None:
        """Return when all of it serves; started again it has the same ports, secrets and data."""
        with ThreadPoolExecutor() as pool:
            for started in [pool.submit(self._postgres.start), pool.submit(self._nats.start)]:
                started.result()
            if not self._services:
                self._services = self._make_services()
            for started in [pool.submit(service.start) for service in self._services]:
                started.result()

    def kill_control_plane(self) -> None:
        """SIGKILL coordinator, failure detector, NATS and Postgres."""
        for service in self._services:
            service.process.kill()
        self._nats.kill()
        self._postgres.kill()

    def ended(self) -> set[str]:
        """Names of what was started and does not run any more."""
        servers = {"postgres": self._postgres.running, "nats-server": self._nats.running}
        services = {service.process.name: service.process.running for service in self._services}
        services |= {} if self._dashboard is None else {"dashboard": self._dashboard.process.running}
        agents = {node.agent.name: node.agent.running for node in self.nodes.values()}
        return {name for name, is_running in (servers | services | agents).items() if not is_running}

    # ---- nodes

    def wait_nodes(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Return when every node that runs has registered."""
        with self.client() as client:
            wait_until(
                lambda: self._names() <= {node.name for node in client.nodes() if node.is_alive},
                f"the nodes {', '.join(sorted(self._names()))} to register",
                timeout_s,
            )

    def add_node(self) -> LocalNode:
        """Start one more node; returns at once."""
        node = self._make_node()
        self.nodes[node.name] = node
        node.agent.start()
        return node

    def kill_agent(self, name: str) -> None:
        """SIGKILL the agent of a node; its launcher and ranks live on."""
        self._node(name).agent.kill()

    def start_agent(self, name: str) -> None:
        """Start the agent of a node again, over its old state and memory; returns at once."""
        self._node(name).agent.start()

    def kill_node(self, name: str) -> None:
        """Lose a machine: SIGKILL every process of the node and delete its memory."""
        node = self._node(name)
        kill_marked(self._node_marker(name))
        node.agent.wait(_KILL_TIMEOUT_S)
        shutil.rmtree(node.memory)

    def kill_rank(self, job_id: str, rank: int) -> None:
        """SIGKILL the process of a job's rank; raises NotFoundError as `rank_process` does."""
        kill_processes([self.rank_process(job_id, rank)], _KILL_TIMEOUT_S)

    def rank_process(self, job_id: str, rank: int) -> psutil.Process:
        """The process of a job's rank; raises NotFoundError if the newest heartbeats show no such rank running."""
        with self.client() as client:
            newest = client.job(job_id).generation
            pids = [
                known.pid
                for node in client.nodes()
                if node.job_id == job_id
                for known in node.ranks
                if (known.rank, known.generation, known.state) == (rank, newest, RankState.RUNNING)
            ]
        # A pid of an old heartbeat might be anybody's by now.
        for process in marked_processes(self.marker):
            if process.pid in pids:
                return process
        raise NotFoundError(f"rank {rank} of {job_id} is not running in generation {newest}")

    def _names(self) -> set[str]:
        return {node.name for node in self.nodes.values() if node.agent.running}

    def _node(self, name: str) -> LocalNode:
        try:
            return self.nodes[name]
        except KeyError:
            raise NotFoundError(f"there is no node {name}; there are {', '.join(self.nodes)}") from None

    def _node_marker(self, name: str) -> Marker:
        return Marker(self.marker.run_id, name)

    # ---- how processes are made

    def _make_services(self) -> list[_Service]:
        database_url_file = write_secret(self.directory / "database-url", self._postgres.url)
        coordinator = [
            *("gemini_ft.coordinator", "--database-url-file", str(database_url_file)),
            *self._nats_options(NatsRole.COORDINATOR),
            *("--api-token-file", str(self.api_token_file), "--listen", self.url.removeprefix("http://")),
        ]
        metrics = ["--metrics-listen", _started(self._detector_metrics_port).address]
        detector = ["gemini_ft.failure_detector", *self._nats_options(NatsRole.FAILURE_DETECTOR), *metrics]
        return [
            _Service("coordinator", coordinator, self.directory, self._env),
            _Service("failure-detector", detector, self.directory, self._env),
        ]

    def _make_dashboard(self) -> _Service:
        listen = _started(self._dashboard_port).address
        secret = str(self.directory / "dashboard-cookie-secret")
        argv = ["gemini_ft.dashboard", "--api", self.url, "--listen", listen, "--cookie-secret-file", secret]
        return _Service("dashboard", argv, self.directory, self._env)

    def _make_node(self) -> LocalNode:
        number = len(self.nodes)
        name, host = f"n{number}", f"127.0.0.{_FIRST_HOST + number}"
        directory = self.directory / "nodes" / name
        directory.mkdir(parents=True, exist_ok=True)
        memory = self.memory / name
        memory.mkdir(mode=0o700)
        metrics_port = ReservedPort(host=host)
        argv = [
            *(sys.executable, "-m", "gemini_ft.agent"),
            *self._nats_options(NatsRole.AGENT),
            *("--state-dir", str(directory / "state"), "--log-dir", str(directory / "logs")),
            *("--memory-dir", str(memory), "--host", host, "--label", f"{NODE_LABEL}={name}"),
            *("--metrics-listen", metrics_port.address),
        ]
        env = {
            "GEMINI_FT_AGENT_HEARTBEAT_INTERVAL": _HEARTBEAT_INTERVAL_S,
            **self._env,
            **self._node_marker(name).environment(),
        }
        agent = ManagedProcess(argv, name=f"agent {name}", log_path=directory / "agent.log", env=env)
        return LocalNode(name, host, directory, memory, agent, metrics_port)

    @property
    def _nats_credentials(self) -> Path:
        return self.directory / "nats-credentials"

    def _nats_options(self, role: NatsRole) -> list[str]:
        shown = credentials_file(self._nats_credentials, role)
        return ["--nats", self._nats.url, "--nats-credentials-file", str(shown)]


def _started(port: ReservedPort | None) -> ReservedPort:
    if port is None:
        raise UnavailableError("the local stack has not been started")
    return port


def dashboard_is_installed() -> bool:
    """Whether this installation has what the dashboard needs."""
    return importlib.util.find_spec("nicegui") is not None
