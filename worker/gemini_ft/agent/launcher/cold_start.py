"""Ranks started as fresh interpreters: slower, and nothing of one life is left for the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from gemini_ft.agent.launcher.entry import RankOrder, become_rank, run_target

__all__ = ["ColdRank", "ColdStarter"]

_KILL_TIMEOUT_S = 10.0


class ColdRank:
    """A rank in an interpreter of its own."""

    def __init__(self, order: RankOrder) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid())], stdin=subprocess.PIPE, text=True, env=order.environ
        )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(order.to_json())
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """See RankProcess."""
        if self._process.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            # It still holds its pid, so the group that it leaves behind cannot be a stranger's.
            self._kill_group()
        return self._process.poll()

    def kill(self) -> None:
        """See RankProcess."""
        if self.poll() is None:
            self._kill_group()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # It leads no group yet.
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for the end of a killed rank."""
        self._process.wait(_KILL_TIMEOUT_S)


class ColdStarter:
    """See RankStarter."""

    wants_report = False
    """See RankStarter: nothing is preloaded."""

    def __init__(self) -> None:
        self._ranks: list[ColdRank] = []

    def start(self, order: RankOrder) -> ColdRank:
        """See RankStarter."""
        self._ranks = [rank for rank in self._ranks if rank.poll() is None]
        self._ranks.append(ColdRank(order))
        return self._ranks[-1]

    def poll(self) -> None:
        """See RankStarter."""

    def wait(self, timeout_s: float) -> None:
        """See RankStarter."""
        time.sleep(timeout_s)

    def close(self) -> None:
        """See RankStarter."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
        for rank in self._ranks:
            rank.wait()


if __name__ == "__main__":
    rank_order = RankOrder.from_json(sys.stdin.read())
    if not sys.flags.safe_path:
        del sys.path[0]
    become_rank(rank_order, int(sys.argv[1]))
    run_target(rank_order)
