"""The rank's connection to its node's agent: requests with bounded waits, and notices that survive the agent's death.

One thread connects, says hello and reads; when the agent is gone it keeps trying to reach it, while training goes on.
The notices of the version that is being staged are repeated to each new life of the agent, as they stand then.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

from gemini_ft.contracts.control_page import JobPage, RankPage
from gemini_ft.contracts.errors import (
    FencedError,
    GeminiError,
    ProtocolError,
    UnavailableError,
    WaitTimeoutError,
    from_wire,
)
from gemini_ft.contracts.frames import FrameDecoder, Message, encode_frame
from gemini_ft.contracts.local_protocol import (
    AgentMessage,
    Failed,
    FillBegun,
    NotYet,
    RankHello,
    RankWelcome,
    Sealed,
    Staged,
    agent_messages,
)
from gemini_ft.worker._mapping import SharedMapping
from gemini_ft.worker.identity import RankIdentity

__all__ = ["AgentClient"]

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
_HELLO_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16


class _Reply:
    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.message: AgentMessage | None = None


class AgentClient:
    """A connection that is made again by itself. Threads may share it."""

    def __init__(self, identity: RankIdentity) -> None:
        self.identity = identity
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._pending: dict[int, _Reply] = {}
        self._next_id = 1
        self._pages: tuple[JobPage, RankPage] | None = None
        self._checkpoint_interval_steps = 1
        self._mappings: list[SharedMapping] = []
        self._refused: GeminiError | None = None
        self._closing = False
        self._last_error = "not tried yet"
        self._fill: FillBegun | None = None
        self._staged: Staged | None = None
        self._sealed: Sealed | None = None
        self._thread = threading.Thread(target=self._run, name="gemini-ft-agent-client", daemon=True)

    def start(self, timeout: timedelta) -> None:
        """Connect and say hello.

        Raises:
            UnavailableError: the agent was not reached in time.
            GeminiError: the agent refused this rank, in the agent's words.
        """
        self._thread.start()
        with self._changed:
            self._changed.wait_for(
                lambda: self._socket is not None or self._refused is not None, timeout.total_seconds()
            )
            if self._refused is not None:
                raise self._refused
            if self._socket is None:
                raise UnavailableError(
                    f"the agent of this node was not reached at {self.identity.socket} within "
                    f"{timeout.total_seconds():g} s ({self._last_error}); is `python -m gemini_ft.agent` running on it?"
                )

    @property
    def connected(self) -> bool:
        """True while the agent is known to listen."""
        return self._socket is not None

    @property
    def refused(self) -> GeminiError | None:
        """Why the agent will not have this rank any more, for instance because its generation is over."""
        return self._refused

    @property
    def checkpoint_interval_steps(self) -> int:
        """Every how many steps the job wants a version, as the agent said in its welcome."""
        return self._checkpoint_interval_steps

    @property
    def job_page(self) -> JobPage:
        """The job's control page, of the agent's newest life."""
        assert self._pages is not None
        return self._pages[0]

    @property
    def rank_page(self) -> RankPage:
        """This rank's control page, of the agent's newest life."""
        assert self._pages is not None
        return self._pages[1]

    def ask(self, request: Message, what: str, timeout: timedelta) -> AgentMessage:
        """Send `request` under an id of our own and return its answer; ask again after `NotYet` and reconnects.

        Raises:
            WaitTimeoutError: there was no answer in time; the sentence names `what`.
            GeminiError: the agent refused the request, in its words.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            answer = self._ask_once(request, deadline)
            if isinstance(answer, Failed):
                raise from_wire(answer.error)
            if answer is not None and not isinstance(answer, NotYet):
                return answer
            if time.monotonic() >= deadline:
                raise WaitTimeoutError.of(f"{what} from the agent at {self.identity.socket}", timeout)

    def fill_begun(self, message: FillBegun) -> None:
        """Tell the agent that a version is being filled; from now on only this version's notices are repeated."""
        with self._changed:
            self._fill, self._staged, self._sealed = message, None, None
            self._send(message)

    def staged(self, message: Staged) -> None:
        """Tell the agent how far staging is."""
        with self._changed:
            self._staged = message
            self._send(message)

    def sealed(self, message: Sealed) -> None:
        """Tell the agent that the version is sealed."""
        with self._changed:
            self._sealed = message
            self._send(message)

    def close(self) -> None:
        """End the connection and its thread. The pages must not be used afterwards."""
        with self._changed:
            self._closing = True
            self._drop()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_HELLO_TIMEOUT_S)
        if self._pages is not None:
            for page in self._pages:
                page.release()
            self._pages = None
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()

    def _ask_once(self, request: Message, deadline: float) -> AgentMessage | None:
        reply = _Reply()
        with self._changed:
            self._changed.wait_for(
                lambda: self._socket is not None or self._refused is not None, max(0.0, deadline - time.monotonic())
            )
            if self._refused is not None:
                raise self._refused
            request_id, self._next_id = self._next_id, self._next_id + 1
            self._pending[request_id] = reply
            self._send(request.model_copy(update={"request_id": request_id}))
        reply.arrived.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._pending.pop(request_id, None)
        return reply.message

    def _send(self, message: Message) -> None:
        if self._socket is None:
            return
        data = encode_frame(message)
        try:
            # The loop must never wait for an agent that does not read; such an agent is as good as gone.
            sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            self._last_error = str(error)
            sent = 0
        if sent != len(data):
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                self._last_error = str(error)
            self._socket = None

    def _run(self) -> None:
        while not self._closing and self._refused is None:
            try:
                connection, decoder = self._connect()
            except (OSError, UnavailableError) as error:
                self._last_error = str(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _RETRY_S)
                continue
            except GeminiError as error:
                self._refuse(error)
                return
            with connection:
                self._read(connection, decoder)
            self._lose(connection)

    def _connect(self) -> tuple[socket.socket, FrameDecoder[AgentMessage]]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_HELLO_TIMEOUT_S)
            connection.connect(str(self.identity.socket))
            decoder = FrameDecoder(agent_messages)
            welcome = self._hello(connection, decoder)
            job, rank = SharedMapping(Path(welcome.job_page)), SharedMapping(Path(welcome.rank_page))
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        with self._changed:
            self._mappings += [job, rank]
            # Pages of an earlier life stay mapped: another thread may be reading them.
            self._pages = (JobPage(job.view), RankPage(rank.view))
            self._checkpoint_interval_steps = welcome.checkpoint_interval_steps
            self._socket = connection
            for notice in (self._fill, self._staged, self._sealed):
                if notice is not None:
                    self._send(notice)
            self._changed.notify_all()
        return connection, decoder

    def _hello(self, connection: socket.socket, decoder: FrameDecoder[AgentMessage]) -> RankWelcome:
        me = self.identity
        hello = RankHello(
            request_id=0,
            job_id=me.job_id,
            generation=me.generation,
            rank=me.rank,
            world_size=me.world_size,
            pid=os.getpid(),
        )
        connection.sendall(encode_frame(hello))
        while True:
            data = connection.recv(_READ_BYTES)
            if not data:
                raise UnavailableError(f"the agent at {me.socket} closed the connection before it answered the hello")
            for frame in decoder.feed(data):
                match frame.message:
                    case RankWelcome() as welcome:
                        return welcome
                    case Failed(error=error):
                        raise from_wire(error)
                    case other:
                        raise ProtocolError(f"the agent answered the hello with {other.kind}")

    def _read(self, connection: socket.socket, decoder: FrameDecoder[AgentMessage]) -> None:
        try:
            while data := connection.recv(_READ_BYTES):
                for frame in decoder.feed(data):
                    self._dispatch(frame.message)
        except OSError as error:
            self._last_error = str(error)
        except ProtocolError as error:
            logger.warning("connection to the agent given up: %s", error)
            self._last_error = str(error)

    def _dispatch(self, message: AgentMessage) -> None:
        with self._changed:
            reply = self._pending.get(message.request_id)
        if reply is not None:
            reply.message = message
            reply.arrived.set()
        elif isinstance(message, Failed):
            error = from_wire(message.error)
            logger.warning("the agent refused a notice: %s", error)
            if isinstance(error, FencedError):
                self._refuse(error)

    def _refuse(self, error: GeminiError) -> None:
        with self._changed:
            self._refused = error
            self._drop()
            self._changed.notify_all()

    def _lose(self, connection: socket.socket) -> None:
        with self._changed:
            if self._socket is connection:
                self._socket = None
            pending, self._pending = self._pending, {}
        for reply in pending.values():
            reply.arrived.set()
        if not self._closing:
            logger.warning("rank %d lost its agent at %s; training goes on", self.identity.rank, self.identity.socket)
