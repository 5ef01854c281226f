"""What every embedded server promises."""

from typing import Protocol


class LocalServer(Protocol):
    """A server on a loopback port, with its data and generated secrets in one directory.

    The port stays the same over `stop`/`kill` and `start` of one object, and so does the data.
    """

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def start(self) -> None:
        """Return when clients can connect.

        Raises ConfigurationError if its binary is missing, WaitTimeoutError or UnavailableError if it
        does not come up.
        """

    def stop(self) -> None:
        """End it cleanly and leave nothing behind but its directory; harmless when it is not running."""

    def kill(self) -> None:
        """SIGKILL it with all its processes, as a crash would; `start` brings it back with its data."""
