"""One framed connection of the data plane over a non-blocking socket.

Payloads go from and to memory of the caller without a copy in between; TLS, where it is used, makes its own. Every
error names the peer and its address. A read or write that makes no progress within the progress timeout raises; only
the wait for the first byte of a request is without limit, because a peer may have nothing to say.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

from pydantic import TypeAdapter

from gemini_ft.agent.replicas.tls import PeerTls
from gemini_ft.agent.replicas.tls_stream import TlsStream
from gemini_ft.contracts.errors import (
    AuthenticationError,
    GeminiError,
    ProtocolError,
    UnavailableError,
    WaitTimeoutError,
)
from gemini_ft.contracts.frames import HEADER_BYTES, Message, encode_frame, parse_body, parse_header

__all__ = ["Connection", "connect"]

M = TypeVar("M")
Bytes = bytes | bytearray | memoryview

_PIECE_BYTES = 1 << 20
_SMALL_PAYLOAD_BYTES = 1 << 15
_KEEPALIVE_INTERVAL_S = 5
_NUM_KEEPALIVE_PROBES = 3


class Connection:
    """Sends and receives frames; one task may send while another receives."""

    def __init__(self, sock: socket.socket, peer: str, progress_timeout: timedelta, keepalive_idle: timedelta) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(keepalive_idle.total_seconds())))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVE_PROBES)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._tls: TlsStream | None = None
        self._send_all: Callable[[Bytes], Awaitable[None]] = partial(self._loop.sock_sendall, sock)
        self._receive: Callable[[memoryview], Awaitable[int]] = partial(self._loop.sock_recv_into, sock)
        self._timeout_s = progress_timeout.total_seconds()
        self._head = bytearray(HEADER_BYTES)
        self.peer = peer
        self.node_id = ""
        """Node at the other end, once the challenge is passed."""
        self.binding = ""
        """What both ends know of this connection's encryption, for the challenge; empty without any."""

    async def secure(self, tls: PeerTls, *, is_server: bool) -> None:
        """Encrypt the connection before anything else is sent on it; the caller bounds the time.

        Raises:
            AuthenticationError: the peer does not speak TLS, or has no certificate of the cluster.
            UnavailableError: the connection is lost.
        """
        try:
            self._sock = sock = tls.wrap(self._sock, is_server=is_server)
            self._tls = TlsStream(sock, self._loop)
            certificate = await self._tls.handshake()
        except ssl.SSLError as error:
            raise AuthenticationError(
                f"{self.peer} does not pass TLS: {_reason(error)}; "
                "all agents of a cluster need certificates that --tls-ca-file has signed",
                peer=self.peer,
            ) from error
        except OSError as error:
            raise UnavailableError(f"{self.peer}: {error}", peer=self.peer) from error
        self._send_all, self._receive = self._tls.send_all, self._tls.receive_into
        self.binding = tls.binding(certificate, is_server=is_server)

    async def send(self, message: Message, payload: Bytes = b"") -> None:
        """Send one frame.

        Raises:
            UnavailableError: the connection is lost.
            WaitTimeoutError: the peer takes nothing in.
        """
        head = encode_frame(message, len(payload))
        # One segment for a small frame; a large payload is never copied.
        if len(payload) <= _SMALL_PAYLOAD_BYTES:
            head, payload = head + payload, b""
        with self._errors():
            async with asyncio.timeout(self._timeout_s) as deadline:
                await self._send_all(head)
                view = memoryview(payload)
                for start in range(0, len(view), _PIECE_BYTES):
                    deadline.reschedule(self._loop.time() + self._timeout_s)
                    await self._send_all(view[start : start + _PIECE_BYTES])

    async def receive(
        self, messages: TypeAdapter[M], *, max_frame_bytes: int | None = None, may_idle: bool = False
    ) -> tuple[M, int]:
        """Receive header and body; return the message and the size of the payload, which the caller takes next.

        Args:
            messages: what is accepted.
            max_frame_bytes: limit on body and payload together, checked before either is read.
            may_idle: wait for the first byte without limit.

        Raises:
            ProtocolError: what came is not an accepted frame.
            UnavailableError: the connection is lost.
            WaitTimeoutError: no progress.
        """
        head = memoryview(self._head)
        num_received = 0
        with self._errors():
            if may_idle:
                num_received = await self._receive_some(head)
            await self._receive_into(head[num_received:])
            header = parse_header(self._head)
            if max_frame_bytes is not None and header.body_bytes + header.payload_bytes > max_frame_bytes:
                raise ProtocolError(
                    f"a frame announces {header.body_bytes} + {header.payload_bytes} bytes, "
                    f"where at most {max_frame_bytes} are taken"
                )
            body = bytearray(header.body_bytes)
            await self._receive_into(memoryview(body))
            return parse_body(header, body, messages), header.payload_bytes

    async def receive_payload(self, into: memoryview) -> None:
        """Receive a payload straight into `into`, which has its size; raises as `receive`."""
        with self._errors():
            await self._receive_into(into)

    async def discard_payload(self, payload_bytes: int) -> None:
        """Read a payload that nobody wants; raises as `receive`."""
        sink = memoryview(bytearray(min(payload_bytes, _PIECE_BYTES)))
        for start in range(0, payload_bytes, _PIECE_BYTES):
            await self.receive_payload(sink[: payload_bytes - start])

    async def readable(self) -> None:
        """Return when the peer has sent something or has gone. Nobody else may be receiving meanwhile."""
        if self._tls is not None:
            await self._tls.readable()
            return
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._sock, _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(self._sock)

    def close(self) -> None:
        """Close the socket. Tasks that were sending or receiving on it must have been cancelled."""
        if self._sock.fileno() >= 0:
            # Before the number of the file can be reused by another socket.
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    async def _receive_into(self, view: memoryview) -> None:
        if not view:
            return
        async with asyncio.timeout(self._timeout_s) as deadline:
            while True:
                view = view[await self._receive_some(view) :]
                if not view:
                    return
                deadline.reschedule(self._loop.time() + self._timeout_s)

    async def _receive_some(self, view: memoryview) -> int:
        num_received = await self._receive(view)
        if not num_received:
            raise UnavailableError("the connection was closed by the peer")
        return num_received

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise WaitTimeoutError.of(f"progress on the connection to {self.peer}", self._timeout_s) from None
        except ssl.SSLError as error:
            raise UnavailableError(f"{self.peer}: TLS failed: {_reason(error)}", peer=self.peer) from error
        except OSError as error:
            raise UnavailableError(f"{self.peer}: {error}", peer=self.peer) from error
        except GeminiError as error:
            raise type(error)(f"{self.peer}: {error}", **(error.facts | {"peer": self.peer})) from error


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).replace("_", " ").lower()


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def connect(
    host: str, port: int, who: str, connect_timeout: timedelta, progress_timeout: timedelta, keepalive_idle: timedelta
) -> Connection:
    """Open a connection to `who`; the challenge is still to come.

    Raises:
        UnavailableError: nobody listens there.
        WaitTimeoutError: no answer within `connect_timeout`.
    """
    loop = asyncio.get_running_loop()
    peer = f"{who} at {host}:{port}"
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(connect_timeout.total_seconds()):
            family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
        connection = Connection(sock, peer, progress_timeout, keepalive_idle)
        sock = None
        return connection
    except TimeoutError:
        raise WaitTimeoutError.of(f"a connection to {peer}", connect_timeout) from None
    except OSError as error:
        raise UnavailableError(f"{peer} cannot be reached: {error}", peer=peer) from error
    finally:
        if sock is not None:
            sock.close()
