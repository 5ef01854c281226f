"""`gemini-ft run`: one job, on a cluster of its own or on a running one."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from gemini_ft.cli.config import Access, ContextName, access_to, context_in_force
from gemini_ft.cli.exit_codes import ExitCode
from gemini_ft.cli.job_options import Command, IsModule, Name, Nodes, RanksPerNode, Replicas, Standbys, make_spec
from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.contracts.messages import JobOutcome
from gemini_ft.security.secret_files import read_secret

__all__ = ["run"]


def run(
    command: Command,
    standalone: Annotated[bool, typer.Option("--standalone", help="Bring a cluster of one's own.")] = False,
    nproc_per_node: RanksPerNode = 1,
    nodes: Nodes = 1,
    replicas: Replicas = None,
    standbys: Standbys = 0,
    module: IsModule = False,
    name: Name = "",
    api: Annotated[str, typer.Option(help="URL of a running coordinator.", envvar="GEMINI_FT_API")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the API's token.", envvar="GEMINI_FT_API_TOKEN_FILE")
    ] = None,
    context: ContextName = "",
) -> None:
    """Train under Gemini-FT until the script has ended on all ranks; the exit code says how the job ended.

    \b
    Examples:
      gemini-ft run --standalone --nproc-per-node 2 train.py --epochs 3
      gemini-ft run --api http://127.0.0.1:8080 --token-file api-token --nodes 4 train.py
      gemini-ft run --context prod --nodes 4 --standbys 1 -m my.training
    """
    from gemini_ft.client.api_client import ApiClient
    from gemini_ft.localstack.api_logs import ApiLogFollower
    from gemini_ft.localstack.follow import JobFollower, Logs
    from gemini_ft.localstack.logs import LogLine, RankLogFollower
    from gemini_ft.localstack.stack import LocalStack

    if standalone and (api or context):
        raise ConfigurationError("--standalone brings a cluster of its own; leave --api and --context out")
    access = None if standalone else _access(api, token_file, context)
    spec = make_spec(
        command,
        module=module,
        name=name,
        working_directory=os.getcwd(),
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        replicas=replicas,
        standbys=standbys,
        environment=_environment(num_ranks_here=nodes * nproc_per_node if standalone else nproc_per_node),
    )

    def show(line: LogLine) -> None:
        typer.echo(f"[rank {line.rank}] {line.text}")

    def tell(news: str) -> None:
        typer.echo(f"[gemini-ft] {news}", err=True)

    with ExitStack() as resources:
        if access is None:
            if not module and not Path(command[0]).is_file():
                raise ConfigurationError(f"there is no script {command[0]} in {os.getcwd()}")
            stack = resources.enter_context(LocalStack(num_nodes=nodes + standbys))
            client = resources.enter_context(stack.client())
            job = client.create_job(spec)
            folders = [node.log_dir for node in stack.nodes.values()]
            logs: Logs = RankLogFollower(folders, job_id=job.job_id)
        else:
            client = resources.enter_context(ApiClient(access.url, access.token))
            job = client.create_job(spec)
            logs = ApiLogFollower(client, job)
        follower = JobFollower(client, job.job_id, logs, on_line=show, on_news=tell)
        try:
            outcome = follower.follow(stop_if_blocked=standalone)
        except KeyboardInterrupt:
            tell("interrupted; stopping the job")
            follower.stop()
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    raise typer.Exit(ExitCode.DONE if outcome is JobOutcome.SUCCEEDED else ExitCode.FAILED)


# Everything after the script is the script's, as with python and torchrun.
run.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]  # read by the CLI


def _environment(num_ranks_here: int) -> dict[str, str]:
    """What torchrun does as well: many ranks on one machine must not all take every core."""
    if num_ranks_here > 1 and "OMP_NUM_THREADS" not in os.environ:
        return {"OMP_NUM_THREADS": "1"}
    return {}


def _access(api: str, token_file: Path | None, context: str) -> Access:
    if context or (not api and context_in_force()):
        return access_to(context)
    if not api:
        raise ConfigurationError(
            "nobody has said where to run; give --standalone, or --api URL of a running coordinator, or log in to one"
        )
    if token_file is None:
        raise ConfigurationError("the API asks for a token; give --token-file")
    return Access(url=api, token=read_secret(token_file, "--token-file"))
