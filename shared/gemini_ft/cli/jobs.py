"""`gemini-ft jobs`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from gemini_ft.cli.config import ContextName, connect
from gemini_ft.cli.exit_codes import ExitCode
from gemini_ft.cli.job_options import (
    Command,
    IsModule,
    Name,
    Nodes,
    RanksPerNode,
    Replicas,
    Standbys,
    make_spec,
    parse_pairs,
)
from gemini_ft.cli.output import (
    AsJson,
    Limit,
    Watch,
    ended_by_interrupt,
    print_json_line,
    show,
    tell,
    watched,
)
from gemini_ft.cli.versions import list_versions
from gemini_ft.contracts.api import Decision, JobModel, JobPhase
from gemini_ft.contracts.errors import WaitTimeoutError
from gemini_ft.contracts.messages import MAX_LOG_BYTES, JobOutcome, LauncherKind

if TYPE_CHECKING:
    from gemini_ft.client.api_client import ApiClient
    from gemini_ft.contracts.api import LogModel

__all__ = ["app"]

app = typer.Typer(help="Submit jobs, look at them, stop and resume them.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    command: Command,
    nodes: Nodes = 1,
    nproc_per_node: RanksPerNode = 1,
    replicas: Replicas = None,
    standbys: Standbys = 0,
    module: IsModule = False,
    name: Name = "",
    working_directory: Annotated[
        str, typer.Option(help="Folder to run in on each node; default: this one.", show_default=False)
    ] = "",
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Environment of the ranks.")] = None,
    checkpoint_interval_steps: Annotated[int, typer.Option(min=1, help="Every how many steps a version is kept.")] = 1,
    spread: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Failure domains, the widest first; default: zone, then rack."),
    ] = None,
    node_selector: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Label that all nodes of the job must have.")
    ] = None,
    hang_timeout_s: Annotated[float, typer.Option(help="A rank that makes no step for so long hangs.")] = 300.0,
    external: Annotated[bool, typer.Option("--external", help="You start torchrun on the nodes yourself.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Submitting again with the same key gives the same job.", show_default=False)
    ] = None,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Submit a job; it begins as soon as enough nodes are free. Prints its id.

    \b
    Examples:
      gemini-ft jobs submit --nodes 4 --standbys 1 train.py --epochs 3
      gemini-ft jobs submit --nodes 2 --nproc-per-node 8 -m my.training --config big.yaml
      gemini-ft jobs submit --nodes 4 --node-selector pool=h200 --env NCCL_DEBUG=WARN train.py
    """
    spec = make_spec(
        command,
        module=module,
        name=name,
        working_directory=working_directory or os.getcwd(),
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        replicas=replicas,
        standbys=standbys,
        environment=parse_pairs(env or [], "--env"),
        checkpoint_interval_steps=checkpoint_interval_steps,
        node_selector=parse_pairs(node_selector or [], "--node-selector"),
        hang_timeout_s=hang_timeout_s,
        launcher=LauncherKind.EXTERNAL if external else LauncherKind.MANAGED,
        **({"spread": tuple(spread)} if spread else {}),
    )
    with connect(context) as client:
        job = client.create_job(spec, idempotency_key=idempotency_key)
    if as_json:
        typer.echo(job.model_dump_json(indent=2))
    else:
        typer.echo(job.job_id)


@app.command("list")
def list_jobs(
    phase: Annotated[list[JobPhase] | None, typer.Option(help="Only jobs in this phase, or in one of these.")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.", show_default=False)] = None,
    limit: Limit = 50,
    watch: Watch = False,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first.

    \b
    Examples:
      gemini-ft jobs list --phase running --phase blocked
      gemini-ft jobs list --json | jq -r '.[].job_id'
    """
    from gemini_ft.cli.render.jobs import jobs_table

    with connect(context, watch=watch) as client:
        show(
            lambda: list(islice(client.jobs(phases=phase or (), name=name), limit)),
            jobs_table,
            as_json=as_json,
            watch=watch,
        )


@app.command("get")
def get_job(job_id: JobId, watch: Watch = False, context: ContextName = "", as_json: AsJson = False) -> None:
    """Show one job.

    \b
    Example:
      gemini-ft jobs get job-0123456789 --watch
    """
    from gemini_ft.cli.render.jobs import job_details

    with connect(context, watch=watch) as client:
        show(lambda: client.job(job_id), job_details, as_json=as_json, watch=watch)


@app.command("stop")
def stop_job(
    job_id: JobId,
    now: Annotated[
        bool, typer.Option("--now", help="End it at once and free its memory; it cannot be resumed.")
    ] = False,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Let a job come to rest at a committed step, which stays in memory; `jobs resume` goes on from there.

    \b
    Examples:
      gemini-ft jobs stop job-0123456789
      gemini-ft jobs stop job-0123456789 --now
    """
    with connect(context) as client:
        _changed(client.stop_job(job_id, now=now), as_json=as_json)


@app.command("resume")
def resume_job(job_id: JobId, context: ContextName = "", as_json: AsJson = False) -> None:
    """Let a suspended job go on from its final step.

    \b
    Example:
      gemini-ft jobs resume job-0123456789
    """
    with connect(context) as client:
        _changed(client.resume_job(job_id), as_json=as_json)


@app.command("checkpoint")
def checkpoint_job(job_id: JobId, context: ContextName = "", as_json: AsJson = False) -> None:
    """Ask for a version of the next step, whatever the job's interval is.

    \b
    Example:
      gemini-ft jobs checkpoint job-0123456789
    """
    with connect(context) as client:
        _changed(client.checkpoint_job(job_id), as_json=as_json)


@app.command("decide")
def decide_job(
    job_id: JobId,
    decision: Annotated[Decision, typer.Argument(help="What becomes of the job.")],
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Decide what becomes of a blocked job, of which no complete version is left in memory.

    \b
    Examples:
      gemini-ft jobs decide job-0123456789 restart_from_zero
      gemini-ft jobs decide job-0123456789 stop
    """
    with connect(context) as client:
        _changed(client.decide_job(job_id, decision), as_json=as_json)


@app.command("delete")
def delete_job(
    job_id: JobId,
    force: Annotated[bool, typer.Option("--force", help="End it first if it has not ended.")] = False,
    context: ContextName = "",
) -> None:
    """Hide a job that is pending, suspended or has ended; what it holds in memory is freed.

    \b
    Example:
      gemini-ft jobs delete job-0123456789
    """
    with connect(context) as client:
        client.delete_job(job_id, force=force)
    tell(f"{job_id} was deleted")


@app.command("logs")
def job_logs(
    job_id: JobId,
    rank: Annotated[int, typer.Option(min=0, help="Whose output.")] = 0,
    generation: Annotated[
        int | None, typer.Option(min=1, help="Of this generation; default: the newest.", show_default=False)
    ] = None,
    tail: Annotated[int, typer.Option(min=0, help="Begin so many lines before the end.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Print what a rank has written.

    \b
    Examples:
      gemini-ft jobs logs job-0123456789 --rank 3 --tail 20
      gemini-ft jobs logs job-0123456789 -f
    """
    with connect(context) as client, ended_by_interrupt():
        parts: Iterator[LogModel]
        if follow:
            parts = client.follow_log(job_id, rank, generation=generation, tail_lines=tail)
        else:
            parts = _to_the_end(client, job_id, rank, generation, tail)
        for part in parts:
            if as_json:
                print_json_line(part)
            else:
                sys.stdout.write(part.text)
                sys.stdout.flush()


@app.command("placement")
def job_placement(job_id: JobId, watch: Watch = False, context: ContextName = "", as_json: AsJson = False) -> None:
    """Show who sits in which slot, and who holds whose shards.

    \b
    Example:
      gemini-ft jobs placement job-0123456789
    """
    from gemini_ft.cli.render.jobs import placement_table

    with connect(context, watch=watch) as client:
        show(lambda: client.placement(job_id), placement_table, as_json=as_json, watch=watch)


app.command("versions")(list_versions)


@app.command("ranks")
def job_ranks(job_id: JobId, watch: Watch = False, context: ContextName = "", as_json: AsJson = False) -> None:
    """Show the ranks as their agents saw them last.

    \b
    Example:
      gemini-ft jobs ranks job-0123456789 --watch
    """
    from gemini_ft.cli.render.jobs import ranks_table

    with connect(context, watch=watch) as client:
        show(lambda: list(client.ranks(job_id)), ranks_table, as_json=as_json, watch=watch)


@app.command("watch")
def watch_job(
    job_id: JobId,
    until: Annotated[
        JobPhase | None, typer.Option(help="End in this phase too, with exit code 0.", show_default=False)
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0, help="Give up after so long, with exit code 6.", show_default=False)
    ] = None,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Show a job until it has ended; the exit code says how.

    \b
    Examples:
      gemini-ft jobs watch job-0123456789
      gemini-ft jobs watch job-0123456789 --until suspended --timeout-s 60
    """
    from gemini_ft.cli.render.jobs import job_details

    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def is_over(job: JobModel) -> bool:
        if job.phase is until or job.outcome is not None:
            return True
        if deadline is not None and timeout_s is not None and time.monotonic() >= deadline:
            raise WaitTimeoutError.of(f"{job_id} to be {until or 'at its end'}, it is {job.phase}", timeout_s)
        return False

    with connect(context, watch=True) as client:
        job = watched(lambda: client.job(job_id), job_details, as_json=as_json, until=is_over)
    if job.phase is not until and job.outcome is not JobOutcome.SUCCEEDED:
        raise typer.Exit(ExitCode.FAILED)


def _to_the_end(
    client: ApiClient, job_id: str, rank: int, generation: int | None, tail_lines: int
) -> Iterator[LogModel]:
    part = client.log(job_id, rank, generation=generation, tail_lines=tail_lines, max_bytes=MAX_LOG_BYTES)
    yield part
    while not part.is_end:
        part = client.log(job_id, rank, generation=part.generation, offset=part.next_offset, max_bytes=MAX_LOG_BYTES)
        yield part


def _changed(job: JobModel, *, as_json: bool) -> None:
    from gemini_ft.cli.render.jobs import job_details

    show(lambda: job, job_details, as_json=as_json, watch=False)
