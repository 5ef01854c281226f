"""An agent without peers, for tests of training scripts: it keeps the memory of a few ranks in a folder.

It speaks the local protocol over a real socket with real mapped buffers. Copies are acknowledged as soon as they
are sealed, as if every holder had them; there is no control plane, and failures are declared by the test.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from gemini_ft.contracts.buffer_format import BufferGeometry, BufferState, ShardBuffer
from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, JobPage, RankPage
from gemini_ft.contracts.errors import (
    CapacityError,
    FencedError,
    GeminiError,
    NoVersionError,
    ProtocolError,
    WaitTimeoutError,
)
from gemini_ft.contracts.frames import FrameDecoder, Message, encode_frame
from gemini_ft.contracts.local_protocol import (
    BadCopy,
    ClientMessage,
    Failed,
    FillBegun,
    Ok,
    RankHello,
    RankWelcome,
    Reserve,
    Reserved,
    Restore,
    Restored,
    RestoreReply,
    Sealed,
    Staged,
    client_messages,
)
from gemini_ft.worker._mapping import SharedMapping

__all__ = ["SoloAgent"]


class SoloAgent:
    """Serves all ranks of one job on this machine. Start it with `with`; its folder must be empty or its own.

    Args:
        folder: where buffers, pages and the socket lie; short, as socket paths are.
        capacity_bytes: the largest shard that may be reserved.
        checkpoint_interval_steps: the job's, as ranks hear it.
    """

    job_id = "job-solo"

    def __init__(
        self, folder: Path, world_size: int = 1, capacity_bytes: int = 1 << 30, checkpoint_interval_steps: int = 1
    ) -> None:
        self.folder = folder
        self.world_size = world_size
        self.capacity_bytes = capacity_bytes
        self.checkpoint_interval_steps = checkpoint_interval_steps
        self.generation = 1
        self.acknowledging = True
        self.received: list[ClientMessage] = []
        self._restore_step: int | None = None
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        job_page = folder / "job"
        if not job_page.exists():
            job_page.write_bytes(bytes(CONTROL_PAGE_BYTES))
        self._job = SharedMapping(job_page)
        self._set_generation(1)

    def environment(self, rank: int = 0) -> dict[str, str]:
        """Return the variables that a launcher would set for `rank`."""
        return {
            "GEMINI_FT_AGENT_SOCKET": str(self.folder / "socket"),
            "GEMINI_FT_JOB": self.job_id,
            "GEMINI_FT_GENERATION": str(self.generation),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
        }

    def start(self) -> None:
        """Listen, also again after `stop`, as an agent does in its next life."""
        path = self.folder / "socket"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Vanish, as by SIGKILL: connections break, the memory stays."""
        for one in (self._listener, *self._connections):
            if one is not None:
                with suppress(OSError):  # the peer may have closed it
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        self._connections.clear()
        for thread in self._threads:
            thread.join(10)
        self._threads.clear()

    def recover(self) -> int | None:
        """Begin the next generation; return the step that its ranks will restore, the newest that all have sealed."""
        steps = [set(self.sealed_steps(rank)) for rank in range(self.world_size)]
        complete = set.intersection(*steps)
        self._restore_step = max(complete, default=None)
        self._set_generation(self.generation + 1)
        return self._restore_step

    def sealed_steps(self, rank: int) -> dict[int, int]:
        """Return the steps that this rank has sealed, each with the number of its buffer."""
        found = {}
        for index in range(2):
            path = self.buffer_path(rank, index)
            if path.exists():
                mapping = SharedMapping(path)
                header = ShardBuffer.open(mapping.view).header()
                if header.state is BufferState.SEALED:
                    found[header.step] = index
                mapping.close()
        return found

    def buffer_path(self, rank: int, index: int) -> Path:
        """Return the file of one buffer of `rank`."""
        return self.folder / f"rank{rank}.{index}"

    def wait_for(self, kind: type[Message], step: int, timeout_s: float = 10.0) -> None:
        """Wait until a message of `kind` about `step` has been handled; raises WaitTimeoutError."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: any(isinstance(m, kind) and getattr(m, "step", None) == step for m in self.received), timeout_s
            ):
                raise WaitTimeoutError.of(f"{kind.__name__} of step {step}", timeout_s)

    def refuse(self, rank: int, step: int) -> None:
        """Say that a holder refused what was staged of `step`, because it is damaged here."""
        with self._page(rank) as page:
            page.damaged_step = step

    def hold(self) -> None:
        """Ask the ranks to stop together, as the order does."""
        with self._job_page() as page:
            page.hold_generation = self.generation

    def request_checkpoint(self, request: int) -> None:
        """Ask the ranks for a version at the next step, as the order does."""
        with self._job_page() as page:
            page.checkpoint_request = request

    def held_step(self, rank: int) -> int | None:
        """Return the step at which `rank` is held."""
        with self._page(rank) as page:
            return page.held_step

    def close(self) -> None:
        """Stop and unmap."""
        self.stop()
        self._job.close()

    def __enter__(self) -> SoloAgent:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _set_generation(self, generation: int) -> None:
        self.generation = generation
        with self._job_page() as page:
            page.checkpoint_request = 0
            page.ordered_generation = generation

    def _spawn(self, target: object, connection: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(connection,), daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        decoder = FrameDecoder(client_messages)
        while True:
            try:
                data = connection.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            for frame in decoder.feed(data):
                reply = self._reply(frame.message)
                with self._changed:
                    self.received.append(frame.message)
                    self._changed.notify_all()
                if reply is not None:
                    with suppress(OSError):  # the rank may be gone
                        connection.sendall(encode_frame(reply))

    def _reply(self, message: ClientMessage) -> Message | None:
        try:
            generation = getattr(message, "generation", self.generation)
            if generation < self.generation:
                raise FencedError.of("this rank", generation, self.generation)
            return self._handle(message)
        except GeminiError as error:
            return Failed(request_id=getattr(message, "request_id", 0), error=error.to_wire())

    def _handle(self, message: ClientMessage) -> Message | None:
        match message:
            case RankHello():
                return self._welcome(message)
            case Reserve():
                return self._reserve(message)
            case Restore():
                return self._restorable(message)
            case BadCopy():
                self._edit(message.rank, self._index_of(message.rank, message.step), ShardBuffer.discard)
                return Ok(request_id=message.request_id)
            case Restored():
                self._acknowledge(message.rank, message.step)
                return Ok(request_id=message.request_id)
            case FillBegun() | Staged():
                return None
            case Sealed():
                self._edit(message.rank, self._index_of(message.rank, message.step), ShardBuffer.verify)
                if self.acknowledging:
                    self._acknowledge(message.rank, message.step)
                return None
            case _:
                raise ProtocolError(f"a rank does not send {message.kind}")

    def _welcome(self, message: RankHello) -> RankWelcome:
        page = self._page_path(message.rank)
        aside = page.with_suffix(".new")
        aside.write_bytes(bytes(CONTROL_PAGE_BYTES))
        aside.replace(page)
        self._set_healthy(message.rank)
        return RankWelcome(
            request_id=message.request_id,
            job_page=str(self.folder / "job"),
            rank_page=str(page),
            checkpoint_interval_steps=self.checkpoint_interval_steps,
        )

    def _reserve(self, message: Reserve) -> Reserved:
        if message.data_bytes > self.capacity_bytes:
            raise CapacityError(
                f"rank {message.rank} needs {message.data_bytes} bytes, capacity_bytes is {self.capacity_bytes}",
                need_bytes=message.data_bytes,
                have_bytes=self.capacity_bytes,
                knob="capacity_bytes",
            )
        geometry = BufferGeometry.for_shard(message.data_bytes, message.manifest_bytes)
        for index in range(2):
            path = self.buffer_path(message.rank, index)
            if not path.exists():
                path.write_bytes(bytes(geometry.file_bytes))
                mapping = SharedMapping(path)
                ShardBuffer(mapping.view, geometry).format(self.job_id, message.rank, self.world_size)
                mapping.close()
        paths = (str(self.buffer_path(message.rank, 0)), str(self.buffer_path(message.rank, 1)))
        return Reserved(request_id=message.request_id, buffers=paths)

    def _restorable(self, message: Restore) -> RestoreReply:
        if self._restore_step is None:
            return RestoreReply(request_id=message.request_id, step=None, buffer=None, source="zero")
        index = self._index_of(message.rank, self._restore_step)
        return RestoreReply(request_id=message.request_id, step=self._restore_step, buffer=index, source="local")

    def _index_of(self, rank: int, step: int) -> int:
        held = self.sealed_steps(rank)
        if step not in held:
            raise NoVersionError(f"no verified copy of rank {rank} at step {step} is left in memory")
        return held[step]

    def _edit(self, rank: int, index: int, act: Callable[[ShardBuffer], object]) -> None:
        mapping = SharedMapping(self.buffer_path(rank, index))
        act(ShardBuffer.open(mapping.view))
        mapping.close()

    def _acknowledge(self, rank: int, step: int | None) -> None:
        with self._page(rank) as page:
            page.sealed_everywhere_step = step

    def _set_healthy(self, rank: int) -> None:
        with self._page(rank) as page:
            page.replication_healthy = True

    @contextmanager
    def _job_page(self) -> Iterator[JobPage]:
        page = JobPage(self._job.view)
        yield page
        page.release()

    @contextmanager
    def _page(self, rank: int) -> Iterator[RankPage]:
        mapping = SharedMapping(self._page_path(rank))
        page = RankPage(mapping.view)
        yield page
        page.release()
        mapping.close()

    def _page_path(self, rank: int) -> Path:
        return self.folder / f"page{rank}"
