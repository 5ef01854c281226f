"""Log lines for machines: one JSON object each, with what the record is about."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from gemini_ft.contracts.logs import LOG_FORMAT_VARIABLE, JsonFormatter, add_log_format


def line(level: int, text: str, *args: object, facts: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """What a record becomes; the logger's own machinery makes it."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    handler = Keep()
    handler.setFormatter(JsonFormatter("agent", lambda: facts or {}))
    logger = logging.Logger("gemini_ft.test")
    logger.addHandler(handler)
    logger.log(level, text, *args, **extra)
    assert "\n" not in found[0]
    parsed: dict[str, Any] = json.loads(found[0])
    return parsed


def test_a_line_says_when_who_and_what() -> None:
    found = line(logging.WARNING, "step %d\nof %s", 3, "j\u00f6b")
    assert datetime.fromisoformat(found.pop("ts")).utcoffset() is not None
    assert found == {
        "level": "warning",
        "process": "agent",
        "logger": "gemini_ft.test",
        "message": "step 3\nof j\u00f6b",
    }


def test_a_record_is_about_what_it_says_and_else_about_what_the_process_is_about() -> None:
    facts = {"node_id": "node-1", "job_id": None, "generation": 2}
    found = line(logging.INFO, "x", facts=facts, extra={"rank": 0, "generation": 3})
    about = {name: found[name] for name in ("node_id", "rank", "generation")}
    assert about == {"node_id": "node-1", "rank": 0, "generation": 3}
    assert "job_id" not in found


def test_a_traceback_is_part_of_the_line() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        found = line(logging.ERROR, "failed", exc_info=error)
    assert found["exception"].endswith("ValueError: no")


def logged_by(log_format: str) -> str:
    script = (
        "import logging; from gemini_ft.contracts.logs import configure_logging\n"
        f"configure_logging('detector', {log_format!r}); logging.getLogger('a').info('heard'); logging.debug('quiet')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return run.stderr


def test_both_formats_go_to_standard_error_from_info_on() -> None:
    assert logged_by("text").endswith(" detector INFO a: heard\n")
    assert [json.loads(text)["message"] for text in logged_by("json").splitlines()] == ["heard"]


def chosen(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    add_log_format(parser)
    return str(parser.parse_args(arguments).log_format)


def test_the_option_wins_over_the_environment_and_both_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(LOG_FORMAT_VARIABLE, raising=False)
    assert chosen() == "text"
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "json")
    assert (chosen(), chosen("--log-format", "text")) == ("json", "text")
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "xml")
    with pytest.raises(SystemExit):
        chosen()
    assert "'xml' is neither text nor json" in capsys.readouterr().err
