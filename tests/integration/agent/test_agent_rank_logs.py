"""Ranks' logs, asked for over a real NATS as the coordinator does."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_harness import JOB, NODE, SOON_S, Coordinator, eventually

from gemini_ft.contracts.messages import MAX_LOG_BYTES, LogPiece, LogRefused, LogReply, ReadLog, log_replies
from gemini_ft.contracts.subjects import log_subject
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.security.secret_files import write_secret


@pytest.fixture
def token_file(tmp_path: Path, nats_server: NatsServer) -> Path:
    return write_secret(tmp_path / "token", nats_server.token or "")


async def ask(coordinator: Coordinator, request: bytes) -> LogReply:
    message = await coordinator.connection.request(log_subject(NODE), request, timeout=SOON_S)
    return log_replies.validate_json(message.data)


async def test_logs_are_read_piece_by_piece_whatever_they_hold(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / JOB / "generation-3" / "rank-1.log"
    log.parent.mkdir(parents=True)
    # One line that is longer than a message may be, of bytes that are no text.
    log.write_bytes(bytes(range(128, 256)) * 20_000 + b"\nlast line\n")
    async with run_agent(nats_server.url, nats_token_file=token_file, log_dir=tmp_path / "logs"):
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
        request = ReadLog(job_id=JOB, rank=1, tail_lines=1)
        tail = await ask(coordinator, request.model_dump_json().encode())
        assert isinstance(tail, LogPiece)
        assert (tail.generation, tail.data, tail.is_end) == (3, b"last line\n", True)

        found, offset = b"", 0
        while offset < log.stat().st_size:
            request = ReadLog(job_id=JOB, generation=3, rank=1, offset=offset, max_bytes=MAX_LOG_BYTES)
            piece = await ask(coordinator, request.model_dump_json().encode())
            assert isinstance(piece, LogPiece)
            assert piece.offset == offset
            found, offset = found + piece.data, piece.next_offset
        assert found == log.read_bytes()


async def test_what_cannot_be_read_is_refused_in_a_sentence(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "rank-0.log").write_text("not to be seen")
    async with run_agent(nats_server.url, nats_token_file=token_file, log_dir=tmp_path / "logs"):
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
        absent = await ask(coordinator, ReadLog(job_id=JOB, rank=0).model_dump_json().encode())
        assert isinstance(absent, LogRefused)
        assert absent.error["code"] == "not_found"
        for outside in (b'{"job_id": "../../x", "rank": 0}', b'{"job_id": "job-1", "rank": "../0"}', b"\x00"):
            refused = await ask(coordinator, outside)
            assert isinstance(refused, LogRefused)
            assert refused.error["code"] == "protocol"
            assert "a request for a log is malformed" in refused.error["message"]


async def test_logs_can_be_asked_for_again_after_the_broker_was_killed(
    run_agent, nats_server: NatsServer, coordinator: Coordinator, token_file: Path
) -> None:
    async with run_agent(nats_server.url, nats_token_file=token_file):
        await eventually("a heartbeat", lambda: coordinator.last(NODE))
        nats_server.kill()
        num_heartbeats = len(coordinator.heartbeats)
        nats_server.start()
        await eventually("heartbeats after the kill", lambda: len(coordinator.heartbeats) > num_heartbeats)
        reply = await ask(coordinator, ReadLog(job_id=JOB, rank=0).model_dump_json().encode())
        assert isinstance(reply, LogRefused)
