"""Write cli.md from the command line itself. A test holds the two together: what it lists is what scripts rely on."""

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer

from gemini_ft.cli.exit_codes import MEANINGS
from gemini_ft.cli.main import build_app

PAGE = Path(__file__).with_name("cli.md")

_HEAD = """\
# Command line

<!-- Written by docs/cli_reference.py; change the commands, and run it. -->

`gemini-ft COMMAND --help` says the same. `--json` prints the API's own models; lists are arrays, and what is watched or
followed is one JSON value a line. Sentences for people go to stderr, and answers to stdout.

## Which cluster

`gemini-ft login URL` keeps URL and token of a cluster in `$XDG_CONFIG_HOME/gemini-ft/contexts.json` (by default below
`~/.config`), which only its owner may read: otherwise it is refused. In this order, the first that is given counts:

1. the option `--context`
2. `GEMINI_FT_API` (URL) with `GEMINI_FT_API_TOKEN_FILE`
3. `GEMINI_FT_CONTEXT`
4. the context of the last `gemini-ft login` or `gemini-ft contexts use`

For a certificate of an authority of your own, set `SSL_CERT_FILE`.

## Shell completion

`gemini-ft --install-completion` adds completion to bash, zsh, fish or PowerShell; `--show-completion` prints it.

## Exit codes

| code | meaning |
| --- | --- |
{exit_codes}

## Commands
"""


def reference() -> str:
    """Return the page."""
    codes = "\n".join(f"| {code.value} | {meaning} |" for code, meaning in MEANINGS.items())
    return _HEAD.format(exit_codes=codes) + "".join(_section("gemini-ft", typer.main.get_command(build_app([]))))


def _section(path: str, command: Any) -> Iterator[str]:
    yield f"\n### `{path}`\n\n{_description(command.help or '')}\n"
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
    if rows:
        yield "\n| parameter | value | default | |\n| --- | --- | --- | --- |\n" + "".join(f"{row}\n" for row in rows)
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from _section(f"{path} {name}", child)


def _description(text: str) -> str:
    words, _, examples = text.partition("\b")
    plain = "\n\n".join(" ".join(paragraph.split()) for paragraph in words.strip().split("\n\n"))
    commands = [line.strip() for line in examples.splitlines() if line.strip().startswith("gemini-ft")]
    return plain + ("\n\n```\n" + "\n".join(commands) + "\n```" if commands else "")


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    names = ", ".join(f"`{name}`" for name in sorted(parameter.opts, key=len, reverse=True))
    name = names if is_option else f"`{parameter.metavar or parameter.name.upper()}`"
    notes = [getattr(parameter, "help", None) or ""]
    if parameter.envvar:
        notes.append(f"Environment: `{parameter.envvar}`.")
    if parameter.multiple:
        notes.append("May be repeated.")
    return f"| {name} | {_value(parameter)} | {_default(parameter)} | {' '.join(notes).replace('|', chr(92) + '|')} |"


def _value(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    kind = get_args(kind)[0] if get_args(kind) else kind
    if getattr(parameter, "is_flag", False):
        return "flag"
    if issubclass(kind, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    limits = ((">=", parameter.min), ("<=", parameter.max))
    return ", ".join([kind.__name__, *(f"{sign} {limit}" for sign, limit in limits if limit is not None)])


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    return "" if default is None or default == "" or default is False or default == () else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(reference())
