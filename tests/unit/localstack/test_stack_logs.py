"""Rank logs are followed line by line, across generations, however they are cut."""

from pathlib import Path

from gemini_ft.localstack.logs import LogLine, RankLogFollower


def _log(folder: Path, generation: int, rank: int, job: str = "job-1") -> Path:
    path = folder / job / f"generation-{generation}" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_only_whole_new_lines_are_returned(tmp_path: Path) -> None:
    follower = RankLogFollower([tmp_path])
    log = _log(tmp_path, 1, 0)
    log.write_bytes(b"one\ntw")
    assert list(follower.poll()) == [LogLine(1, 0, "one")]

    with log.open("ab") as file:
        file.write(b"o\r\nthree")
    assert list(follower.poll()) == [LogLine(1, 0, "two")]
    assert list(follower.poll()) == []
    assert list(follower.poll(final=True)) == [LogLine(1, 0, "three")]
    assert list(follower.poll(final=True)) == []


def test_logs_that_appear_later_are_found_and_generations_come_in_order(tmp_path: Path) -> None:
    nodes = [tmp_path / "n0", tmp_path / "n1"]
    follower = RankLogFollower(nodes)
    assert list(follower.poll()) == []
    _log(nodes[1], 10, 1).write_text("new\n")
    _log(nodes[0], 9, 0).write_text("old\n")
    _log(nodes[0], 9, 0).with_name("launcher.log").write_text("not a rank\n")

    assert list(follower.poll()) == [LogLine(9, 0, "old"), LogLine(10, 1, "new")]


def test_logs_of_other_jobs_and_undecodable_bytes_do_no_harm(tmp_path: Path) -> None:
    _log(tmp_path, 1, 0, "job-2").write_text("another job\n")
    _log(tmp_path, 1, 0).write_bytes(b"\xe9\n")

    assert [line.text for line in RankLogFollower([tmp_path], job_id="job-1").poll()] == ["\ufffd"]
