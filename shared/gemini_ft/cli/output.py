"""How answers are printed: tables for people, the API's own JSON for scripts, once or again and again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import BaseModel

from gemini_ft.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = [
    "AsJson",
    "Limit",
    "Watch",
    "console",
    "ended_by_interrupt",
    "print_json_line",
    "show",
    "tell",
    "watched",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the API's own JSON.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again every 2 s, until Ctrl-C.")]
Limit = Annotated[int, typer.Option(min=1, help="Show at most so many.")]

_WATCH_S = 2.0
_WIDTH_OF_PIPES = 500

Shown = TypeVar("Shown", bound="BaseModel | Sequence[BaseModel]")


def show(load: Callable[[], Shown], render: Callable[[Shown], RenderableType], *, as_json: bool, watch: bool) -> None:
    """Print what `load` returns, with `watch` again and again until Ctrl-C."""
    if watch:
        watched(load, render, as_json=as_json)
    elif as_json:
        typer.echo(json.dumps(_plain(load()), indent=2))
    else:
        console().print(render(load()))


def watched(
    load: Callable[[], Shown],
    render: Callable[[Shown], RenderableType],
    *,
    as_json: bool,
    until: Callable[[Shown], bool] = lambda _: False,
) -> Shown:
    """Show what `load` returns again and again, until Ctrl-C or until `until`; return what was shown last.

    Where nobody looks, only what differs from what was printed last is printed.
    """
    from rich.live import Live

    out = console()
    live = Live(console=out, auto_refresh=False) if out.is_terminal and not as_json else None
    with ended_by_interrupt():
        try:
            if live is not None:
                live.start()
            printed: Shown | None = None
            while True:
                loaded = load()
                if live is not None:
                    live.update(render(loaded), refresh=True)
                elif loaded != printed:
                    printed = loaded
                    if as_json:
                        print_json_line(loaded)
                    else:
                        out.print(render(loaded))
                if until(loaded):
                    return loaded
                time.sleep(_WATCH_S)
        finally:
            if live is not None:
                live.stop()


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends what runs in this context, and the command, without a word."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def print_json_line(shown: BaseModel | Sequence[BaseModel]) -> None:
    """Print one line of JSON, at once."""
    typer.echo(json.dumps(_plain(shown)))
    sys.stdout.flush()


def tell(sentence: str) -> None:
    """Say what was done, apart from what is printed for others to read."""
    typer.echo(sentence, err=True)


def console() -> Console:
    """Return a console that prints text as it is, and does not fold it when nobody looks."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_OF_PIPES
    return Console(markup=False, highlight=False, emoji=False, width=width)


def _plain(shown: BaseModel | Sequence[BaseModel]) -> object:
    return (
        shown.model_dump(mode="json")
        if isinstance(shown, BaseModel)
        else [one.model_dump(mode="json") for one in shown]
    )
