"""Who this process is: read from what the launcher put into the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["RankIdentity"]

SOCKET_VARIABLE = "GEMINI_FT_AGENT_SOCKET"
JOB_VARIABLE = "GEMINI_FT_JOB"
GENERATION_VARIABLE = "GEMINI_FT_GENERATION"


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """One rank of one generation of a job, and the socket of its node's agent."""

    job_id: str
    generation: int
    rank: int
    world_size: int
    socket: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RankIdentity:
        """Read the variables that the launcher sets.

        Raises:
            ConfigurationError: the process was not started by a Gemini-FT launcher, or a variable is malformed.
        """
        if SOCKET_VARIABLE not in environment:
            raise ConfigurationError(
                f"{SOCKET_VARIABLE} is not set, so this process has no agent to keep its checkpoints; start the script "
                "with `gemini-ft run` or `torchrun --rdzv-backend=gemini`, or do not build a Checkpointer"
            )
        return cls(
            job_id=_text(environment, JOB_VARIABLE),
            generation=_number(environment, GENERATION_VARIABLE),
            rank=_number(environment, "RANK"),
            world_size=_number(environment, "WORLD_SIZE"),
            socket=Path(environment[SOCKET_VARIABLE]),
        )


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ConfigurationError(f"{name} is not set although {SOCKET_VARIABLE} is; the launcher sets both")
    return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not text.isdecimal():
        raise ConfigurationError(f"{name} is {text!r}; it must be a whole number, as the launcher sets it")
    return int(text)
