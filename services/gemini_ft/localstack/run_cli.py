"""`gemini-ft run`: one job, on a cluster of its own or on a running one."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import JobOutcome, JobSpec

__all__ = ["run"]

_EXIT_OF_OUTCOME = {JobOutcome.SUCCEEDED: 0, JobOutcome.FAILED: 1, JobOutcome.STOPPED: 1}
_EXIT_INTERRUPTED = 130


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="Training script and its arguments.")
    ],
    standalone: Annotated[bool, typer.Option("--standalone", help="Bring a cluster of one's own.")] = False,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 1,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Copies of each shard, the local one counts; default: 2 if there are nodes."),
    ] = None,
    standbys: Annotated[int, typer.Option(min=0, help="Nodes kept ready to replace lost ones.")] = 0,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")] = False,
    name: Annotated[str, typer.Option(help="What people call the job; default: the script's name.")] = "",
    api: Annotated[str, typer.Option(help="URL of a running coordinator.", envvar="GEMINI_FT_API")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the API's token.", envvar="GEMINI_FT_API_TOKEN_FILE")
    ] = None,
) -> None:
    """Train under Gemini-FT until the script has ended on all ranks; the exit code says how the job ended."""
    from gemini_ft.localstack.client import ApiClient
    from gemini_ft.localstack.follow import JobFollower
    from gemini_ft.localstack.logs import LogLine
    from gemini_ft.localstack.stack import LocalStack

    if standalone == bool(api):
        raise ConfigurationError("say where to run: either --standalone, or --api URL of a running coordinator")
    spec = JobSpec(
        name=name or Path(command[0]).name,
        command=("-m", *command) if module else tuple(command),
        working_directory=os.getcwd(),
        environment=_environment(num_ranks_here=nodes * nproc_per_node if standalone else nproc_per_node),
        num_nodes=nodes,
        num_ranks_per_node=nproc_per_node,
        num_replicas=min(2, nodes) if replicas is None else replicas,
        num_standbys=standbys,
    )

    def show(line: LogLine) -> None:
        typer.echo(f"[rank {line.rank}] {line.text}")

    def tell(news: str) -> None:
        typer.echo(f"[gemini-ft] {news}", err=True)

    with ExitStack() as resources:
        if standalone:
            if not module and not Path(command[0]).is_file():
                raise ConfigurationError(f"there is no script {command[0]} in {os.getcwd()}")
            stack = resources.enter_context(LocalStack(num_nodes=nodes + standbys))
            client = resources.enter_context(stack.client())
            log_dirs = [node.log_dir for node in stack.nodes.values()]
        else:
            client = resources.enter_context(ApiClient(api, _read_token(token_file)))
            log_dirs = []
        job = client.create_job(spec)
        follower = JobFollower(client, job.job_id, log_dirs, on_line=show, on_news=tell)
        try:
            outcome = follower.follow(stop_if_blocked=standalone)
        except KeyboardInterrupt:
            tell("interrupted; stopping the job")
            follower.stop()
            raise typer.Exit(_EXIT_INTERRUPTED) from None
    raise typer.Exit(_EXIT_OF_OUTCOME[outcome])


# Everything after the script is the script's, as with python and torchrun.
run.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]  # read by the CLI


def _environment(num_ranks_here: int) -> dict[str, str]:
    """What torchrun does as well: many ranks on one machine must not all take every core."""
    if num_ranks_here > 1 and "OMP_NUM_THREADS" not in os.environ:
        return {"OMP_NUM_THREADS": "1"}
    return {}


def _read_token(path: Path | None) -> str:
    if path is None:
        raise ConfigurationError("the API asks for a token; give --token-file")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(
            f"the token file {path} cannot be read: {error.strerror}; check --token-file"
        ) from error
