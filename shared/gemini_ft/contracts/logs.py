"""What all processes log: lines for people, or one JSON object a line with the same keys everywhere.

A record says which job, node, rank and generation it is about by `extra={"job_id": ...}`; what is the same for all
records of a process, such as an agent's node, is told once by `configure_logging`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["LOG_FORMATS", "LOG_FORMAT_VARIABLE", "JsonFormatter", "add_log_format", "configure_logging"]

LOG_FORMATS: Final = ("text", "json")
LOG_FORMAT_VARIABLE: Final = "GEMINI_FT_LOG_FORMAT"
_LEVEL_VARIABLE: Final = "GEMINI_FT_LOG_LEVEL"
_FACTS: Final = ("job_id", "node_id", "rank", "generation")

Facts = Mapping[str, Any]


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ts, level, process, logger, message, what it is about, and the traceback if any."""

    def __init__(self, process: str, facts: Callable[[], Facts]) -> None:
        super().__init__()
        self._process = process
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        known = {**self._facts(), **record.__dict__}
        line |= {name: known[name] for name in _FACTS if known.get(name) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def add_log_format(parser: argparse.ArgumentParser) -> None:
    """Add the option `--log-format`, which is also read from GEMINI_FT_LOG_FORMAT."""
    parser.add_argument(
        "--log-format",
        type=_log_format,
        metavar="|".join(LOG_FORMATS),
        default=os.environ.get(LOG_FORMAT_VARIABLE, LOG_FORMATS[0]),
        help=f"lines for people, or one JSON object a line (default ${LOG_FORMAT_VARIABLE} or text)",
    )


def _log_format(text: str) -> str:
    # Not by `choices`, which would let anything from the environment pass.
    if text not in LOG_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither text nor json")
    return text


def configure_logging(process: str, log_format: str, facts: Callable[[], Facts] = dict) -> None:
    """Log to standard error from level GEMINI_FT_LOG_LEVEL (default INFO) on.

    Args:
        process: word for this kind of process.
        facts: what all records are about at present, under the names job_id, node_id, rank and generation.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(process, facts))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=os.environ.get(_LEVEL_VARIABLE, "INFO"), handlers=[handler])
