"""`gemini-ft versions`."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from gemini_ft.cli.config import ContextName, connect
from gemini_ft.cli.output import AsJson, Limit, Watch, show

__all__ = ["app", "list_versions"]

app = typer.Typer(help="Look at the versions of a job: which are committed, who holds what.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]


@app.command("list")
def list_versions(
    job_id: JobId, limit: Limit = 50, watch: Watch = False, context: ContextName = "", as_json: AsJson = False
) -> None:
    """List the committed versions that were recorded, the newest first.

    \b
    Example:
      gemini-ft versions list job-0123456789 --limit 5
    """
    from gemini_ft.cli.render.versions import versions_table

    with connect(context, watch=watch) as client:
        show(lambda: list(islice(client.versions(job_id), limit)), versions_table, as_json=as_json, watch=watch)


@app.command("get")
def get_version(
    job_id: JobId,
    step: Annotated[int, typer.Argument(min=0, help="Step of the version.")],
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Show who holds what of a version: ranks, holders, digests as far as they are known.

    \b
    Example:
      gemini-ft versions get job-0123456789 120
    """
    from gemini_ft.cli.render.versions import version_details

    with connect(context) as client:
        show(lambda: client.version(job_id, step), version_details, as_json=as_json, watch=False)
