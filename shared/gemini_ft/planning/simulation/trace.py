"""Recorded failures, read from CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.simulation.scenario import FailureKind, TraceFailure, TraceFailures

__all__ = ["read_trace"]

_HEADER = ["time_s", "failure", "machines"]


def read_trace(path: Path, num_machines: int) -> TraceFailures:
    """Return the failures in a CSV file with the columns `time_s,failure,machines`.

    `time_s` counts from the start of the run and does not decrease, `failure` is `software` or `hardware`, and
    `machines` one number or several, separated by `;`. Empty lines are skipped.

    Raises:
        ConfigurationError: the file cannot be read, is empty, or a line is wrong; the sentence names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the failure trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"the failure trace {path} is not a text file in UTF-8") from None
    failures = tuple(_failures(path, text, num_machines))
    if not failures:
        raise ConfigurationError(f"the failure trace {path} has no failures; give at least one line below its header")
    return TraceFailures(failures=failures)


def _failures(path: Path, text: str, num_machines: int) -> Iterator[TraceFailure]:
    rows = csv.reader(io.StringIO(text), strict=True)
    before_s, has_header = 0.0, False
    try:
        for row in rows:
            if not row:
                continue
            if not has_header:
                if [name.strip() for name in row] != _HEADER:
                    raise ValueError(f"the header is {','.join(row)!r}; it must be {','.join(_HEADER)!r}")
                has_header = True
                continue
            failure = _failure(row, num_machines)
            if failure.time_s < before_s:
                raise ValueError(f"time_s is {failure.time_s:g}, before {before_s:g} in the line above; sort by time_s")
            before_s = failure.time_s
            yield failure
    except (csv.Error, ValueError) as error:
        raise ConfigurationError(
            f"line {rows.line_num} of the failure trace {path}: {error}", line=rows.line_num
        ) from None


def _failure(row: list[str], num_machines: int) -> TraceFailure:
    if len(row) != len(_HEADER):
        raise ValueError(f"{len(row)} columns instead of {len(_HEADER)} ({','.join(_HEADER)})")
    time, failure, machines = (field.strip() for field in row)
    return TraceFailure(time_s=_time_s(time), failure=_kind(failure), machines=_machines(machines, num_machines))


def _time_s(field: str) -> float:
    try:
        time_s = float(field)
    except ValueError:
        time_s = math.nan
    if not 0 <= time_s < math.inf:
        raise ValueError(f"time_s is {field!r}; give the seconds since the start of the run, at least 0")
    return time_s


def _kind(field: str) -> FailureKind:
    if field == "software":
        return "software"
    if field == "hardware":
        return "hardware"
    raise ValueError(f"failure is {field!r}; give software or hardware")


def _machines(field: str, num_machines: int) -> tuple[int, ...]:
    numbers = []
    for part in field.split(";"):
        if not part.strip().isdecimal() or int(part) >= num_machines:
            raise ValueError(
                f"machines is {field!r}; give numbers from 0 to {num_machines - 1}, separated by semicolons"
            )
        numbers.append(int(part))
    return tuple(dict.fromkeys(numbers))
