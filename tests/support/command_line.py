"""Run `gemini-ft` in this process, as people would."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from gemini_ft.cli.main import main


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def gemini_ft(*arguments: object, stderr: io.StringIO | None = None) -> Finished:
    """Run the command to its end; the entry points are those of the installed distribution."""
    out, err = io.StringIO(), stderr or io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", ["gemini-ft", *map(str, arguments)]):
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code
    return Finished(0 if code is None else int(str(code)), out.getvalue(), err.getvalue())


def assert_refused(finished: Finished, *parts: str) -> None:
    """One sentence on stderr that holds all `parts`, nothing on stdout, exit code 2."""
    assert finished.code == 2, finished
    assert finished.stdout == ""
    assert finished.stderr.startswith("error: ")
    assert finished.stderr.count("\n") == 1, finished.stderr
    for part in parts:
        assert part in finished.stderr
