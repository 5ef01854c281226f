"""docker-compose.yml as Docker Compose reads it, and the Dockerfiles of its images."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["ROOT", "Dockerfile", "compose_config", "run_compose"]

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 30


def run_compose(*arguments: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Docker Compose on the repository's file, with no variables but these; it needs no engine for `config`."""
    if sys.platform == "linux" and platform.machine() != "x86_64":
        pytest.skip("there is no wheel of Docker Compose for this platform")
    program = Path(sysconfig.get_path("scripts")) / "docker-compose"
    return subprocess.run(
        [program, "--env-file", os.devnull, "--file", ROOT / "docker-compose.yml", *arguments],
        env={"PATH": os.defpath, "HOME": os.devnull, **variables},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )


def compose_config(**variables: str) -> dict[str, Any]:
    """Return what Docker Compose would run with all profiles."""
    given = {"GEMINI_FT_USER": "1000:1000", **variables}
    done = run_compose("--profile", "*", "config", "--format", "json", variables=given)
    assert done.returncode == 0, done.stderr
    config: dict[str, Any] = json.loads(done.stdout)
    return config


@dataclass(frozen=True)
class Dockerfile:
    """The instructions of a Dockerfile, in order."""

    instructions: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        joined = re.sub(r"\\\n\s*", "", path.read_text())
        lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
        pairs = (line.split(maxsplit=1) for line in lines)
        return cls(tuple((name.upper(), rest) for name, rest in pairs))

    def all(self, name: str) -> list[str]:
        """What stands behind every instruction of this name."""
        return [rest for found, rest in self.instructions if found == name]

    @property
    def last_stage(self) -> Dockerfile:
        """What makes the image itself."""
        start = max(index for index, (name, _) in enumerate(self.instructions) if name == "FROM")
        return Dockerfile(self.instructions[start:])

    @property
    def environment(self) -> dict[str, str]:
        """What the image's ENV instructions set."""
        return dict(pair.split("=", 1) for rest in self.last_stage.all("ENV") for pair in rest.split())

    @property
    def copied(self) -> dict[str, str]:
        """Path in the repository -> path where a COPY instruction puts it, in any stage."""
        copies = [rest.split() for rest in self.all("COPY") if not rest.startswith("--from=")]
        return {source: words[-1] for words in copies for source in words[:-1]}
