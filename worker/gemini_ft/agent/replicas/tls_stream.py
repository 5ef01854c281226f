"""The bytes of one TLS connection over a non-blocking socket. One task may send while another receives."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeVar

__all__ = ["TlsStream"]

T = TypeVar("T")


class TlsStream:
    """Does for an SSLSocket what the event loop does for a plain one; raises OSError, of which SSLError is one."""

    def __init__(self, sock: ssl.SSLSocket, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        self._loop = loop
        # Either task may have to wait for either direction, but the loop takes one callback for each.
        self._readable: list[asyncio.Future[None]] = []
        self._writable: list[asyncio.Future[None]] = []

    async def handshake(self) -> bytes:
        """Shake hands and return the peer's certificate in DER."""
        await self._repeat(self._sock.do_handshake)
        return self._sock.getpeercert(binary_form=True) or b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`."""
        view = memoryview(data)
        while view:
            view = view[await self._repeat(self._sock.send, view) :]

    async def receive_into(self, view: memoryview) -> int:
        """Wait for data, then take what is here and fits; 0 at the end of the stream."""
        num_received = await self._repeat(self._sock.recv_into, view)
        try:
            # One call gives one record, which is small.
            while num_received < len(view) and (more := self._sock.recv_into(view[num_received:])):
                num_received += more
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        return num_received

    async def readable(self) -> None:
        """Return when the peer has sent something or has gone."""
        if not self._sock.pending():
            await self._until_readable()

    async def _repeat(self, call: Callable[..., T], *arguments: memoryview) -> T:
        while True:
            try:
                return call(*arguments)
            except ssl.SSLWantReadError:
                await self._until_readable()
            except ssl.SSLWantWriteError:
                await self._until_writable()

    async def _until_readable(self) -> None:
        if not self._readable:
            self._loop.add_reader(self._sock, _wake, self._readable)
        try:
            await self._one_more(self._readable)
        finally:
            if not self._readable:
                self._loop.remove_reader(self._sock)

    async def _until_writable(self) -> None:
        if not self._writable:
            self._loop.add_writer(self._sock, _wake, self._writable)
        try:
            await self._one_more(self._writable)
        finally:
            if not self._writable:
                self._loop.remove_writer(self._sock)

    async def _one_more(self, waiting: list[asyncio.Future[None]]) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        waiting.append(ready)
        try:
            await ready
        finally:
            waiting.remove(ready)


def _wake(waiting: list[asyncio.Future[None]]) -> None:
    for ready in waiting:
        if not ready.done():
            ready.set_result(None)
