"""Bringing the shard that the plan restores into local memory, from whatever copy of it is still good."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from pydantic import Field, TypeAdapter

from gemini_ft.agent.replicas.connection import Connection
from gemini_ft.agent.replicas.counts import DamageFound
from gemini_ft.agent.replicas.job import Job
from gemini_ft.agent.replicas.peers import open_connection, retry_delays_s
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.agent.replicas.versions import IncomingVersion, geometry_of
from gemini_ft.contracts.data_protocol import Begin, Chunk, Fetch, Refused, Seal
from gemini_ft.contracts.errors import (
    FencedError,
    GeminiError,
    IntegrityError,
    NotFoundError,
    NoVersionError,
    ProtocolError,
    from_wire,
)

__all__ = ["ShardFetcher"]

_log = logging.getLogger(__name__)

_Part = Begin | Chunk | Seal | Refused
_parts: TypeAdapter[_Part] = TypeAdapter(Annotated[_Part, Field(discriminator="kind")])


class ShardFetcher:
    """Fetches one rank's shard of one step. A source that proved useless is never asked again."""

    def __init__(
        self, job: Job, rank: int, step: int, generation: int, sources: tuple[str, ...], settings: ReplicaSettings
    ) -> None:
        self._job = job
        self._rank = rank
        self._step = step
        self._generation = generation
        self._sources = list(sources)
        self._settings = settings
        self._last_source: str | None = None

    def blame_last_source(self) -> None:
        """The copy that was fetched last turned out bad after all: do not take it from there again."""
        if self._last_source in self._sources:
            self._sources.remove(self._last_source)

    async def run(self) -> None:
        """Fetch from the sources, best first, until a verified copy is in a local buffer.

        Raises:
            NoVersionError: no source has given a good copy; the sentence says what became of each.
            FencedError: the job has gone on to a newer generation.
        """
        failures: dict[str, str] = {}
        delays_s = retry_delays_s(self._settings)
        for attempt in range(self._settings.num_fetch_rounds):
            if attempt and self._sources:
                await asyncio.sleep(next(delays_s))
            for node_id in tuple(self._sources):
                try:
                    await self._fetch(node_id)
                except FencedError:
                    raise
                except NotFoundError as error:
                    self._sources.remove(node_id)
                    failures[node_id] = str(error)
                except GeminiError as error:
                    if isinstance(error, IntegrityError):
                        self._job.counts.num_damaged[DamageFound.RECEIVED] += 1
                    failures[node_id] = str(error)
                else:
                    self._last_source = node_id
                    return
                about = {"rank": self._rank}
                _log.warning("rank %d at step %d: %s", self._rank, self._step, failures[node_id], extra=about)
        told = "; ".join(f"{node_id}: {failure}" for node_id, failure in failures.items())
        raise NoVersionError(
            f"no good copy of rank {self._rank} at step {self._step} is left in memory ({told or 'no node has one'})",
            rank=self._rank,
            step=self._step,
        )

    async def _fetch(self, node_id: str) -> None:
        async with open_connection(self._job, node_id, self._settings) as connection:
            await connection.send(Fetch(generation=self._generation, rank=self._rank, step=self._step))
            begin, _ = await self._receive(connection)
            if not isinstance(begin, Begin) or (begin.rank, begin.step) != (self._rank, self._step):
                raise ProtocolError(f"{connection.peer} answered a fetch with {begin.kind}")
            target = await self._job.store.buffer_for(self._rank, begin.world_size, geometry_of(begin), begin.base_step)
            version = IncomingVersion(target, begin, self._job.credentials.job_id)
            try:
                await self._receive_version(connection, version)
            finally:
                version.give_up()

    async def _receive_version(self, connection: Connection, version: IncomingVersion) -> None:
        while True:
            part, payload_bytes = await self._receive(connection)
            match part:
                case Chunk():
                    await connection.receive_payload(version.chunk_view(part, payload_bytes))
                    self._job.counts.received_bytes += payload_bytes
                    version.chunk_arrived(part)
                    await asyncio.sleep(0)
                case Seal():
                    manifest = memoryview(bytearray(payload_bytes))
                    await connection.receive_payload(manifest)
                    version.seal(part, manifest)
                    return
                case _:
                    raise ProtocolError(f"{connection.peer} sent {part.kind} in the middle of a version")

    async def _receive(self, connection: Connection) -> tuple[_Part, int]:
        part, payload_bytes = await connection.receive(_parts)
        if isinstance(part, Refused):
            raise from_wire(part.error)
        return part, payload_bytes
