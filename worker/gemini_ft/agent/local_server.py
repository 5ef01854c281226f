"""The node's Unix socket: frames in and out, one connection a rank or launcher.

Messages of one connection are handled in their order; only requests that park run beside the others. The handler
decides what may be asked by whom.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Coroutine
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from gemini_ft.contracts.errors import ConfigurationError, FencedError, GeminiError, ProtocolError, UnavailableError
from gemini_ft.contracts.frames import FrameDecoder, encode_frame
from gemini_ft.contracts.local_protocol import (
    AgentMessage,
    ClientMessage,
    Failed,
    FillBegun,
    NextAssignment,
    Reserve,
    Restore,
    Sealed,
    Staged,
    StoreAddress,
    client_messages,
)

__all__ = ["Client", "LocalHandler", "LocalServer", "Notice", "default_socket_path"]

Notice = FillBegun | Staged | Sealed

MAX_SOCKET_PATH_BYTES = 107
_READ_BYTES = 1 << 16
_MAX_CLIENTS = 4096
_MAX_PARKED = 16
_MAX_UNSENT_BYTES = 1 << 20
_MAX_TIMEOUT_S = 3600.0
_CLOSE_TIMEOUT_S = 2.0
_PEER_CREDENTIALS = struct.Struct("3i")

logger = logging.getLogger(__name__)


class Client:
    """One connection. `pid` is the kernel's word for who is at the other end."""

    def __init__(self, pid: int, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.name = f"process {pid}"
        """For logs; the handler puts in more when it knows more."""
        self._writer = writer
        self._parked: set[asyncio.Task[None]] = set()

    def send(self, message: AgentMessage) -> None:
        """Send a message; a client that does not read is cut off."""
        if self._writer.is_closing():
            return
        self._writer.write(encode_frame(message))
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            logger.warning("%s does not read its answers and is cut off", self.name)
            self._writer.transport.abort()

    def close(self) -> None:
        """Close the connection and give up its parked requests."""
        for task in self._parked:
            task.cancel()
        self._writer.close()

    def park(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a request beside the others; raises ProtocolError when too many are open."""
        if len(self._parked) >= _MAX_PARKED:
            work.close()
            raise ProtocolError(f"more than {_MAX_PARKED} requests are open at once")
        task = asyncio.create_task(work)
        self._parked.add(task)
        task.add_done_callback(self._unpark)

    def _unpark(self, task: asyncio.Task[None]) -> None:
        self._parked.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request of %s failed", self.name, exc_info=error)
            self.close()


class LocalHandler(Protocol):
    """What the server serves."""

    async def answer(self, client: Client, message: ClientMessage) -> AgentMessage:
        """Answer a request. A ProtocolError closes the connection, any other GeminiError is sent as Failed."""

    def take(self, client: Client, message: Notice) -> None:
        """Take a message that has no answer; a GeminiError closes the connection."""

    def gone(self, client: Client) -> None:
        """The connection has ended."""


class LocalServer:
    """Serves the socket at `path`, to processes of this user only."""

    def __init__(self, path: Path, handler: LocalHandler) -> None:
        self.path = path
        self._handler = handler
        self._clients: dict[Client, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to listen; a socket that a former life left is replaced.

        Raises:
            ConfigurationError: nothing can listen at this path.
        """
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigurationError(
                f"the socket path {self.path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes that Linux allows; "
                "give a shorter one with --socket"
            )
        try:
            _make_private_folder(self.path.parent)
            self.path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(os.fsencode(self.path))
            # Before it listens, so that nobody else can have connected.
            self.path.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._serve, sock=listener)
        except OSError as error:
            raise ConfigurationError(f"the agent cannot listen at {self.path}: {error.strerror}") from error

    async def close(self) -> None:
        """End all connections and remove the socket."""
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.close()
        if self._clients:
            await asyncio.wait(self._clients.values(), timeout=_CLOSE_TIMEOUT_S)
        if self._server is not None:
            await self._server.wait_closed()
            self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        pid, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
        client = Client(pid, writer)
        if uid != os.getuid() or len(self._clients) >= _MAX_CLIENTS:
            logger.warning("refused %s of user %d", client.name, uid)
            writer.close()
            return
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        self._clients[client] = task
        try:
            await self._read(client, reader)
        except FencedError as error:
            logger.info("%s was cut off: %s", client.name, error)
        except GeminiError as error:
            logger.warning("%s was cut off: %s", client.name, error)
        except ConnectionError as error:
            logger.debug("%s hung up: %s", client.name, error)
        finally:
            del self._clients[client]
            client.close()
            self._handler.gone(client)
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _read(self, client: Client, reader: asyncio.StreamReader) -> None:
        decoder: FrameDecoder[ClientMessage] = FrameDecoder(client_messages)
        while data := await reader.read(_READ_BYTES):
            for frame in decoder.feed(data):
                message = frame.message
                if frame.payload:
                    raise ProtocolError(f"a {message.kind} message came with {len(frame.payload)} bytes of payload")
                if isinstance(message, FillBegun | Staged | Sealed):
                    self._handler.take(client, message)
                elif isinstance(message, NextAssignment | StoreAddress | Reserve | Restore):
                    if not (math.isfinite(message.timeout_s) and 0 <= message.timeout_s <= _MAX_TIMEOUT_S):
                        raise ProtocolError(f"a {message.kind} message has the time limit {message.timeout_s} s")
                    client.park(self._answer_parked(client, message))
                else:
                    await self._answer(client, message, message.request_id)
        if decoder.num_pending_bytes:
            raise ProtocolError(f"the stream ended inside a frame, after {decoder.num_pending_bytes} bytes of it")

    async def _answer_parked(self, client: Client, message: NextAssignment | StoreAddress | Reserve | Restore) -> None:
        try:
            await self._answer(client, message, message.request_id)
        except ProtocolError as error:
            logger.warning("%s was cut off: %s", client.name, error)
            client.close()

    async def _answer(self, client: Client, message: ClientMessage, request_id: int) -> None:
        try:
            client.send(await self._handler.answer(client, message))
        except ProtocolError:
            raise
        except GeminiError as error:
            logger.info("refused %s of %s: %s", message.kind, client.name, error)
            client.send(Failed(request_id=request_id, error=error.to_wire()))
        except OSError as error:
            logger.error("%s of %s failed", message.kind, client.name, exc_info=error)
            failure = UnavailableError(f"the agent cannot carry out {message.kind}: {error}")
            client.send(Failed(request_id=request_id, error=failure.to_wire()))


def default_socket_path(state_dir: Path) -> Path:
    """Return where the agent of `state_dir` listens: in it, or in a short private folder when the path is too long."""
    path = state_dir.absolute() / "run" / "agent.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    name = sha256(os.fsencode(state_dir.absolute())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"gemini-ft-{os.getuid()}-{name}" / "agent.sock"


def _make_private_folder(path: Path) -> None:
    """Make a folder that only this user enters; raises ConfigurationError if one is there that others enter or own."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(
            f"{path} is not a private folder of this user, so others could pose as the agent; "
            "chmod it to 0700 or give another --socket"
        )
