"""Pieces of ranks' logs, whatever was written and whoever made the folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gemini_ft.agent.rank_logs import read_log
from gemini_ft.contracts.errors import NotFoundError
from gemini_ft.contracts.messages import LogPiece, ReadLog

JOB = "job-1"


def write(log_dir: Path, data: bytes, generation: int = 1, rank: int = 0) -> Path:
    path = log_dir / JOB / f"generation-{generation}" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def read(log_dir: Path, **facts: Any) -> LogPiece:
    return read_log(log_dir, ReadLog(**({"job_id": JOB, "rank": 0} | facts)))


@pytest.mark.parametrize(
    ("data", "num_lines", "tail"),
    [
        (b"", 5, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 3, b"a\nb\nc\n"),
        (b"a\nb\nc\n", 10**9, b"a\nb\nc\n"),
        (b"a\nb\nc\n", 0, b""),
        (b"\n\n\n", 2, b"\n\n"),
        (b"\xff\x00\r\n\xe2\x82", 1, b"\xe2\x82"),
    ],
)
def test_the_tail_is_the_last_lines(tmp_path: Path, data: bytes, num_lines: int, tail: bytes) -> None:
    write(tmp_path, data)
    piece = read(tmp_path, tail_lines=num_lines)
    expected = (1, len(data) - len(tail), len(data), tail, True)
    assert (piece.generation, piece.offset, piece.next_offset, piece.data, piece.is_end) == expected


def test_a_line_that_is_too_long_is_cut_at_its_beginning(tmp_path: Path) -> None:
    write(tmp_path, b"x" * 1000 + b"\nlast\n")
    piece = read(tmp_path, tail_lines=2, max_bytes=10)
    assert (piece.data, piece.offset) == (b"xxxx\nlast\n", 996)


def test_pieces_follow_each_other_and_what_is_added_later(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3
    log = write(tmp_path, data)
    offset, found, is_end = 0, b"", False
    while not is_end:
        piece = read(tmp_path, offset=offset, max_bytes=100)
        assert piece.offset == offset
        found, offset, is_end = found + piece.data, piece.next_offset, piece.is_end
    assert found == data
    with log.open("ab") as file:
        file.write(b"more")
    assert read(tmp_path, offset=offset).data == b"more"


def test_beyond_the_end_there_is_nothing_yet(tmp_path: Path) -> None:
    write(tmp_path, b"four")
    piece = read(tmp_path, offset=10**15)
    assert (piece.data, piece.offset, piece.next_offset, piece.is_end) == (b"", 4, 4, True)


def test_no_generation_means_the_newest_that_has_the_rank(tmp_path: Path) -> None:
    for generation in (2, 9, 10):
        write(tmp_path, str(generation).encode(), generation)
    write(tmp_path, b"another rank", 11, rank=1)
    (tmp_path / JOB / "generation-x").mkdir()
    assert (read(tmp_path).generation, read(tmp_path).data) == (10, b"10")
    assert read(tmp_path, generation=2).data == b"2"


@pytest.mark.parametrize("facts", [{"generation": 2}, {"rank": 1}, {"job_id": "job-2"}])
def test_a_log_that_is_not_here_is_named(tmp_path: Path, facts: dict[str, Any]) -> None:
    write(tmp_path, b"here")
    with pytest.raises(NotFoundError, match=r"the log of rank \d in .* of job-\d is not on this node"):
        read(tmp_path, **facts)


@pytest.mark.parametrize(
    "facts", [{"job_id": "../job-1"}, {"job_id": "job-1/.."}, {"job_id": ".."}, {"rank": -1}, {"generation": 0}]
)
def test_nothing_but_ids_and_numbers_can_be_asked_for(facts: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ReadLog(**({"job_id": JOB, "rank": 0} | facts))


@pytest.mark.parametrize("linked", ["job", "generation", "log"])
def test_links_are_not_followed(tmp_path: Path, linked: str) -> None:
    real = write(tmp_path / "elsewhere", b"secret")
    link = {
        "job": tmp_path / "logs" / JOB,
        "generation": tmp_path / "logs" / JOB / "generation-1",
        "log": tmp_path / "logs" / JOB / "generation-1" / "rank-0.log",
    }[linked]
    target = {"job": real.parent.parent, "generation": real.parent, "log": real}[linked]
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    with pytest.raises(NotFoundError):
        read(tmp_path / "logs")


def test_a_pipe_in_a_logs_place_is_no_log_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = write(tmp_path, b"")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotFoundError):
        read(tmp_path)
