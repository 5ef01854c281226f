"""A private nats-server with JetStream."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gemini_ft.contracts.errors import UnavailableError
from gemini_ft.localstack._binaries import find_nats_server
from gemini_ft.localstack._ports import LOOPBACK, ReservedPort
from gemini_ft.localstack.processes import ManagedProcess
from gemini_ft.localstack.waiting import wait_until
from gemini_ft.security.secret_files import read_or_create_secret, write_secret

_START_TIMEOUT_S = 15.0
_MAX_STORE_BYTES = 1 << 30


class NatsServer:
    """A LocalServer that speaks NATS; streams and key-value buckets are files below `directory`.

    Clients present `token`, unless `extra` brings its own `authorization` or `accounts`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        extra: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        die_with_parent: bool = True,
    ) -> None:
        """`extra` is merged into the top level of the server's configuration (nats.conf as JSON)."""
        self._directory = directory.absolute()
        self._port = port
        self._extra = dict(extra or {})
        self._reserved: ReservedPort | None = None
        self._process = ManagedProcess(
            [str(find_nats_server()), "--config", str(self._config_path), "--ports_file_dir", str(self._run)],
            name="nats-server",
            log_path=self._directory / "nats-server.log",
            env=env,
            parent_death_signal=signal.SIGTERM if die_with_parent else None,
        )

    @property
    def url(self) -> str:
        """Without credentials. Raises UnavailableError before the first start if the port was left open."""
        if not self._port:
            raise UnavailableError("nats-server has no port yet; start it first")
        return f"{'tls' if 'tls' in self._extra else 'nats'}://{LOOPBACK}:{self._port}"

    @property
    def token(self) -> str | None:
        """What clients present, or None if `extra` configures the authorization."""
        if self._extra.keys() & {"authorization", "accounts"}:
            return None
        return read_or_create_secret(self.token_file)

    @property
    def token_file(self) -> Path:
        """Where `token` is once it has been asked for."""
        return self._directory / "token"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.running

    def start(self) -> None:
        """Return when clients can connect and JetStream has recovered its files."""
        self._run.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)
        for stale in self._run.glob("*.ports"):
            stale.unlink()
        if self._reserved is None:
            self._reserved = ReservedPort(self._port)
            self._port = self._reserved.number
        self._write_config()
        self._process.start()
        try:
            wait_until(self._is_ready, "nats-server to accept connections", _START_TIMEOUT_S)
        except Exception:
            self.stop()
            raise

    def stop(self) -> None:
        self._process.stop()
        self._release_port()

    def kill(self) -> None:
        """SIGKILL, as a crash would; `start` brings it back on the same port with its data."""
        self._process.kill()

    def __enter__(self) -> "NatsServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _run(self) -> Path:
        return self._directory / "run"

    @property
    def _config_path(self) -> Path:
        return self._directory / "nats.conf"

    def _write_config(self) -> None:
        config: dict[str, Any] = {
            "listen": f"{LOOPBACK}:{self._port}",
            "server_name": "gemini-ft-local",
            "jetstream": {"store_dir": str(self._directory), "max_file_store": _MAX_STORE_BYTES},
        }
        if self.token is not None:
            config["authorization"] = {"token": self.token}
        write_secret(self._config_path, json.dumps(config | self._extra, indent=1))

    def _is_ready(self) -> bool:
        """The server writes its ports file last, when it serves."""
        if not self._process.running:
            raise UnavailableError(
                f"nats-server ended with status {self._process.returncode} instead of starting; "
                f"its log says: {self._process.log_tail()}"
            )
        return (self._run / f"nats-server_{self.pid}.ports").exists()

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None
