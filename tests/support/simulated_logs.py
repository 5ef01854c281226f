"""Agents' answers to requests for logs, over real NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from coordinator_cluster import SimulatedCluster
from nats.aio.msg import Msg

from gemini_ft.contracts.errors import NotFoundError
from gemini_ft.contracts.messages import LogPiece, LogRefused, ReadLog
from gemini_ft.contracts.subjects import log_subject


@dataclass
class SimulatedLogs:
    """What all agents answer: (generation, rank) -> all that was written."""

    written: dict[tuple[int, int], bytes] = field(default_factory=dict)
    asked: list[tuple[str, ReadLog]] = field(default_factory=list)

    async def answer(self, message: Msg) -> None:
        question = ReadLog.model_validate_json(message.data)
        self.asked.append((message.subject, question))
        assert question.generation is not None
        log = self.written.get((question.generation, question.rank))
        reply: LogPiece | LogRefused
        if log is None:
            reply = LogRefused(error=NotFoundError("there is no such log here").to_wire())
        else:
            lines = log.splitlines(keepends=True)
            offset = question.offset
            if offset is None:
                offset = len(log) - len(b"".join(lines[-question.tail_lines :]))
            offset = min(offset, len(log))
            data = log[offset : offset + question.max_bytes]
            reply = LogPiece(
                generation=question.generation,
                offset=offset,
                next_offset=offset + len(data),
                data=data,
                is_end=offset + len(data) >= len(log),
            )
        await message.respond(reply.model_dump_json().encode())


@asynccontextmanager
async def answering_for_logs(cluster: SimulatedCluster) -> AsyncIterator[SimulatedLogs]:
    """Let the agents that are there answer."""
    logs = SimulatedLogs()
    async with AsyncExitStack() as subscribed:
        for agent in cluster.agents:
            subscription = await cluster.client.subscribe(log_subject(str(agent.node_id)), cb=logs.answer)
            subscribed.push_async_callback(subscription.unsubscribe)
        await cluster.client.flush()
        yield logs
