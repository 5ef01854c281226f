"""A TCP proxy that can damage, hold and cut what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any
from urllib.parse import urlsplit

from gemini_ft.contracts.messages import Address

__all__ = ["TcpProxy", "proxy_of"]


class TcpProxy:
    """Forwards to `target` and meddles with one direction: toward the target, or toward the connecting side."""

    def __init__(self, target: Address, *, toward_client: bool = False) -> None:
        self._target = target
        self._toward_client = toward_client
        self._tasks: set[asyncio.Task[None]] = set()
        self.flip_at: int | None = None
        """Flip one bit of the byte at this offset of the next connection that gets so far, once."""
        self.cut_at: int | None = None
        """Cut a connection when so many bytes have passed, once."""
        self.hold = asyncio.Event()
        self.hold.set()
        """Cleared: nothing passes in either direction."""
        self.recorded: list[bytes] = []
        """What passed in the meddled direction, by connection."""
        self.num_connections = 0

    async def start(self) -> Address:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return Address(host="127.0.0.1", port=self._listener.getsockname()[1])

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        self.num_connections += 1
        upstream = socket.socket()
        task = self._run(self._serve(client, upstream))
        for end in (client, upstream):
            task.add_done_callback(lambda _, end=end: end.close())

    async def _serve(self, client: socket.socket, upstream: socket.socket) -> None:
        upstream.setblocking(False)
        pipes: list[asyncio.Task[None]] = []
        try:
            await asyncio.get_running_loop().sock_connect(upstream, (self._target.host, self._target.port))
            pipes = [
                asyncio.ensure_future(self._pipe(client, upstream, not self._toward_client)),
                asyncio.ensure_future(self._pipe(upstream, client, self._toward_client)),
            ]
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        except ConnectionRefusedError:
            return
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)

    async def _pipe(self, source: socket.socket, sink: socket.socket, meddled: bool) -> None:
        loop = asyncio.get_running_loop()
        offset = 0
        index = len(self.recorded)
        if meddled:
            self.recorded.append(b"")
        with contextlib.suppress(ConnectionError):
            while data := bytearray(await loop.sock_recv(source, 1 << 16)):
                await self.hold.wait()
                if meddled:
                    self.recorded[index] += bytes(data)
                    if self.flip_at is not None and offset <= self.flip_at < offset + len(data):
                        data[self.flip_at - offset] ^= 0x04
                        self.flip_at = None
                    if self.cut_at is not None and offset + len(data) > self.cut_at:
                        self.cut_at = None
                        return
                offset += len(data)
                await loop.sock_sendall(sink, data)


@contextlib.asynccontextmanager
async def proxy_of(url: str) -> AsyncIterator[tuple[TcpProxy, str]]:
    """A proxy of the server at `url` on this machine, and the URL by which the server is reached through it."""
    port = urlsplit(url).port
    assert port is not None
    proxy = TcpProxy(Address(host="127.0.0.1", port=port))
    address = await proxy.start()
    try:
        yield proxy, url.replace(f":{port}", f":{address.port}")
    finally:
        await proxy.close()
