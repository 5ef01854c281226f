"""The command line is a promise: docs/cli.md lists all of it, and a change of it is a decision."""

import importlib.util
from pathlib import Path

from gemini_ft.cli.exit_codes import MEANINGS, ExitCode, exit_code_of
from gemini_ft.contracts import errors

SCRIPT = Path(__file__).parents[3] / "docs" / "cli_reference.py"


def test_the_command_line_is_frozen() -> None:
    found = importlib.util.spec_from_file_location("cli_reference", SCRIPT)
    assert found is not None
    assert found.loader is not None
    reference = importlib.util.module_from_spec(found)
    found.loader.exec_module(reference)
    assert reference.reference() == reference.PAGE.read_text(), (
        "the command line has changed; what disappears or changes its meaning breaks scripts. If that is meant, say so "
        "in CHANGELOG.md and write the page by:\n  python docs/cli_reference.py"
    )


def test_every_exit_code_has_a_meaning_and_every_error_a_code() -> None:
    assert set(MEANINGS) == set(ExitCode)
    kinds = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]
    codes = {kind.__name__: exit_code_of(kind("sentence")) for kind in kinds}
    assert {name: code for name, code in codes.items() if code is not ExitCode.REFUSED} == {
        "AuthenticationError": ExitCode.DENIED,
        "ConflictError": ExitCode.CONFLICT,
        "ForbiddenError": ExitCode.DENIED,
        "NotFoundError": ExitCode.NOT_FOUND,
        "PreconditionFailedError": ExitCode.CONFLICT,
        "TooManyStreamsError": ExitCode.UNAVAILABLE,
        "UnavailableError": ExitCode.UNAVAILABLE,
        "WaitTimeoutError": ExitCode.UNAVAILABLE,
    }
