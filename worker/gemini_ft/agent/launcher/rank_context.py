"""The ranks of one generation on this node, as torch elastic sees them."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gemini_ft.agent.launcher.entry import RankOrder
from gemini_ft.agent.launcher.rank_process import RankProcess, RankStarter

__all__ = ["RankContext", "RankLogs", "log_tail"]

_KILL_TIMEOUT_S = 10.0
_KILL_POLL_S = 0.002
_TAIL_BYTES = 4096

logger = logging.getLogger(__name__)


class RankLogs(LogsSpecs):
    """One file per rank and generation for both streams: `<log_dir>/generation-<g>/rank-<r>.log`.

    `tee_local_ranks` are shown on the launcher's standard output as well.
    """

    def __init__(self, log_dir: Path, tee_local_ranks: frozenset[int] = frozenset()) -> None:
        super().__init__(str(log_dir))
        self._log_dir = log_dir
        self._tee_local_ranks = tee_local_ranks

    @property
    def root_log_dir(self) -> str:
        """See LogsSpecs."""
        return str(self._log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See LogsSpecs. Also tells each rank where torch's `record` decorator may leave an error."""
        dest = LogsDest()
        for local_rank, env in envs.items():
            folder = self._log_dir / f"generation-{env['GEMINI_FT_GENERATION']}"
            folder.mkdir(parents=True, exist_ok=True)
            stem = folder / f"rank-{env['RANK']}"
            dest.stdouts[local_rank] = dest.stderrs[local_rank] = f"{stem}.log"
            dest.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = f"{stem}.error.json"
            if local_rank in self._tee_local_ranks:
                dest.tee_stdouts[local_rank] = f"{stem}.log"
        return dest


class RankContext(PContext):
    """See PContext. Ranks come from a RankStarter and are only ever stopped by SIGKILL.

    A rank that is stopped belongs to a fenced generation: nothing that it could still save is wanted, and it may be
    blocked in a collective or ignore signals.
    """

    def __init__(
        self, starter: RankStarter, template: RankOrder, envs: dict[int, dict[str, str]], logs: RankLogs
    ) -> None:
        # torch wants an entry point and arguments here; what is run is in the orders.
        super().__init__("rank", template.target, dict.fromkeys(envs, ()), envs, logs)
        self._starter = starter
        self._template = template
        self._ranks: dict[int, RankProcess] = {}
        self.ended: dict[int, int] = {}
        """Exit codes of ranks that ended by themselves, by local rank, as of the last look."""

    def is_over(self) -> bool:
        """Return whether torch's next look will end this generation here: a rank has failed, or all have ended."""
        codes = self._exit_codes()
        return any(codes.values()) or len(codes) == self.nprocs

    def pids(self) -> dict[int, int]:
        """See PContext."""
        return {local_rank: rank.pid for local_rank, rank in self._ranks.items()}

    def _start(self) -> None:
        for local_rank, env in self.envs.items():
            order = RankOrder(
                target=self._template.target,
                is_module=self._template.is_module,
                arguments=self._template.arguments,
                environ={**os.environ, **env},
                log_path=self.stdouts[local_rank],
                work_dir=self._template.work_dir,
            )
            self._ranks[local_rank] = self._starter.start(order)

    def _exit_codes(self) -> dict[int, int]:
        codes = {local_rank: rank.poll() for local_rank, rank in self._ranks.items()}
        return {local_rank: code for local_rank, code in codes.items() if code is not None}

    def _poll(self) -> RunProcsResult | None:
        codes = self.ended = self._exit_codes()
        failed = {local_rank: code for local_rank, code in codes.items() if code != 0}
        if not failed and len(codes) < self.nprocs:
            return None
        failures = {local_rank: self._failure(local_rank, code) for local_rank, code in failed.items()}
        self.close()
        return RunProcsResult(dict.fromkeys(codes, 0), failures, self.stdouts, self.stderrs)

    def _failure(self, local_rank: int, code: int) -> ProcessFailure:
        failure = ProcessFailure(local_rank, self._ranks[local_rank].pid, code, self.error_files[local_rank])
        path = self.stdouts[local_rank]
        failure.message = f"exit code {code}; the end of {path}:\n{log_tail(Path(path))}"
        return failure

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        for rank in self._ranks.values():
            rank.kill()
        while len(self._exit_codes()) < len(self._ranks):
            if time.monotonic() > deadline:
                logger.error("ranks %s did not die of SIGKILL in %g s", self.pids(), _KILL_TIMEOUT_S)
                return
            time.sleep(_KILL_POLL_S)


def log_tail(path: Path, num_bytes: int = _TAIL_BYTES) -> str:
    """Return the last whole lines of a log, at most `num_bytes` of them."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - num_bytes))
            tail = log.read()
    except FileNotFoundError:
        return "(no log)"
    if size > num_bytes:
        tail = tail.partition(b"\n")[2]
    return tail.decode(errors="replace").rstrip() or "(empty)"
