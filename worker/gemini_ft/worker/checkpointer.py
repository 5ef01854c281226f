"""The three lines in a training script: build, restore, step."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from gemini_ft.agent.launcher.learning import report_imports
from gemini_ft.contracts.buffer_format import ShardBuffer
from gemini_ft.contracts.errors import (
    ConfigurationError,
    FencedError,
    GeminiError,
    IntegrityError,
    ProtocolError,
    UnavailableError,
)
from gemini_ft.contracts.local_protocol import Reserve, Reserved, Restored
from gemini_ft.faults import fault_point
from gemini_ft.worker._mapping import SharedMapping
from gemini_ft.worker.agent_client import AgentClient
from gemini_ft.worker.agreement import Agreed, Agreement
from gemini_ft.worker.device_copy import PinnedMapping
from gemini_ft.worker.identity import RankIdentity
from gemini_ft.worker.restore import RestorableShard, find_shard, find_shards_together, load_parts, predicted_state
from gemini_ft.worker.rng import RngState
from gemini_ft.worker.staging import Stager, storages_of
from gemini_ft.worker.state_codec import FlatState, check_match, flatten
from gemini_ft.worker.stateful import Stateful

__all__ = ["Checkpointer"]

logger = logging.getLogger(__name__)

_MANIFEST_SLACK_BYTES = 64 << 10
_POLL_S = 0.0005
_HELD_POLL_S = 0.01
_HOLD_ROUND_S = 1.0


class Checkpointer:
    """Keeps a checkpoint of every step in memory that outlives this process, and brings it back after a failure.

    Args:
        stateful: every part of the state that decides the next step, by name; an RngState is added if none is given.
        optimizer: the optimizers whose `step()` alone changes parameters and their own state; found among `stateful`
            if None. What no optimizer owns is copied at the call of `step`.
        process_group: ranks of the job; the default group if None.
        on_lag: when the version before is not committed yet, `wait` for it in the loop, at most `commit_wait` and
            once for each version, or `skip` this step at once; either way all ranks do the same.
        hold_timeout: how long the ranks wait in `step` when the job is held, until somebody goes on with it.
    """

    def __init__(
        self,
        stateful: Mapping[str, Stateful],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        on_lag: Literal["wait", "skip"] = "wait",
        commit_wait: timedelta = timedelta(seconds=10),
        connect_timeout: timedelta = timedelta(seconds=30),
        restore_timeout: timedelta = timedelta(minutes=10),
        collective_timeout: timedelta = timedelta(minutes=10),
        hold_timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        if on_lag not in ("wait", "skip"):
            raise ConfigurationError(f"on_lag is {on_lag!r}; it must be 'wait' or 'skip'")
        self._parts = _checked_parts(stateful)
        self._optimizers = _optimizers(self._parts, optimizer)
        self._on_lag, self._commit_wait = on_lag, commit_wait
        self._connect_timeout, self._restore_timeout = connect_timeout, restore_timeout
        self._hold_timeout = hold_timeout
        self._identity = _checked_identity(RankIdentity.from_environment())
        self._client = AgentClient(self._identity)
        self._agreement = Agreement(process_group, collective_timeout)
        self._stager: Stager | None = None
        self._mappings: list[SharedMapping] = []
        self._pinned: list[PinnedMapping] = []
        self._buffers: tuple[ShardBuffer, ShardBuffer] | None = None
        self._committed: int | None = None
        self._committed_buffer: int | None = None
        self._last_begun: int | None = None
        self._last_buffer: int | None = None
        self._last_step: int | None = None
        self._waited_for: int | None = None
        self._served_request = 0
        self._num_skipped = 0
        self._stall_s = 0.0
        self._imports_reported = False
        self._hooks = [one.register_step_pre_hook(self._before_optimizer_step) for one in self._optimizers]

    @property
    def committed_step(self) -> int | None:
        """Newest version that every rank knows to be sealed on all its holders."""
        return self._committed

    @property
    def num_skipped(self) -> int:
        """Steps that were not staged because the version before was not committed in time."""
        return self._num_skipped

    @property
    def stall(self) -> timedelta:
        """How long the training loop has waited for checkpoints so far."""
        return timedelta(seconds=self._stall_s)

    def restore(self) -> int | None:
        """Reserve memory, load the newest complete version, and return its step; None: the job starts from zero.

        Collective; called once, before the first step.

        Raises:
            CapacityError: the node has too little memory; the sentence names the number and the knob.
            StateError: the state cannot be kept, or does not match the version.
            NoVersionError: no verified copy is left in memory.
            UnavailableError: the agent cannot be reached.
        """
        if self._stager is not None:
            raise ConfigurationError("restore() was called twice; call it once, before the first step")
        started = time.monotonic()
        live = self._agreement.together(self._reserve)
        reserved = time.monotonic()
        shard = find_shards_together(self._agreement, self._find, lambda shard: _match(shard, live))
        found = time.monotonic()
        load_parts(self._parts, shard, live)
        loaded = time.monotonic()
        self._stager = Stager(self._client, self._restore_timeout)
        self._committed = self._last_begun = self._last_step = shard.step
        self._committed_buffer = self._last_buffer = shard.buffer_index
        phases = {"reserve": reserved - started, "fetch": found - reserved, "load": loaded - found}
        self._report_restored(shard.step, phases)
        return shard.step

    def step(self, step: int) -> bool:
        """Called by every rank when `step` is finished; returns whether its version is being staged.

        Parameters and optimizer state are copied behind the next forward and backward; everything else is copied now.
        A job that is to be held commits `step` on all ranks and never leaves this call.

        Raises:
            FencedError: the job has gone on without this process, which must stop.
            UnavailableError: another rank is gone, or the job was held for longer than `hold_timeout`.
            GeminiError: staging failed on some rank; every rank raises that error at the same step.
        """
        if self._stager is None:
            raise ConfigurationError("step() was called before restore(); restore() also reserves the memory")
        if self._last_step is not None and step <= self._last_step:
            raise ConfigurationError(f"step({step}) was called after step({self._last_step}); steps must rise")
        started = time.monotonic()
        if not self._agreement.launched:
            self._launch_agreement(self._stager)
        agreed = self._agreed(self._failure(self._stager))
        self._last_step = step
        is_current = agreed.committed_step == self._last_begun
        if agreed.is_hold_wanted:
            self._hold(self._stager, step, is_current)
        is_due = self._is_due(step, agreed.checkpoint_request)
        if is_due and is_current:
            self._stage(self._stager, step)
            self._served_request = agreed.checkpoint_request
        elif is_due:
            self._num_skipped += 1
        self._stall_s += time.monotonic() - started
        self._publish(step)
        if not self._imports_reported:
            report_imports()
            self._imports_reported = True
        return is_due and is_current

    def close(self) -> None:
        """Finish the version that is being staged and let go of agent and memory; the memory stays with the agent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        self._client.close()
        self._buffers = None
        for pinned in self._pinned:
            pinned.close()
        for mapping in self._mappings:
            mapping.close()
        self._pinned.clear()
        self._mappings.clear()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._stager is None or self._agreement.launched:
            return
        started = time.monotonic()
        self._launch_agreement(self._stager)
        self._stall_s += time.monotonic() - started

    def _launch_agreement(self, stager: Stager) -> None:
        stager.wait()
        if self._on_lag == "wait" and stager.error is None and self._may_be_due_next():
            self._wait_for_commit()
        fault_point("rank.before_agree")
        self._agreement.launch(
            self._client.rank_page.sealed_everywhere_step,
            self._failure(stager) is not None,
            self._is_hold_wanted,
            self._client.job_page.checkpoint_request,
        )

    def _agreed(self, mine: GeminiError | None) -> Agreed:
        """What the ranks have agreed on; raises the first rank's error if one has failed, `mine` is this rank's."""
        agreed = self._agreement.result()
        fault_point("rank.after_agree")
        self._refuse_if_fenced()
        if agreed.failed:
            raise self._agreement.first_error(mine) or ProtocolError("a rank failed without an error")
        if agreed.committed_step == self._last_begun:
            self._committed, self._committed_buffer = self._last_begun, self._last_buffer
        return agreed

    def _is_due(self, step: int, request: int) -> bool:
        """Whether `step` is to be staged: the same on every rank when `request` is."""
        since = None if self._last_begun is None else step - self._last_begun
        return since is None or since >= self._client.checkpoint_interval_steps or request > self._served_request

    def _may_be_due_next(self) -> bool:
        """Whether the commit of the version before is worth a wait, as far as this rank can tell."""
        expected = 0 if self._last_step is None else self._last_step + 1
        return self._is_hold_wanted or self._is_due(expected, self._client.job_page.checkpoint_request)

    @property
    def _is_hold_wanted(self) -> bool:
        return self._client.job_page.hold_generation == self._identity.generation

    def _failure(self, stager: Stager) -> GeminiError | None:
        """Why the version begun last can never be committed."""
        damaged_step = self._client.rank_page.damaged_step
        if stager.error is not None or damaged_step is None or damaged_step != self._last_begun:
            return stager.error
        return IntegrityError(
            f"the staged copy of step {damaged_step} was damaged in memory before it had been sent; "
            "the version before it is whole",
            where=f"step {damaged_step}",
        )

    def _wait_for_commit(self) -> None:
        # Once for each version: with a hung agent every step would take as long as the limit.
        if self._waited_for == self._last_begun:
            return
        self._waited_for = self._last_begun
        deadline = time.monotonic() + self._commit_wait.total_seconds()
        while (
            self._client.rank_page.sealed_everywhere_step != self._last_begun
            and self._client.connected
            and self._client.rank_page.replication_healthy
            and self._client.rank_page.damaged_step != self._last_begun
            and self._client.job_page.ordered_generation <= self._identity.generation
            and time.monotonic() < deadline
        ):
            time.sleep(_POLL_S)

    def _hold(self, stager: Stager, step: int, is_current: bool) -> NoReturn:
        """Commit `step` on all ranks, then wait until the generation is over."""
        deadline = time.monotonic() + self._hold_timeout.total_seconds()
        self._publish(step)
        if not is_current:
            self._commit(stager, deadline)
        self._stage(stager, step)
        self._commit(stager, deadline)
        logger.info("rank %d holds step %d", self._identity.rank, step)
        while time.monotonic() < deadline:
            # Again and again, because an agent that was restarted has a page of its own.
            self._publish(step, held_step=step)
            self._refuse_if_fenced()
            time.sleep(_HELD_POLL_S)
        raise UnavailableError(
            f"rank {self._identity.rank} was held at step {step}, and nobody resumed the job within "
            f"{self._hold_timeout.total_seconds():g} s; is the coordinator running?"
        )

    def _commit(self, stager: Stager, deadline: float) -> None:
        """Agree again and again until the version begun last is committed.

        In rounds, so that a rank whose version is sealed hears soon that another one's cannot be.
        """
        while True:
            stager.wait()
            round_end = min(deadline, time.monotonic() + _HOLD_ROUND_S)
            while (
                self._client.rank_page.sealed_everywhere_step != self._last_begun
                and self._failure(stager) is None
                and time.monotonic() < round_end
            ):
                self._refuse_if_fenced()
                time.sleep(_POLL_S)
            sealed_step, failure = self._client.rank_page.sealed_everywhere_step, self._failure(stager)
            if failure is None and sealed_step != self._last_begun and time.monotonic() >= deadline:
                failure = UnavailableError(
                    f"waited {self._hold_timeout.total_seconds():g} s in vain for step {self._last_begun} to be sealed "
                    "on all its holders, so that the job can be held"
                )
            self._agreement.launch(sealed_step, failure is not None)
            if self._agreed(failure).committed_step == self._last_begun:
                return

    def _refuse_if_fenced(self) -> None:
        me, ordered = self._identity, self._client.job_page.ordered_generation
        if ordered > me.generation:
            raise FencedError.of(f"rank {me.rank}", me.generation, ordered)
        if self._client.refused is not None:
            raise self._client.refused

    def _stage(self, stager: Stager, step: int) -> None:
        assert self._buffers is not None
        target = 1 if self._committed_buffer == 0 else 0
        flat = flatten({name: part.state_dict() for name, part in self._parts.items()})
        stager.begin(step, flat, storages_of(self._optimizers), self._buffers[target], target, self._committed)
        self._last_begun, self._last_buffer = step, target

    def _publish(self, step: int, held_step: int | None = None) -> None:
        page = self._client.rank_page
        page.committed_step = self._committed
        page.num_skipped = self._num_skipped
        page.stall_us = int(self._stall_s * 1e6)
        page.finished_step = step
        page.held_step = held_step

    def _reserve(self) -> FlatState:
        me = self._identity
        self._client.start(self._connect_timeout)
        live = predicted_state(self._parts)
        for one, other in live.overlaps:
            logger.warning("tensors %s and %s overlap in part; both are kept, and will not share memory", one, other)
        manifest_bytes = len(live.manifest((1 << 40,) * len(live.specs)).to_json()) + _MANIFEST_SLACK_BYTES
        request = Reserve(
            request_id=0,
            generation=me.generation,
            rank=me.rank,
            data_bytes=live.layout.num_bytes,
            manifest_bytes=manifest_bytes,
            timeout_s=self._restore_timeout.total_seconds(),
        )
        reply = self._client.ask(request, "memory for the checkpoints", self._restore_timeout)
        if not isinstance(reply, Reserved):
            raise ProtocolError(f"the agent answered a reservation with {reply.kind}")
        self._mappings = [SharedMapping(Path(path), locked=True) for path in reply.buffers]
        if any(tensor.is_cuda for tensor in live.tensors):
            self._pinned = [PinnedMapping(mapping.view) for mapping in self._mappings]
        first, second = (ShardBuffer.open(mapping.view) for mapping in self._mappings)
        self._buffers = (first, second)
        return live

    def _find(self) -> RestorableShard:
        assert self._buffers is not None
        return find_shard(self._client, self._buffers, self._restore_timeout)

    def _report_restored(self, step: int | None, phases_s: dict[str, float]) -> None:
        me = self._identity
        done = Restored(request_id=0, generation=me.generation, rank=me.rank, step=step, phases_s=phases_s)
        self._client.ask(done, "the answer to the report of a restore", self._connect_timeout)


def _match(shard: RestorableShard, live: FlatState) -> None:
    if shard.manifest is not None:
        check_match(shard.manifest, live)


def _checked_parts(stateful: Mapping[str, Stateful]) -> dict[str, Stateful]:
    for name, part in stateful.items():
        if not isinstance(part, Stateful):
            raise ConfigurationError(
                f"stateful[{name!r}] is a {type(part).__name__} without state_dict() and load_state_dict(); "
                "wrap it in an object that has both"
            )
    parts = dict(stateful)
    if not any(isinstance(part, RngState) for part in parts.values()):
        if "rng" in parts:
            raise ConfigurationError("stateful['rng'] is taken by the random generators; choose another name for it")
        parts["rng"] = RngState()
    return parts


def _optimizers(
    parts: Mapping[str, Stateful], given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
) -> list[torch.optim.Optimizer]:
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    if given is not None:
        return list(given)
    found = [getattr(part, "optimizer", part) for part in parts.values()]
    return [one for one in found if isinstance(one, torch.optim.Optimizer)]


def _checked_identity(identity: RankIdentity) -> RankIdentity:
    if dist.is_available() and dist.is_initialized():
        actual = (dist.get_rank(), dist.get_world_size())
        if actual != (identity.rank, identity.world_size):
            raise ConfigurationError(
                f"RANK and WORLD_SIZE say {identity.rank} of {identity.world_size}, torch.distributed says "
                f"{actual[0]} of {actual[1]}; initialize it from the environment"
            )
    elif identity.world_size > 1:
        raise ConfigurationError("initialize torch.distributed before building the Checkpointer: the ranks must agree")
    return identity
