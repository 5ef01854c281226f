"""`gemini-ft recoveries`."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from gemini_ft.cli.config import ContextName, connect
from gemini_ft.cli.output import AsJson, Limit, Watch, show

__all__ = ["app"]

app = typer.Typer(help="Look at the recoveries of a job: causes, phases, sources.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]


@app.command("list")
def list_recoveries(
    job_id: JobId, limit: Limit = 50, watch: Watch = False, context: ContextName = "", as_json: AsJson = False
) -> None:
    """List recoveries, the newest first.

    \b
    Example:
      gemini-ft recoveries list job-0123456789
    """
    from gemini_ft.cli.render.recoveries import recoveries_table

    with connect(context, watch=watch) as client:
        show(lambda: list(islice(client.recoveries(job_id), limit)), recoveries_table, as_json=as_json, watch=watch)


@app.command("get")
def get_recovery(
    job_id: JobId,
    generation: Annotated[int, typer.Argument(min=1, help="Generation that the recovery made.")],
    watch: Watch = False,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Show one recovery: its phases as a waterfall, and where every shard came from.

    \b
    Example:
      gemini-ft recoveries get job-0123456789 2
    """
    from gemini_ft.cli.render.recoveries import recovery_details

    with connect(context, watch=watch) as client:
        show(lambda: client.recovery(job_id, generation), recovery_details, as_json=as_json, watch=watch)
