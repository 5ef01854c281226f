"""`gemini-ft tokens`."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from gemini_ft.cli.config import ContextName, connect
from gemini_ft.cli.output import AsJson, Limit, show, tell
from gemini_ft.contracts.api import Role
from gemini_ft.contracts.errors import ConfigurationError, UnavailableError
from gemini_ft.security.secret_files import write_secret

__all__ = ["app"]

app = typer.Typer(help="Make tokens for others, list and revoke them.", no_args_is_help=True)

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@app.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Whose it is, or what for.")],
    role: Annotated[Role, typer.Option(help="To look, to do everything, or to register nodes.")],
    job: Annotated[list[str] | None, typer.Option(help="Only for this job, or for these.", show_default=False)] = None,
    lifetime: Annotated[
        str, typer.Option(help="A number with s, m, h or d; default: until it is revoked.", show_default=False)
    ] = "",
    file: Annotated[
        Path | None, typer.Option(help="Write the secret here, for its owner only.", show_default=False)
    ] = None,
    context: ContextName = "",
    as_json: AsJson = False,
) -> None:
    """Make a token and print its secret, which cannot be shown again.

    \b
    Examples:
      gemini-ft tokens create grafana --role viewer --lifetime 90d
      gemini-ft tokens create ci --role operator --job job-0123456789 --file ci.token
    """
    with connect(context) as client:
        made = client.create_token(name, role, job_ids=job or None, lifetime=_lifetime(lifetime))
    if made.token is None:
        raise UnavailableError(
            f"the answer with the secret of {made.token_id} was lost on its way; "
            f"run `gemini-ft tokens revoke {made.token_id}`, and make one of another name"
        )
    if file is not None:
        write_secret(file, made.token + "\n")
        made = made.model_copy(update={"token": None})
    if as_json:
        typer.echo(made.model_dump_json(indent=2))
        return
    tell(f"{made.token_id} is the token {made.name!r} with role {made.role}")
    if made.token is not None:
        typer.echo(made.token)


@app.command("list")
def list_tokens(limit: Limit = 1000, context: ContextName = "", as_json: AsJson = False) -> None:
    """List all tokens that were made, oldest first.

    \b
    Example:
      gemini-ft tokens list
    """
    from gemini_ft.cli.render.tokens import tokens_table

    with connect(context) as client:
        show(lambda: list(islice(client.tokens(), limit)), tokens_table, as_json=as_json, watch=False)


@app.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of the token, as `tokens list` shows it.")],
    context: ContextName = "",
) -> None:
    """Make a token useless from now on; it stays in the list.

    \b
    Example:
      gemini-ft tokens revoke tok-0123456789ab
    """
    with connect(context) as client:
        client.revoke_token(token_id)
    tell(f"{token_id} was revoked")


def _lifetime(text: str) -> timedelta | None:
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if found is None:
        raise ConfigurationError(f"--lifetime is {text!r}; give a number with s, m, h or d, for instance 90d")
    return timedelta(seconds=int(found[1]) * _SECONDS[found[2]])
