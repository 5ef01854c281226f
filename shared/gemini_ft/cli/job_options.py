"""The options that describe a job, for `run` and `jobs submit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import JobSpec

__all__ = ["Command", "IsModule", "Name", "Nodes", "RanksPerNode", "Replicas", "Standbys", "make_spec", "parse_pairs"]

Command = Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="Training script and its arguments.")]
RanksPerNode = Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks on each node.")]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes of the job.")]
Replicas = Annotated[
    int | None,
    typer.Option(min=1, help="Copies of each shard, the local one counts; default: 2 if there are nodes."),
]
Standbys = Annotated[int, typer.Option(min=0, help="Nodes kept ready to replace lost ones.")]
IsModule = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")]
Name = Annotated[str, typer.Option(help="What people call the job; default: the script's name.")]


def make_spec(
    command: Sequence[str],
    *,
    module: bool,
    name: str,
    working_directory: str,
    nodes: int,
    nproc_per_node: int,
    replicas: int | None,
    standbys: int,
    **more: Any,
) -> JobSpec:
    """Return the job that the options describe; `more` are other fields of it. Raises ConfigurationError."""
    try:
        return JobSpec(
            name=name or Path(command[0]).name,
            command=("-m", *command) if module else tuple(command),
            working_directory=working_directory,
            num_nodes=nodes,
            num_ranks_per_node=nproc_per_node,
            num_replicas=min(2, nodes) if replicas is None else replicas,
            num_standbys=standbys,
            **more,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{field} of the job is {first['input']!r}: {first['msg']}") from None


def parse_pairs(given: Sequence[str], option: str) -> Mapping[str, str]:
    """Return NAME=VALUE options as a mapping; raises ConfigurationError."""
    for pair in given:
        if not pair.partition("=")[0] or "=" not in pair:
            raise ConfigurationError(f"{option} is {pair!r}; give NAME=VALUE")
    return {name: value for name, _, value in (pair.partition("=") for pair in given)}
