"""Secrets in files: private when written, refused when others can read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.security.secret_files import read_or_create_secret, read_secret, require_private, write_secret


def test_a_written_secret_is_private_whatever_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    former_mask = os.umask(0)
    try:
        assert write_secret(path, "new\n") == path
    finally:
        os.umask(former_mask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path, "--file") == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_generated_secret_stays(tmp_path: Path) -> None:
    first = read_or_create_secret(tmp_path / "secret")
    assert len(first) >= 32
    assert read_or_create_secret(tmp_path / "secret") == first
    assert read_or_create_secret(tmp_path / "other") != first


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o666])
def test_what_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_secret(tmp_path / "secret", "x")
    path.chmod(mode)
    sentence = rf"--file: others can read the secret in .*secret \(mode {mode:04o}\); run chmod 600"
    with pytest.raises(ConfigurationError, match=sentence):
        read_secret(path, "--file")
    with pytest.raises(ConfigurationError, match=sentence):
        require_private(path, "--file")


@pytest.mark.parametrize(("content", "sentence"), [(b" \n", "is empty"), (b"\xff\xfe", "cannot be read")])
def test_what_is_no_secret_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = write_secret(tmp_path / "secret", "")
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"--file: .* {sentence}"):
        read_secret(path, "--file")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--file: .*absent cannot be read: No such file"):
        read_secret(tmp_path / "absent", "--file")
