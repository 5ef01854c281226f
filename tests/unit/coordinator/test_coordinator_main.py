"""What the command line refuses before it connects to anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_ft.coordinator.__main__ import main


@pytest.mark.parametrize(
    ("option", "content", "named"),
    [
        ("api-token-file", "", "is empty"),
        ("api-token-file", None, "cannot be read"),
        ("database-url-file", "mysql://x", "must begin with postgresql://"),
        ("listen", "nowhere", "give HOST:PORT"),
        ("listen", "203.0.113.1:80", "cannot listen on 203.0.113.1:80"),
    ],
)
def test_what_it_cannot_use_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, content: str | None, named: str
) -> None:
    files = {"database-url-file": "postgresql://u:p@127.0.0.1:1/x", "api-token-file": "secret"}
    if option in files:
        files[option] = content if content is not None else "absent"
    options = {"nats": "nats://127.0.0.1:1"}
    for name, text in files.items():
        path = tmp_path / name
        options[name] = str(path)
        if text != "absent":
            path.write_text(text)
    if option == "listen":
        options[option] = str(content)
    assert main([word for name, value in options.items() for word in (f"--{name}", value)]) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith("error: ")
    assert named in printed
