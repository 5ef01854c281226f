"""`gemini-ft up`: a cluster on this machine until Ctrl-C."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gemini_ft.cli.config import Access, logged_in

__all__ = ["up"]

_LOOK_S = 0.5
_CONTEXT = "local"


def up(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes for the job's slots.")] = 4,
    standbys: Annotated[int, typer.Option(min=0, help="Further nodes, to replace lost ones.")] = 1,
    directory: Annotated[
        Path | None, typer.Option("--directory", "-d", help="Keep data and logs here; default: a temporary folder.")
    ] = None,
    dashboard: Annotated[
        bool | None,
        typer.Option("--dashboard/--no-dashboard", help="Serve the web dashboard; default: if it is installed."),
    ] = None,
    login: Annotated[
        bool, typer.Option("--login/--no-login", help=f"Be logged in, as {_CONTEXT!r}, while it runs.")
    ] = True,
) -> None:
    """Run Postgres, NATS, coordinator, failure detector, agents and dashboard on this machine until Ctrl-C."""
    from gemini_ft.localstack.stack import LocalStack, dashboard_is_installed

    if dashboard is None:
        dashboard = dashboard_is_installed()
    typer.echo(f"starting the control plane and {nodes + standbys} nodes")
    try:
        with ExitStack() as resources:
            stack = resources.enter_context(LocalStack(directory, num_nodes=nodes + standbys, dashboard=dashboard))
            if login:
                access = Access(url=stack.url, token=stack.api_token_file.read_text().strip())
                resources.enter_context(logged_in(_CONTEXT, access))
            typer.echo(f"API          {stack.url}/v1")
            if dashboard:
                typer.echo(f"dashboard    {stack.dashboard_url}")
            typer.echo(f"token file   {stack.api_token_file}")
            typer.echo(f"logs         {stack.directory}")
            typer.echo("run a job:")
            if not login:
                typer.echo(f"  gemini-ft login {stack.url} --token-file {stack.api_token_file}")
            typer.echo(f"  gemini-ft jobs submit --nodes {nodes} --standbys {standbys} train.py")
            typer.echo("Ctrl-C ends everything")
            known: set[str] = set()
            while True:
                ended = stack.ended()
                for name in sorted(ended - known):
                    typer.echo(f"{name} has ended; its log is in {stack.directory}", err=True)
                known = ended
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        typer.echo("everything has been ended and removed")
