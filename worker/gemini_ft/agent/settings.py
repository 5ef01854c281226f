"""All settings of the agent, each with its environment variable.

A command line option wins over the environment, and the environment over the default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from gemini_ft.agent.replicas.tls import PeerTls
from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.security.exposure import is_loopback
from gemini_ft.security.nats_access import NatsAccess
from gemini_ft.security.secret_files import read_secret

__all__ = ["ENVIRONMENT_PREFIX", "AgentSettings"]

ENVIRONMENT_PREFIX = "GEMINI_FT_AGENT_"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Field `x` is also read from the variable GEMINI_FT_AGENT_X; durations are given in seconds."""

    nats_url: str
    state_dir: Path
    memory_dir: Path
    host: str = "127.0.0.1"
    """Address under which the other nodes reach this one."""
    memory_limit_bytes: int | None = None
    """What all checkpoint memory may take; by default what tmpfs, cgroup and machine allow."""
    log_dir: Path | None = None
    """Where launcher and ranks write their output; by default `logs` in the state folder."""
    nats_credentials_file: Path | None = None
    nats_token_file: Path | None = None
    nats_ca_file: Path | None = None
    """These three: see NatsAccess."""
    registration_token_file: Path | None = None
    """Holds an API token of role `agent`, where the coordinator asks for one."""
    tls_certificate_file: Path | None = None
    tls_key_file: Path | None = None
    tls_ca_file: Path | None = None
    """Encrypt what goes between agents; each shows its certificate, signed by the cluster's authority. All or none."""
    insecure_plaintext: bool = False
    """Let secrets go to NATS on another machine without TLS."""
    socket_path: Path | None = None
    """Socket for ranks and launchers; by default in the state folder, or elsewhere when that path is too long."""
    labels: Mapping[str, str] = field(default_factory=dict)
    metrics_listen: str | None = None
    """HOST:PORT of the metrics; by default none are served."""
    heartbeat_interval: timedelta = timedelta(seconds=1)
    kill_timeout: timedelta = timedelta(seconds=5)
    """How long a fence waits for killed ranks to be gone."""
    close_grace: timedelta = timedelta(seconds=5)
    """How long launcher and ranks may take to end by themselves once their job is closed."""
    launcher_hello_timeout: timedelta = timedelta(seconds=60)
    """How long a launcher may take to connect before it is ended and another one started."""
    max_launcher_starts: int = 3
    """How often a launcher is started within one generation."""

    def __post_init__(self) -> None:
        if self.max_launcher_starts < 1:
            raise ConfigurationError(f"max_launcher_starts is {self.max_launcher_starts}; give at least 1")
        if not is_loopback(self.host) and not self.nats_access.has_secret:
            raise ConfigurationError(
                f"--host {self.host} lets other machines reach this agent, which has no credentials; "
                "give --nats-credentials-file"
            )
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, timedelta) and value <= timedelta():
                raise ConfigurationError(f"{setting.name} is {value.total_seconds():g} s; give a time above zero")

    @property
    def nats_access(self) -> NatsAccess:
        """How the agent gets into NATS; raises ConfigurationError for what would not be safe."""
        return NatsAccess(
            url=self.nats_url,
            credentials_file=self.nats_credentials_file,
            token_file=self.nats_token_file,
            ca_file=self.nats_ca_file,
            insecure_plaintext=self.insecure_plaintext,
        )

    def registration_token(self) -> str:
        """Read the token to register with; empty if there is none. Raises ConfigurationError if others can read it."""
        file = self.registration_token_file
        return "" if file is None else read_secret(file, "--registration-token-file")

    def peer_tls(self) -> PeerTls | None:
        """Read the certificates; None if what goes between agents is not encrypted.

        Raises:
            ConfigurationError: a file is missing or cannot be used.
        """
        files = (self.tls_certificate_file, self.tls_key_file, self.tls_ca_file)
        match files:
            case (None, None, None):
                return None
            case (Path() as certificate_file, Path() as key_file, Path() as ca_file):
                return PeerTls.load(certificate_file, key_file, ca_file)
            case _:
                raise ConfigurationError(
                    "give --tls-certificate-file, --tls-key-file and --tls-ca-file together, or none of them"
                )

    @property
    def effective_log_dir(self) -> Path:
        """`log_dir` or its default."""
        return self.log_dir or self.state_dir / "logs"

    @classmethod
    def load(cls, environ: Mapping[str, str], options: Mapping[str, Any]) -> AgentSettings:
        """Merge command line `options` (None: not given) and the environment.

        Raises:
            ConfigurationError: a value cannot be read, or a required one is missing.
        """
        values: dict[str, Any] = {}
        for setting in dataclasses.fields(cls):
            variable = ENVIRONMENT_PREFIX + setting.name.upper()
            given = options.get(setting.name)
            if given is None and variable in environ:
                given = _parse(setting, environ[variable], variable)
            if given is not None:
                values[setting.name] = given
            elif setting.default is dataclasses.MISSING and setting.default_factory is dataclasses.MISSING:
                option = setting.name.removesuffix("_url").replace("_", "-")
                raise ConfigurationError(f"the agent needs --{option} (or {variable} in its environment)")
        return cls(**values)


def parse_labels(texts: list[str]) -> dict[str, str]:
    """Read `key=value` texts; raises ConfigurationError for another form."""
    labels = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigurationError(f"the label {text!r} is not of the form key=value")
        labels[key] = value
    return labels


def parse_seconds(text: str, name: str) -> timedelta:
    """Read a number of seconds; raises ConfigurationError naming `name`."""
    try:
        seconds = float(text)
        if not math.isfinite(seconds):
            raise ValueError(text)
        return timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{name} is {text!r}; give a number of seconds") from None


def _parse(setting: dataclasses.Field[Any], text: str, variable: str) -> Any:
    kind = str(setting.type)
    if "timedelta" in kind:
        return parse_seconds(text, variable)
    if "Path" in kind:
        return Path(text)
    if "Mapping" in kind:
        return parse_labels([part for part in text.split(",") if part])
    if kind == "bool":
        if text not in ("0", "1"):
            raise ConfigurationError(f"{variable} is {text!r}; give 1 or 0")
        return text == "1"
    if kind.startswith("int"):
        try:
            return int(text)
        except ValueError:
            raise ConfigurationError(f"{variable} is {text!r}; give a whole number") from None
    return text
