"""`gemini-ft doctor`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    shard_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of model states that one rank owns.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of each shard, the local one included.")] = 2,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Training processes on this machine.")] = 1,
    directory: Annotated[Path, typer.Option(help="Where the agent will keep its buffers.")] = Path("/dev/shm"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine before a job runs on it, and say what to change.

    Ends with status 1 if something must be changed before training.
    """
    from gemini_ft.agent._machine import read_machine_facts
    from gemini_ft.agent.capacity import replica_memory_bytes
    from gemini_ft.agent.doctor import Status, diagnose

    need_bytes = None
    if shard_bytes is not None:
        need_bytes = replica_memory_bytes(shard_bytes, replicas, ranks_per_node)
    findings = diagnose(read_machine_facts(directory), need_bytes)
    failed = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "findings": [asdict(each) for each in findings]}, indent=2))
    else:
        for finding in findings:
            typer.echo(f"{finding.status.upper():<5} {finding.check:<18} {finding.message}")
    raise typer.Exit(1 if failed else 0)
