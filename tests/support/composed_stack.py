"""docker-compose.yml without Docker: its services as processes, by the very commands and environments of the file.

What differs from containers:
- Each service has a loopback address of its own. It stands for the service's name wherever a host is named, also in
  secrets, and for 0.0.0.0 and 127.0.0.1 in what the service itself is told.
- Secrets, volumes, tmpfs, shm and what images bring are files and folders of this machine; their paths are replaced.
- The entry point of the image of Postgres is played by `PostgresServer`. All other commands run as they are.
- User, capabilities, read-only root, networks and limits are not imposed.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import subprocess
import sysconfig
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import asyncpg
import psutil
from compose_file import ROOT, Dockerfile, compose_config

from gemini_ft.contracts.errors import WaitTimeoutError
from gemini_ft.localstack._binaries import find_nats_server, find_postgres_bin
from gemini_ft.localstack._guard import Guard
from gemini_ft.localstack.postgres import PostgresServer
from gemini_ft.localstack.processes import ManagedProcess, Marker, kill_marked, marked_processes
from gemini_ft.security.compose_secrets import write_secrets
from gemini_ft.security.secret_files import write_secret

__all__ = ["ComposedService", "ComposedStack"]

_WAIT_S = 90.0
_POLL_S = 0.2
_VENV = "/opt/gemini-ft"
_PATH = ":".join(
    [sysconfig.get_path("scripts"), str(find_nats_server().parent), str(find_postgres_bin()), os.environ["PATH"]]
)


class ComposedService:
    """One service of the file, as one process with its descendants."""

    def __init__(
        self, name: str, definition: Mapping[str, Any], address: str, folder: Path, memory: Path, marker: Marker
    ) -> None:
        self.name = name
        self.definition = definition
        self.address = address
        self.folder = folder
        self.memory = memory
        self.marker = marker
        self.process: ManagedProcess | PostgresServer | None = None
        build = definition.get("build")
        self.image = (
            Dockerfile.read(ROOT / build["dockerfile"]) if build else Dockerfile((("FROM", definition["image"]),))
        )
        memory.mkdir()
        for path in (*self.mounts.values(), self.folder / "run" / "secrets"):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.running

    @property
    def mounts(self) -> dict[str, Path]:
        """Folder in the container that is its own -> what stands for it."""
        volumes = [mount["target"] for mount in self.definition.get("volumes", []) if mount["type"] == "volume"]
        tmpfs = [mount.partition(":")[0] for mount in self.definition.get("tmpfs", [])]
        return {target: self.folder / target.lstrip("/") for target in (*volumes, *tmpfs, self.working_folder)}

    @property
    def working_folder(self) -> str:
        """In the container."""
        return next(iter(self.image.last_stage.all("WORKDIR")), "/work")

    @property
    def secret_files(self) -> dict[str, Path]:
        """Name of each secret -> what stands for its file."""
        mounted = self.definition.get("secrets", [])
        return {secret["source"]: self.folder / secret["target"].lstrip("/") for secret in mounted}

    @property
    def paths(self) -> dict[str, Path]:
        """Every path in the container that has another one here."""
        wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        installed = {f"{_VENV}/{target}": ROOT / source for source, target in wheel["shared-data"].items()}
        copied = {target: ROOT / source for source, target in self.image.copied.items() if target.startswith("/")}
        given = {secret["target"]: self.secret_files[secret["source"]] for secret in self.definition.get("secrets", [])}
        return self.mounts | given | copied | installed | {"/dev/shm": self.memory}

    def usage(self) -> tuple[int, int]:
        """Bytes of memory, shm included, and number of threads of all its processes."""
        num_bytes = sum(path.stat().st_size for path in self.memory.rglob("*") if path.is_file())
        num_threads = 0
        for process in marked_processes(self.marker):
            try:
                num_bytes += process.memory_full_info().pss
                num_threads += process.num_threads()
            except psutil.NoSuchProcess:
                continue
        return num_bytes, num_threads


class ComposedStack:
    """The services of docker-compose.yml with all profiles, of which `up` starts those that are asked for."""

    def __init__(self, folder: Path, **variables: str) -> None:
        """`variables` are those of .env."""
        self._run_id = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.config = compose_config(**variables)
        self.memory = Path("/dev/shm") / f"gemini-ft-compose-{self._run_id}"
        self.memory.mkdir(mode=0o700)
        self._guard = Guard(Marker(self._run_id), [self.memory])
        self._secrets = folder / "secrets"
        write_secrets(self._secrets)
        network = f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
        self.services = {
            name: ComposedService(
                name, definition, f"{network}.{host}", folder / name, self.memory / name, Marker(self._run_id, name)
            )
            for host, (name, definition) in enumerate(sorted(self.config["services"].items()), start=1)
        }

    def __enter__(self) -> ComposedStack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in self.services.values():
            if service.process is not None:
                service.process.stop()
        self._guard.close()

    @property
    def api_url(self) -> str:
        """Where the coordinator is reached here."""
        return f"http://{self.services['coordinator'].address}:8080"

    @property
    def api_token(self) -> str:
        return (self._secrets / "api-token").read_text().strip()

    def up(self, name: str) -> ComposedService:
        """Start a service after all that it depends on, as its conditions say; what runs already is left alone."""
        service = self.services[name]
        if service.process is not None:
            return service
        for needed, dependency in service.definition.get("depends_on", {}).items():
            self.up(needed)
            assert dependency["condition"] == "service_healthy", f"{name} depends on {needed} in a way not known here"
            self.wait_healthy(needed)
        self._mount_secrets(service)
        service.process = self._start_postgres(service) if name == "postgres" else self._start(service)
        return service

    def kill(self, name: str) -> None:
        """What `docker kill` does to a node: no process of it is left, nor its memory."""
        service = self.services[name]
        kill_marked(service.marker)
        shutil.rmtree(service.memory)

    def wait_healthy(self, name: str) -> None:
        """Return once the service's own health check passes."""
        service = self.services[name]
        why = ""

        def is_healthy() -> bool:
            nonlocal why
            assert service.running, f"{name} has ended: {self.log(name)}"
            done = self.check_health(name)
            why = done.stderr
            return done.returncode == 0

        self.wait(is_healthy, lambda: f"{name} to be healthy ({why.strip()}; {self.log(name)})")

    def check_health(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run the service's health check once."""
        service = self.services[name]
        kind, *command = service.definition["healthcheck"]["test"]
        assert kind == "CMD"
        return subprocess.run(
            [self._translate(part, service) for part in command],
            env=self._environment(service),
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
        )

    def wait(self, condition: Callable[[], bool], what: Callable[[], str], timeout_s: float = _WAIT_S) -> None:
        """Return once `condition()` is true; raises WaitTimeoutError naming `what()`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise WaitTimeoutError.of(what(), timeout_s)
            time.sleep(_POLL_S)

    def log(self, name: str) -> str:
        """The end of what a service has written."""
        process = self.services[name].process
        return process.log_tail() if isinstance(process, ManagedProcess) else ""

    def _mount_secrets(self, service: ComposedService) -> None:
        for name, target in service.secret_files.items():
            source = Path(self.config["secrets"][name]["file"])
            assert source.parent == ROOT / "deploy" / "secrets"
            write_secret(target, self._translate((self._secrets / source.name).read_text(), service))

    def _start(self, service: ComposedService) -> ManagedProcess:
        process = ManagedProcess(
            [self._translate(part, service) for part in service.definition["command"]],
            name=service.name,
            log_path=service.folder / "output",
            env=self._environment(service),
            cwd=service.mounts[service.working_folder],
        )
        process.start()
        return process

    def _start_postgres(self, service: ComposedService) -> PostgresServer:
        given = service.definition["environment"]
        user, database = given["POSTGRES_USER"], given["POSTGRES_DB"]
        password = Path(self._translate(given["POSTGRES_PASSWORD_FILE"], service)).read_text().strip()
        settings = {"listen_addresses": service.address, "port": "5432"}
        server = PostgresServer(service.folder / "server", settings=settings, env=self._environment(service))
        server.start()

        async def prepare() -> None:
            connection = await asyncpg.connect(
                host=service.address, user="postgres", password=server.password, database="postgres"
            )
            try:
                await connection.execute(f"CREATE ROLE {user} SUPERUSER LOGIN PASSWORD '{password}'")
                await connection.execute(f"CREATE DATABASE {database} OWNER {user}")
            finally:
                await connection.close()

        asyncio.run(prepare())
        return server

    def _environment(self, service: ComposedService) -> dict[str, str]:
        given = {**service.image.environment, **service.definition.get("environment", {})}
        translated = {name: self._translate(value, service) for name, value in given.items()}
        return {**translated, "PATH": _PATH, "LC_ALL": "C.UTF-8", **service.marker.environment()}

    def _translate(self, text: str, service: ComposedService) -> str:
        """Replace what means something else in the service's container, in one pass."""
        paths = {path: str(here) for path, here in service.paths.items()}
        hosts = {name: other.address for name, other in self.services.items()}
        own = {"0.0.0.0": service.address, "127.0.0.1": service.address}
        names = "|".join(sorted(hosts, key=len, reverse=True))
        pattern = "|".join(
            (
                rf"(?<![\w./-])(?:{'|'.join(sorted(map(re.escape, paths), key=len, reverse=True))})(?![\w.-])",
                rf"(?<![\w.-])(?:{names})(?=:\d{{2,5}}\b)",
                rf"(?<=--host=)(?:{names})$",
                rf"(?<![\w.])(?:{'|'.join(map(re.escape, own))})(?![\w.])",
            )
        )
        meaning = paths | hosts | own
        return re.sub(pattern, lambda match: meaning[match[0]], text)
