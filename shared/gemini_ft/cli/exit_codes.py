"""What the exit codes of `gemini-ft` mean (docs/cli.md)."""

from __future__ import annotations

import enum

from gemini_ft.contracts.errors import (
    AuthenticationError,
    ConflictError,
    ForbiddenError,
    GeminiError,
    NotFoundError,
    PreconditionFailedError,
    TooManyStreamsError,
    UnavailableError,
    WaitTimeoutError,
)

__all__ = ["MEANINGS", "ExitCode", "exit_code_of"]


class ExitCode(enum.IntEnum):
    """Exit codes; scripts may rely on them."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    DENIED = 3
    NOT_FOUND = 4
    CONFLICT = 5
    UNAVAILABLE = 6
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "what was asked for is done; for `run` and `jobs watch`: the job has succeeded",
    ExitCode.FAILED: "it was carried out, and the outcome is bad: the job has failed or was stopped, a check failed",
    ExitCode.REFUSED: "the command line, a setting or a request is wrong; the sentence says what to change",
    ExitCode.DENIED: "the API token is absent, wrong, expired or revoked, or not good for this",
    ExitCode.NOT_FOUND: "there is no such job, node, version, recovery, log, token or context",
    ExitCode.CONFLICT: "the job or node is not in a state that allows it, or a name is taken",
    ExitCode.UNAVAILABLE: "the API or what it needs cannot be reached, or a wait ran out; the same may work later",
    ExitCode.INTERRUPTED: "Ctrl-C, also where that is the usual end (`--watch`, `--follow`)",
}

_OF_ERROR: dict[type[GeminiError], ExitCode] = {
    AuthenticationError: ExitCode.DENIED,
    ForbiddenError: ExitCode.DENIED,
    NotFoundError: ExitCode.NOT_FOUND,
    ConflictError: ExitCode.CONFLICT,
    PreconditionFailedError: ExitCode.CONFLICT,
    UnavailableError: ExitCode.UNAVAILABLE,
    TooManyStreamsError: ExitCode.UNAVAILABLE,
    WaitTimeoutError: ExitCode.UNAVAILABLE,
}


def exit_code_of(error: GeminiError) -> ExitCode:
    """Return the exit code of a command that ended with `error`."""
    return next((code for kind, code in _OF_ERROR.items() if isinstance(error, kind)), ExitCode.REFUSED)
