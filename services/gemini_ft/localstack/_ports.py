"""A loopback port that stays ours while no server listens on it."""

import socket

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """A free port, held by a bound socket that never listens.

    A server that sets SO_REUSEADDR, as NATS and Postgres do, can listen on it all the same; clients are
    refused in between. So nobody else is handed the port before the first start or during a restart.
    """

    def __init__(self, port: int = 0, host: str = LOOPBACK) -> None:
        """Reserve `port` of `host`, or one that the kernel picks when it is 0. Raises OSError if it is taken."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]
        self.address = f"{host}:{self.number}"

    def release(self) -> None:
        self._socket.close()
