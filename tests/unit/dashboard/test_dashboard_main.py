"""What the command line refuses before it serves anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_ft.dashboard.__main__ import main


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--api", "coordinator:8080"), "'coordinator:8080' is not a coordinator's URL"),
        (("--api", "http://coordinator.example:8080"), "would carry secrets over the network unencrypted"),
        (("--listen", "nowhere"), "give HOST:PORT"),
        (("--listen", "0.0.0.0:0"), "the dashboard on 0.0.0.0:0 would carry secrets over the network unencrypted"),
        (("--listen", "203.0.113.1:80", "--insecure-plaintext"), "cannot listen on 203.0.113.1:80"),
        (("--tls-key-file", "key.pem"), "give both --tls-certificate-file and --tls-key-file"),
        (("--api-ca-file", "absent.pem"), "--api-ca-file: absent.pem holds no certificate authority"),
    ],
)
def test_what_it_cannot_use_is_refused_in_one_sentence(
    options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--api", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", *options]) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith("error: ")
    assert named in printed


def test_a_cookie_secret_that_others_can_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    assert main(["--api", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--cookie-secret-file", str(secret)]) == 2
    assert f"others can read the secret in {secret}" in capsys.readouterr().err
