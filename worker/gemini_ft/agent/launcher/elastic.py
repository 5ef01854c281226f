"""Torch elastic's local agent, with the decisions that are the coordinator's taken out.

Whether, when and as whom to start again is what the rendezvous says; here ranks are only started, watched and killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from gemini_ft.agent.launcher.entry import RankOrder
from gemini_ft.agent.launcher.rank_context import RankContext, RankLogs
from gemini_ft.agent.launcher.rank_process import RankStarter
from gemini_ft.agent.launcher.rendezvous import GeminiRendezvousHandler

__all__ = ["GeminiElasticAgent"]

_MONITOR_INTERVAL_S = 0.05
_LOOK_INTERVAL_S = 0.01
_FINISHED_KEY = "gemini_ft/finished"
_LEFT_KEY = "gemini_ft/left"
_LEAVE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class _SupersededError(Exception):
    """After this node's ranks had ended well, a newer generation was ordered or the job was closed."""


class GeminiElasticAgent(LocalElasticAgent):
    """See LocalElasticAgent.

    Args:
        handler: says which generation to run, and as whom.
        starter: starts the ranks.
        template: what each rank runs; environment and log path are filled in.
        learned_imports: file in which local rank 0 is to report its imports, or None.
        finish_timeout: longest wait for the other nodes once this node's ranks have ended well.
    """

    def __init__(
        self,
        handler: GeminiRendezvousHandler,
        starter: RankStarter,
        template: RankOrder,
        num_local_ranks: int,
        logs: RankLogs,
        learned_imports: Path | None = None,
        finish_timeout: timedelta = timedelta(hours=1),
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=num_local_ranks,
            rdzv_handler=handler,
            entrypoint=template.target,
            max_restarts=sys.maxsize,
            # torch sleeps through this; the interval proper is waited for in `_monitor_workers`, which wakes earlier.
            monitor_interval=0.001,
        )
        super().__init__(spec, logs, exit_barrier_timeout=finish_timeout.total_seconds())
        self._handler = handler
        self._starter = starter
        self._template = template
        self._logs = logs
        self._learned_imports = learned_imports
        self._context: RankContext | None = None
        self._reported: set[int] = set()

    def _invoke_run(self, role: str = "rank") -> RunResult:
        while True:
            try:
                return super()._invoke_run(role)
            except _SupersededError as superseded:
                logger.info("%s", superseded)

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        # Every node of a job has the same number of ranks, so torch's exchange through the store is not needed.
        num_local = spec.local_world_size
        return [
            Worker(
                local_rank=local_rank,
                global_rank=group_rank * num_local + local_rank,
                role_rank=group_rank * num_local + local_rank,
                world_size=group_world_size * num_local,
                role_world_size=group_world_size * num_local,
            )
            for local_rank in range(num_local)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        envs = {worker.local_rank: self._env(worker_group, worker) for worker in worker_group.workers}
        context = RankContext(self._starter, self._template, envs, self._logs)
        self._pcontext = self._context = context
        self._reported.clear()
        context.start()
        pids = context.pids()
        ranks = {worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers}
        generation = self._handler.generation
        self._handler.link.workers_started(generation, ranks)
        logger.info("generation %d: ranks run as %s", generation, ranks, extra={"generation": generation})
        return pids

    def _env(self, group: WorkerGroup, worker: Worker) -> dict[str, str]:
        env = {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": group.spec.role,
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            # A restart count that all nodes agree on, also one that was a standby until now.
            "TORCHELASTIC_RESTART_COUNT": str(self._handler.generation - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": self._handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "GEMINI_FT_GENERATION": str(self._handler.generation),
        }
        if self._learned_imports is not None and worker.local_rank == 0 and self._starter.wants_report:
            env["GEMINI_FT_LEARNED_IMPORTS"] = str(self._learned_imports)
        return env

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(signal.SIGKILL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait_for_news()
        result: RunResult = super()._monitor_workers(worker_group)
        self._report(worker_group, result)
        return result

    def _wait_for_news(self) -> None:
        """Wait for a rank's end or a newer generation, at most the monitor interval."""
        deadline = time.monotonic() + _MONITOR_INTERVAL_S
        self._starter.poll()
        while time.monotonic() < deadline:
            self._starter.wait(_LOOK_INTERVAL_S)
            if self._handler.num_nodes_waiting() or (self._context and self._context.is_over()):
                return

    def _report(self, worker_group: WorkerGroup, result: RunResult) -> None:
        """Tell of ranks that ended by themselves, each once and at once: the agent sees the end but not the code."""
        ended = self._context.ended if self._context else {}
        exits = {
            worker.global_rank: ended[worker.local_rank]
            for worker in worker_group.workers
            if worker.local_rank in ended and worker.local_rank not in self._reported
        }
        if not exits:
            return
        self._reported.update(ended)
        detail = "\n".join(f"rank {rank}: {failure.message}" for rank, failure in result.failures.items())
        generation = self._handler.generation
        if detail:
            logger.error("generation %d: %s", generation, detail, extra={"generation": generation})
        self._handler.link.workers_exited(generation, exits, detail)

    def _exit_barrier(self) -> None:
        """Wait until the ranks of all nodes have ended well.

        The word of the other launchers is taken through the generation's store, so that this ends with the agents and
        the coordinator away. A newer generation brings this node back into the run; a closed job ends it there.
        """
        handler = self._handler
        handler.link.finished(handler.generation)
        deadline = time.monotonic() + self._exit_barrier_timeout
        store: Store | None = self._store
        group = self._worker_group
        slot, num_slots = int(group.group_rank or 0), int(group.group_world_size or 1)
        while time.monotonic() < deadline:
            if handler.num_nodes_waiting():
                raise _SupersededError(f"generation {handler.generation} has ended well here; asking what comes next")
            try:
                if store is not None and _all_have_set(store, _FINISHED_KEY, slot, num_slots):
                    _leave(store, slot, num_slots)
                    return
            except DistError as error:
                # Slot 0 took the store along. The agent's word is still to come.
                logger.info("the store of generation %d is gone: %s", handler.generation, error)
                store = None
            self._starter.poll()
            time.sleep(_MONITOR_INTERVAL_S)
        logger.warning("leaving: waited %g s for the ranks of the other nodes to end", self._exit_barrier_timeout)


def _all_have_set(store: Store, key: str, slot: int, num_slots: int) -> bool:
    store.set(f"{key}/{slot}", "1")
    return bool(store.check([f"{key}/{other}" for other in range(num_slots)]))


def _leave(store: Store, slot: int, num_slots: int) -> None:
    """Leave the store; slot 0, which hosts it, last."""
    deadline = time.monotonic() + _LEAVE_TIMEOUT_S
    while not _all_have_set(store, _LEFT_KEY, slot, num_slots) and slot == 0 and time.monotonic() < deadline:
        time.sleep(_MONITOR_INTERVAL_S)
