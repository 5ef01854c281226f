"""What the command line refuses before it connects to anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_ft.coordinator.__main__ import main
from gemini_ft.security.secret_files import write_secret


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
    options = options_of(tmp_path, files) | ({option: str(content)} if option not in files else {})
    assert named in refusal([*words(options), "--insecure-plaintext"], capsys)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("listen", "0.0.0.0:0", "the API on 0.0.0.0:0 would carry secrets over the network unencrypted"),
        ("listen", "coordinator.example:443", "give --tls-certificate-file and --tls-key-file"),
        ("nats", "nats://nats.example:4222", "would be used without credentials"),
        ("tls-key-file", "key.pem", "give both --tls-certificate-file and --tls-key-file"),
    ],
)
def test_what_would_not_be_safe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, named: str
) -> None:
    options = options_of(tmp_path, {"database-url-file": "postgresql://u:p@127.0.0.1:1/x", "api-token-file": "secret"})
    assert named in refusal(words(options | {option: value}), capsys)


@pytest.mark.parametrize("name", ["database-url-file", "api-token-file", "nats-credentials-file", "nats-token-file"])
def test_a_secret_that_others_can_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    files = {"database-url-file": "postgresql://u:p@127.0.0.1:1/x", "api-token-file": "secret", name: "a:b"}
    if name == "database-url-file":
        files[name] = "postgresql://u:p@127.0.0.1:1/x"
    options = options_of(tmp_path, files)
    (tmp_path / name).chmod(0o604)
    printed = refusal(words(options), capsys)
    assert f"--{name}: others can read the secret in {tmp_path / name} (mode 0604); run chmod 600" in printed


def options_of(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """Write the files that are not `absent` and return the options that name them."""
    options = {"nats": "nats://127.0.0.1:1"}
    for name, text in files.items():
        path = folder / name
        options[name] = str(path)
        if text != "absent":
            write_secret(path, text)
    return options


def words(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the coordinator and return the one sentence with which it refuses."""
    assert main(arguments) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith("error: ")
    return printed
