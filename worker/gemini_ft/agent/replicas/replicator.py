"""The owner's side of replication: what one local rank has, and one link to each holder of its shard.

A link connects, asks what the holder has, and sends the newest version that is missing there, sealed or still being
staged. Whatever goes wrong, it connects again and begins with the same question, so that re-replication after a
recovery, a restart on either side and a broken network all take the same path.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from gemini_ft.agent.replicas._changes import Changes
from gemini_ft.agent.replicas.connection import Connection
from gemini_ft.agent.replicas.counts import DamageFound
from gemini_ft.agent.replicas.job import Job
from gemini_ft.agent.replicas.pages import ControlPages
from gemini_ft.agent.replicas.peers import ask, open_connection, receive_answer, retry_delays_s
from gemini_ft.agent.replicas.sender import send_version
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.agent.replicas.versions import OutgoingVersion
from gemini_ft.contracts.buffer_format import BufferHeader, BufferState
from gemini_ft.contracts.data_protocol import Acknowledged, Holdings, HoldingsReply, Refused
from gemini_ft.contracts.errors import (
    FencedError,
    GeminiError,
    IntegrityError,
    ProtocolError,
    UnavailableError,
    WaitTimeoutError,
    from_wire,
)
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged
from gemini_ft.faults import fault_point

__all__ = ["HolderLink", "OwnedShard"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _HolderState:
    connected: bool = False
    held: dict[int, str] = field(default_factory=dict)
    """Shard digest of each version that the holder is known to have sealed, by step."""


class OwnedShard:
    """The shard of one local rank in one generation: its versions, and where they are sealed."""

    def __init__(self, job: Job, rank: int, generation: int, restore_step: int | None, pages: ControlPages) -> None:
        self._job = job
        self._pages = pages
        self._oldest_step = 0 if restore_step is None else restore_step
        self._holders = {node_id: _HolderState() for node_id in job.holders(rank)}
        self._filling: OutgoingVersion | None = None
        self._copy: OutgoingVersion | None = None
        self.rank = rank
        self.generation = generation
        self.changes = Changes()
        self.sealed_everywhere_step: int | None = None

    # ---- what the rank does

    def fill_begun(self, message: FillBegun) -> None:
        """The rank fills a buffer: its version can be sent from here on.

        Raises:
            ProtocolError: the buffer's header says otherwise.
        """
        pair = self._job.store.pair(self.rank)
        header = pair[message.buffer].header() if pair is not None and message.buffer in (0, 1) else None
        if (
            pair is None
            or header is None
            or header.state is BufferState.EMPTY
            or (header.step, header.generation, header.data_bytes)
            != (message.step, message.generation, message.data_bytes)
        ):
            raise ProtocolError(
                f"rank {self.rank} says that it fills buffer {message.buffer} with step {message.step}, "
                "but the buffer's header says otherwise"
            )
        filling = self._filling
        if filling is not None and filling.step == message.step:
            return
        if filling is not None:
            filling.abandoned = filling.sealed is None
        # After a restart of the agent the rank repeats what it said before; the copy may be known, and sent, already.
        known = next((copy for _, _, copy in self._job.store.copies(self.rank) if copy == header), None)
        self._filling = OutgoingVersion(pair[message.buffer].buffer, header, message.base_step, self.changes)
        if known is None:
            self._filling.sealed = None
            self._filling.num_staged = 0
        self._changed()

    def staged(self, message: Staged) -> None:
        """More chunks can be sent; raises ProtocolError if that step is not being filled."""
        filling = self._require_filling(message.step)
        filling.num_staged = max(filling.num_staged, min(message.num_chunks, filling.header.num_chunks))
        self.changes.notify()

    def sealed(self, message: Sealed) -> None:
        """The version is complete; raises ProtocolError if its buffer does not say so."""
        filling = self._require_filling(message.step)
        if filling.abandoned:
            _log.error(
                "rank %d sealed step %d, whose bytes were damaged before they were sent", self.rank, message.step
            )
            return
        pair = self._job.store.pair(self.rank) or ()
        for buffer_file in pair:
            header = buffer_file.header()
            if (
                header is not None
                and header.state is BufferState.SEALED
                and (header.step, header.generation) == (message.step, message.generation)
                and header.shard_digest.hex() == message.shard_digest
            ):
                # Its digests were taken from the source bytes just now, and every holder checks what it gets.
                buffer_file.trust(header)
                filling.seal(header)
                self._changed()
                return
        raise ProtocolError(f"rank {self.rank} says that step {message.step} is sealed, but no buffer of it is")

    def copy_arrived(self) -> None:
        """A verified copy of the restored version is here now."""
        self._changed()

    # ---- what the links do

    def version_to_send(self, node_id: str) -> OutgoingVersion | None:
        """Return the newest version if the holder lacks it."""
        version = self._newest()
        if version is None:
            return None
        sealed = version.sealed
        if sealed is not None and self._holders[node_id].held.get(version.step) == sealed.shard_digest.hex():
            return None
        return version

    def connected(self, node_id: str, held: dict[int, str]) -> None:
        """The holder has told what it has."""
        self._holders[node_id] = _HolderState(connected=True, held=held)
        self._changed()

    def disconnected(self, node_id: str) -> None:
        """The holder cannot be reached."""
        self._holders[node_id].connected = False
        self._changed()

    def acknowledged(self, node_id: str, step: int, shard_digest: str) -> None:
        """The holder has sealed a version."""
        fault_point("owner.before_ack_recorded")
        held = self._holders[node_id].held
        held[step] = shard_digest
        # A holder has two buffers, so what is older than the second newest is gone there.
        for old in sorted(held)[:-2]:
            del held[old]
        fault_point("owner.after_ack_recorded")
        self._changed()

    def refuted(self, version: OutgoingVersion) -> None:
        """A holder has refused bytes as damaged, and they are damaged here: this copy must not be used."""
        self._job.counts.num_damaged[DamageFound.STAGED] += 1
        version.abandoned = version.damaged = True
        for _, buffer_file, copy in self._job.store.copies(self.rank):
            if copy == version.sealed:
                buffer_file.discard()
        self._changed()

    # ---- what others see

    @property
    def healthy(self) -> bool:
        """True while every holder is connected."""
        return all(holder.connected for holder in self._holders.values())

    @property
    def whole(self) -> bool:
        """True if replication is healthy and every holder has the newest sealed version."""
        newest = next((copy for _, _, copy in self._job.store.copies(self.rank)), None)
        return self.healthy and (newest is None or self._sealed_on_all(newest))

    def publish(self) -> None:
        """Write to the rank's control page what is known."""
        page = self._pages.get(self.rank)
        if page is not None:
            filling = self._filling
            page.damaged_step = filling.step if filling is not None and filling.damaged else None
            page.replication_healthy = self.healthy
            page.sealed_everywhere_step = self.sealed_everywhere_step

    def _newest(self) -> OutgoingVersion | None:
        if self._filling is not None and not self._filling.abandoned:
            return self._filling
        copies = [entry for entry in self._job.store.copies(self.rank) if entry[2].step >= self._oldest_step]
        if not copies:
            return None
        _, buffer_file, copy = copies[0]
        if self._copy is None or self._copy.sealed != copy:
            # The rank keeps the committed version in the buffer that it does not fill.
            base_step = copies[1][2].step if len(copies) > 1 else None
            self._copy = OutgoingVersion(buffer_file.buffer, copy, base_step, self.changes)
        return self._copy

    def _require_filling(self, step: int) -> OutgoingVersion:
        if self._filling is None or self._filling.step != step:
            raise ProtocolError(f"rank {self.rank} speaks of step {step}, which it has not begun to fill")
        return self._filling

    def _sealed_on_all(self, copy: BufferHeader) -> bool:
        return all(holder.held.get(copy.step) == copy.shard_digest.hex() for holder in self._holders.values())

    def _changed(self) -> None:
        sealed_everywhere = max(
            (
                copy.step
                for _, _, copy in self._job.store.copies(self.rank)
                if copy.step >= self._oldest_step and self._sealed_on_all(copy)
            ),
            default=None,
        )
        known = self.sealed_everywhere_step
        if sealed_everywhere is not None and (known is None or sealed_everywhere > known):
            fault_point("owner.before_sealed_everywhere")
            self.sealed_everywhere_step = sealed_everywhere
            self.publish()
            fault_point("owner.after_sealed_everywhere")
        else:
            self.publish()
        self.changes.notify()


class HolderLink:
    """Keeps one holder of one shard up to date, for as long as its generation lasts."""

    def __init__(self, job: Job, shard: OwnedShard, node_id: str, settings: ReplicaSettings) -> None:
        self._job = job
        self._shard = shard
        self._node_id = node_id
        self._settings = settings

    async def run(self) -> None:
        """Connect, replicate, connect again; ends only when it is cancelled or this generation is fenced off."""
        delays_s = retry_delays_s(self._settings)
        last_failure = ""
        while True:
            address_change = self._job.changes.next
            try:
                async with open_connection(self._job, self._node_id, self._settings) as connection:
                    await self._ask_holdings(connection)
                    while True:
                        await self._replicate_next(connection)
                        delays_s, last_failure = retry_delays_s(self._settings), ""
            except FencedError as error:
                _log.info(
                    "rank %d is no longer replicated: %s", self._shard.rank, error, extra={"rank": self._shard.rank}
                )
                return
            except GeminiError as error:
                if str(error) != last_failure:
                    rank = self._shard.rank
                    _log.warning(
                        "rank %d cannot be replicated to %s: %s", rank, self._node_id, error, extra={"rank": rank}
                    )
                last_failure = str(error)
            finally:
                self._shard.disconnected(self._node_id)
            try:
                async with asyncio.timeout(next(delays_s)):
                    # Taking a new address ends the pause.
                    await address_change.wait()
            except TimeoutError:
                continue

    async def _ask_holdings(self, connection: Connection) -> None:
        answer = await ask(connection, Holdings(generation=self._shard.generation, rank=self._shard.rank))
        if not isinstance(answer, HoldingsReply):
            raise ProtocolError(f"{connection.peer} answered a question about holdings with {answer.kind}")
        self._shard.connected(self._node_id, {held.step: held.shard_digest for held in answer.held})

    async def _replicate_next(self, connection: Connection) -> None:
        """Send one version, or wait for one while watching that the holder stays."""
        change = self._shard.changes.next
        version = self._shard.version_to_send(self._node_id)
        if version is not None:
            await self._replicate(connection, version)
            return
        waits = [asyncio.ensure_future(change.wait()), asyncio.ensure_future(connection.readable())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                await receive_answer(connection)
                raise ProtocolError(f"{connection.peer} answered what was not asked")
        finally:
            # Gone before anybody else watches this socket.
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _replicate(self, connection: Connection, version: OutgoingVersion) -> None:
        """Send one version and wait for the acknowledgement; raises what the holder refused with."""
        answering = asyncio.ensure_future(receive_answer(connection, may_idle=True))
        try:
            complete = await send_version(connection, version, self._shard.generation, self._job.counts, answering)
            if not complete and not answering.done():
                raise UnavailableError(f"step {version.step} of rank {self._shard.rank} was abandoned half sent")
            timeout_s = self._settings.chunk_timeout.total_seconds()
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await answering
            except TimeoutError:
                raise WaitTimeoutError.of(f"{connection.peer} to seal step {version.step}", timeout_s) from None
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        if isinstance(answer, Refused):
            error = from_wire(answer.error)
            if isinstance(error, IntegrityError):
                await self._examine(version)
            raise error
        if not isinstance(answer, Acknowledged) or version.sealed is None or answer.step != version.step:
            raise ProtocolError(f"{connection.peer} answered a seal with {answer.kind}")
        self._shard.acknowledged(self._node_id, version.step, version.sealed.shard_digest.hex())

    async def _examine(self, version: OutgoingVersion) -> None:
        """A holder found bytes damaged: on the way there, or here already?"""
        try:
            await asyncio.to_thread(_check_staged, version)
        except IntegrityError as error:
            _log.error("the local copy is damaged: %s", error, extra={"rank": self._shard.rank})
            self._shard.refuted(version)


def _check_staged(version: OutgoingVersion) -> None:
    """Raise IntegrityError if a staged chunk is damaged here. Runs in a thread."""
    for index in range(version.num_staged):
        version.buffer.check_chunk(version.header, index, version.buffer.chunk(index, version.header.data_bytes))
