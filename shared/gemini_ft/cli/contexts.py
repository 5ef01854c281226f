"""`gemini-ft contexts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel

from gemini_ft.cli.config import contexts_path, load_contexts, save_contexts
from gemini_ft.cli.output import AsJson, show, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

__all__ = ["app"]

app = typer.Typer(help="Choose between the clusters that you have logged in to.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="CONTEXT", help="Name of the context.")]


class ContextModel(BaseModel):
    """A context, without its token."""

    name: str
    url: str
    is_current: bool


@app.command("list")
def list_contexts(as_json: AsJson = False) -> None:
    """List the clusters that you have logged in to; a star marks the one in use.

    \b
    Example:
      gemini-ft contexts list
    """
    known = load_contexts()
    shown = [
        ContextModel(name=name, url=access.url, is_current=name == known.current)
        for name, access in sorted(known.contexts.items())
    ]
    show(lambda: shown, _table, as_json=as_json, watch=False)


@app.command("use")
def use_context(name: Name) -> None:
    """Use a cluster from now on, where neither --context nor the environment names another.

    \b
    Example:
      gemini-ft contexts use prod
    """
    known = load_contexts()
    access = known.find(name)
    known.current = name
    save_contexts(known)
    tell(f"{name} is in use: {access.url}")


@app.command("remove")
def remove_context(name: Name) -> None:
    """Forget a cluster and its token. The token stays good: `tokens revoke` ends it.

    \b
    Example:
      gemini-ft contexts remove prod
    """
    known = load_contexts()
    known.find(name)
    del known.contexts[name]
    if known.current == name:
        known.current = ""
    save_contexts(known)
    tell(f"{name} was removed from {contexts_path()}")


def _table(contexts: Sequence[ContextModel]) -> Table:
    from gemini_ft.cli.render.cells import printable, table

    shown = table("", "context", "url")
    for context in contexts:
        shown.add_row("*" if context.is_current else "", printable(context.name), printable(context.url))
    return shown
