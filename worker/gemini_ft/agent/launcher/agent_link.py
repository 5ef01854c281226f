"""The launcher's line to its agent: a Unix socket that is opened again whenever it is lost, and the job page."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from gemini_ft.agent.launcher.assignments import Assignment
from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, JobPage
from gemini_ft.contracts.errors import (
    ConfigurationError,
    GeminiError,
    JobClosedError,
    ProtocolError,
    UnavailableError,
    WaitTimeoutError,
    from_wire,
)
from gemini_ft.contracts.frames import Frame, FrameDecoder, encode_frame
from gemini_ft.contracts.local_protocol import (
    AgentMessage,
    AssignmentReply,
    ClientMessage,
    Failed,
    Finished,
    LauncherHello,
    LauncherWelcome,
    NextAssignment,
    NotYet,
    PublishStore,
    StoreAddress,
    StoreAddressReply,
    WorkersExited,
    WorkersStarted,
    agent_messages,
)

__all__ = ["SocketAgentLink"]

_IO_TIMEOUT_S = 1.0
_RECONNECT_S = 0.1
_PARK_S = 10.0
_MAX_DETAIL_CHARS = 8192

_News = PublishStore | WorkersStarted | WorkersExited | Finished

logger = logging.getLogger(__name__)


class SocketAgentLink:
    """See AgentLink. One thread of its own connects and reads; callers write.

    What is told is kept until the agent has acknowledged it, and is sent again, in order, to a restarted agent,
    after a hello that names the running ranks.

    Raises:
        UnavailableError: no agent answered at `path` within `connect_timeout`.
        GeminiError: the agent refused this launcher.
    """

    def __init__(
        self,
        path: str,
        job_id: str,
        num_local_ranks: int,
        connect_timeout: timedelta = timedelta(seconds=20),
    ) -> None:
        if len(os.fsencode(path)) > 107:
            raise ConfigurationError(f"the agent socket's path {path} is longer than the 107 bytes that Linux allows")
        self._path = path
        self._job_id = job_id
        self._num_local_ranks = num_local_ranks
        self._request_ids = itertools.count(1)
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._refused: GeminiError | None = None
        self._closed: JobClosedError | None = None
        self._page: JobPage | None = None
        self._newest_seen = 0
        self._running: tuple[int, dict[int, int]] = (0, {})
        self._replies: dict[int, AgentMessage | None] = {}
        self._untold: dict[int, _News] = {}
        self._is_hung_up = False
        self._thread = threading.Thread(target=self._run, name="agent-link", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._socket or self._refused, connect_timeout.total_seconds())
            refused, is_connected = self._refused, self._socket is not None
        if refused is not None or not is_connected:
            self.close(timedelta())
            raise refused or UnavailableError(
                f"no agent answers at {path} (waited {connect_timeout.total_seconds():g} s); "
                "start the node's agent, or correct --agent-socket"
            )

    def next_assignment(self, after_generation: int, timeout: timedelta) -> Assignment:
        """See AgentLink."""
        reply = self._ask(
            lambda request_id, park_s: NextAssignment(
                request_id=request_id, after_generation=after_generation, timeout_s=park_s
            ),
            f"an assignment above generation {after_generation} of job {self._job_id}",
            timeout,
        )
        if not isinstance(reply, AssignmentReply):
            raise ProtocolError(f"the agent answered a {reply.kind} where an assignment was asked for")
        self._newest_seen = max(self._newest_seen, reply.generation)
        return Assignment(reply.generation, reply.slot, reply.num_slots, reply.host)

    def ordered_generation(self) -> int:
        """See AgentLink."""
        page = self._page
        return max(self._newest_seen, page.ordered_generation if page else 0)

    def is_closed(self) -> bool:
        """See AgentLink."""
        page = self._page
        return self._closed is not None or (page is not None and page.closed)

    def publish_store(self, generation: int, host: str, port: int) -> None:
        """See AgentLink."""
        self._tell(lambda i: PublishStore(request_id=i, generation=generation, host=host, port=port))

    def store_address(self, generation: int, timeout: timedelta) -> tuple[str, int]:
        """See AgentLink."""
        reply = self._ask(
            lambda request_id, park_s: StoreAddress(request_id=request_id, generation=generation, timeout_s=park_s),
            f"slot 0 to publish the store of generation {generation}",
            timeout,
        )
        if not isinstance(reply, StoreAddressReply):
            raise ProtocolError(f"the agent answered a {reply.kind} where a store's address was asked for")
        return reply.host, reply.port

    def workers_started(self, generation: int, pids: Mapping[int, int]) -> None:
        """See AgentLink."""
        self._running = (generation, dict(pids))
        self._tell(lambda i: WorkersStarted(request_id=i, generation=generation, pids=dict(pids)))

    def workers_exited(self, generation: int, exits: Mapping[int, int], detail: str = "") -> None:
        """See AgentLink."""
        pids = self._running[1]
        self._running = (generation, {rank: pid for rank, pid in pids.items() if rank not in exits})
        self._tell(
            lambda i: WorkersExited(
                request_id=i, generation=generation, exit_codes=dict(exits), detail=detail[-_MAX_DETAIL_CHARS:]
            )
        )

    def finished(self, generation: int) -> None:
        """See AgentLink."""
        self._tell(lambda i: Finished(request_id=i, generation=generation))

    def close(self, timeout: timedelta) -> None:
        """See AgentLink."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._untold, timeout.total_seconds()):
                logger.warning("hanging up with %d messages that the agent did not take", len(self._untold))
            self._is_hung_up = True
            if self._socket is not None:
                _hang_up(self._socket)
            self._changed.notify_all()
        self._thread.join()

    def _tell(self, make: Callable[[int], _News]) -> None:
        with self._changed:
            message = make(next(self._request_ids))
            self._untold[message.request_id] = message
            if self._socket is not None:
                self._send(message)

    def _ask(self, make: Callable[[int, float], ClientMessage], what: str, timeout: timedelta) -> AgentMessage:
        deadline = time.monotonic() + timeout.total_seconds()
        while (remaining_s := deadline - time.monotonic()) > 0:
            reply = self._ask_once(make, remaining_s)
            if isinstance(reply, Failed):
                raise self._noted(from_wire(reply.error))
            if reply is not None and not isinstance(reply, NotYet):
                return reply
        if self.is_closed():
            raise JobClosedError(f"job {self._job_id} has ended, and its agent no longer says how")
        raise WaitTimeoutError.of(what, timeout)

    def _ask_once(self, make: Callable[[int, float], ClientMessage], remaining_s: float) -> AgentMessage | None:
        park_s = min(remaining_s, _PARK_S)
        with self._changed:
            self._changed.wait_for(lambda: self._socket or self._closed or self._refused, park_s)
            if refusal := self._closed or self._refused:
                raise refusal
            if self._socket is None:
                return None
            request_id = next(self._request_ids)
            self._replies[request_id] = None
            self._send(make(request_id, park_s))
            # The agent answers at the end of park_s; a little more tells silence from a late answer.
            self._changed.wait_for(lambda: self._is_answered(request_id), park_s + _IO_TIMEOUT_S)
            return self._replies.pop(request_id, None)

    def _is_answered(self, request_id: int) -> bool:
        # A lost connection takes its open requests out of the table, so that they are asked again.
        return request_id not in self._replies or self._replies[request_id] is not None

    def _noted(self, error: GeminiError) -> GeminiError:
        if isinstance(error, JobClosedError):
            self._closed = error
        return error

    def _send(self, message: ClientMessage) -> None:
        """Send on the open socket, which the reader opens again if that fails."""
        assert self._socket is not None
        try:
            self._socket.sendall(encode_frame(message))
        except OSError as error:
            logger.debug("the agent's connection broke: %s", error)
            _hang_up(self._socket)

    def _run(self) -> None:
        was_welcome = False
        while not self._is_hung_up:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.settimeout(_IO_TIMEOUT_S)
                    sock.connect(self._path)
                    decoder: FrameDecoder[AgentMessage] = FrameDecoder(agent_messages)
                    self._greet(sock, decoder)
                    was_welcome = True
                    self._read(sock, decoder)
            except OSError as error:
                logger.debug("the agent at %s is away: %s", self._path, error)
            except GeminiError as error:
                self._noted(error)
                if was_welcome:
                    logger.warning("the agent refused this launcher: %s", error)
                else:
                    self._refused = error
            with self._changed:
                self._socket = None
                self._replies.clear()
                self._changed.notify_all()
                if self._refused or self._closed:
                    return
                self._changed.wait_for(lambda: self._is_hung_up, _RECONNECT_S)

    def _greet(self, sock: socket.socket, decoder: FrameDecoder[AgentMessage]) -> None:
        generation, pids = self._running
        hello = LauncherHello(
            request_id=0,
            job_id=self._job_id,
            pid=os.getpid(),
            num_local_ranks=self._num_local_ranks,
            generation=generation if pids else 0,
            worker_pids=pids,
        )
        sock.sendall(encode_frame(hello))
        frames: list[Frame[AgentMessage]] = []
        while not frames:
            data = sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the agent hung up at the hello")
            frames = decoder.feed(data)
        welcome = frames[0].message
        if isinstance(welcome, Failed):
            raise from_wire(welcome.error)
        if not isinstance(welcome, LauncherWelcome):
            raise ProtocolError(f"the agent answered a {welcome.kind} to the hello")
        self._page = _map_page(Path(welcome.job_page))
        with self._changed:
            self._socket = sock
            for message in self._untold.values():
                self._send(message)
            self._changed.notify_all()

    def _read(self, sock: socket.socket, decoder: FrameDecoder[AgentMessage]) -> None:
        while True:
            try:
                data = sock.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                return
            for frame in decoder.feed(data):
                self._take(frame.message)

    def _take(self, reply: AgentMessage) -> None:
        with self._changed:
            if self._untold.pop(reply.request_id, None) is None:
                if reply.request_id in self._replies:
                    self._replies[reply.request_id] = reply
            elif isinstance(reply, Failed):
                # Mostly news of a generation that was fenced meanwhile.
                logger.info("the agent refused what it was told: %s", self._noted(from_wire(reply.error)))
            self._changed.notify_all()


def _hang_up(sock: socket.socket) -> None:
    # The peer may have hung up first; either way the reader sees the end.
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _map_page(path: Path) -> JobPage:
    with path.open("rb") as file:
        return JobPage(memoryview(mmap.mmap(file.fileno(), CONTROL_PAGE_BYTES, prot=mmap.PROT_READ)))
