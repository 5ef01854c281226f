"""How ranks are started: the interface of `warm_server.py` and `cold_start.py`."""

from __future__ import annotations

from typing import Protocol

from gemini_ft.agent.launcher.entry import RankOrder

__all__ = ["RankProcess", "RankStarter"]


class RankProcess(Protocol):
    """One started rank."""

    @property
    def pid(self) -> int:
        """Its process id, for as long as `poll` returns None."""
        ...

    def poll(self) -> int | None:
        """Return its exit code (-n: by signal n), or None while it runs. Never waits."""
        ...

    def kill(self) -> None:
        """SIGKILL it and everything in its process group. No effect on a rank that has ended."""
        ...


class RankStarter(Protocol):
    """Starts ranks, one at a time, from the launcher's main thread."""

    def start(self, order: RankOrder) -> RankProcess:
        """Start a rank.

        Raises:
            WaitTimeoutError: the process that starts ranks did not answer.
        """
        ...

    @property
    def wants_report(self) -> bool:
        """Whether a rank that is started now should report its imports, which costs it a tenth of a second."""
        ...

    def poll(self) -> None:
        """Do what is due in the background; called at every turn of the monitor loop. Never waits."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until a rank may have ended, at most `timeout_s`."""
        ...

    def close(self) -> None:
        """SIGKILL whatever was started and still lives."""
        ...
