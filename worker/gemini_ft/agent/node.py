"""The agent's decisions, without I/O: each event is a method that changes the state and returns actions.

Two rules hold throughout: the generation of a job never falls, and an event that carries an old generation changes
nothing. Orders are level-triggered: repeating one returns its actions again, and each action may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from gemini_ft.agent.actions import (
    Actions,
    AnswerParked,
    Beat,
    CloseClients,
    EndProcesses,
    EnsureLauncher,
    HoldGeneration,
    MarkClosed,
    OpenJob,
    OrderGeneration,
    Persist,
    RequestCheckpoint,
    WatchProcess,
)
from gemini_ft.agent.job_state import Job, Rank
from gemini_ft.agent.pages import RankProgress
from gemini_ft.agent.records import JobRecord, ProcessIdentity
from gemini_ft.contracts.errors import (
    ConfigurationError,
    ConflictError,
    FencedError,
    JobClosedError,
    NotFoundError,
    ProtocolError,
)
from gemini_ft.contracts.local_protocol import Finished, LauncherHello, PublishStore, RankHello, Restored, WorkersExited
from gemini_ft.contracts.messages import (
    Address,
    Assign,
    CheckpointNow,
    CloseJob,
    Fence,
    Heartbeat,
    Hold,
    JobOutcome,
    LauncherKind,
    StartJob,
)

__all__ = ["Node"]


class Node:
    """State of one node; see the module's docstring for the rules."""

    def __init__(self, incarnation: str, node_id: str | None, max_launcher_starts: int) -> None:
        self.incarnation = incarnation
        self.node_id = node_id
        self.job: Job | None = None
        self._max_launcher_starts = max_launcher_starts
        self._last_closed: tuple[str, JobOutcome] | None = None

    # ---- life of the agent

    def registered(self, node_id: str) -> None:
        """The coordinator has issued or confirmed an identity.

        Raises:
            ConflictError: it is another one, although this node takes part in a job.
        """
        if self.node_id != node_id and self.job is not None:
            raise ConflictError(
                f"node {self.node_id} takes part in job {self.job.job_id}, but the coordinator gave it the identity "
                f"{node_id}; this node was registered with another cluster"
            )
        self.node_id = node_id

    def adopt(self, record: JobRecord, is_closed: bool) -> Actions:
        """Take up the job of this agent's former life."""
        # Until CloseJob is repeated nothing is known of how it ended.
        self.job = job = Job.of_record(record, closing=JobOutcome.STOPPED if is_closed else None)
        return (
            OrderGeneration(job.generation),
            *(WatchProcess(process) for process in self.live_processes),
            EndProcesses(self._processes_below(job.generation)),
        )

    def record(self) -> JobRecord:
        """Return what must be written down of the job."""
        return self._require_job().record()

    def heartbeat(
        self,
        sequence: int,
        address: Address,
        interval_s: float,
        redundancy_whole: bool,
        store_used_bytes: int,
        store_capacity_bytes: int,
    ) -> Heartbeat | None:
        """Return all that the node knows of itself; None while it has no identity."""
        if self.node_id is None:
            return None
        job = self.job
        return Heartbeat(
            node_id=self.node_id,
            incarnation=self.incarnation,
            sequence=sequence,
            address=address,
            interval_s=interval_s,
            hang_timeout_s=job.spec.hang_timeout_s if job else None,
            job_id=job.job_id if job else None,
            ordered_generation=job.generation if job else 0,
            assigned_generation=job.assigned_generation if job else 0,
            slot=job.slot_of(self.node_id) if job and job.is_assignment_taken else None,
            ranks=tuple(job.ranks[rank].status() for rank in sorted(job.ranks)) if job else (),
            launcher_pid=job.launcher.pid if job and job.launcher else None,
            launcher_connected=bool(job and job.launcher_connected),
            finished=bool(job and job.finished),
            redundancy_whole=redundancy_whole,
            store_used_bytes=store_used_bytes,
            store_capacity_bytes=store_capacity_bytes,
        )

    # ---- orders

    def start_job(self, order: StartJob) -> Actions:
        """Raises ConflictError when the node is in another job, or in this one with another key."""
        job = self.job
        if job is None:
            self.job = job = Job(order.job_id, order.job_key, order.spec)
        elif job.job_id != order.job_id:
            raise ConflictError(
                f"node {self.node_id} takes part in job {job.job_id} and cannot start job {order.job_id}; "
                "close the former first"
            )
        elif job.job_key != order.job_key:
            raise ConflictError(f"node {self.node_id} takes part in job {job.job_id} under another key")
        elif job.closing is not None:
            self._raise_closed(job)
        return OpenJob(), Persist(), EnsureLauncher(), Beat()

    def fence(self, order: Fence) -> Actions:
        """Raise the generation. When the actions are performed, `fence_enforced` follows.

        Raises:
            NotFoundError, JobClosedError: the node is not in this job (any more).
            FencedError: the order itself is older than the fence.
            ConflictError: the generation is past its fence.
        """
        job = self._job_of_order(order.job_id)
        if order.generation < job.generation:
            raise FencedError.of("a fence", order.generation, job.generation)
        if order.generation == job.assigned_generation:
            # Its ranks may run: memory that is checked now would be taken from under them.
            raise ConflictError(
                f"generation {order.generation} of {job.job_id} is assigned already; this fence comes too late"
            )
        if order.generation > job.generation:
            job.generation = order.generation
            job.finished = False
            job.store = None
            job.num_launcher_starts = 0
        return (
            Persist(),
            OrderGeneration(job.generation),
            AnswerParked(),
            CloseClients(job.generation),
            EndProcesses(self._processes_below(job.generation)),
        )

    def fence_enforced(self, generation: int) -> Actions:
        """The ranks of generations below `generation` are dead, or were given up."""
        if self.job is None or generation < self.job.generation:
            return ()
        self.job.ranks = {r.rank: r for r in self.job.ranks.values() if r.generation >= generation}
        return EnsureLauncher(), Beat()

    def assign(self, order: Assign) -> Actions:
        """Take a plan. When checkpoint memory has taken it too, `assignment_taken` follows.

        Raises:
            NotFoundError, JobClosedError: the node is not in this job (any more).
            FencedError: the plan is older than the fence.
            ConflictError: this generation has another plan, or was not fenced before.
        """
        job = self._job_at("the assignment", order)
        old = job.assignment
        if old is not None and old.generation == order.generation:
            if (old.slots, old.placement, old.restore_step) != (order.slots, order.placement, order.restore_step):
                raise ConflictError(f"generation {order.generation} of {job.job_id} has another plan already")
        else:
            job.is_assignment_taken = False
            job.committed_step = order.restore_step
        job.assignment = order
        return (Persist(),)

    def needs_fence(self, order: Assign) -> bool:
        """Whether an assignment tells of a generation whose fence has not come here."""
        return self.job is not None and self.job.job_id == order.job_id and order.generation > self.job.generation

    def assignment_taken(self, generation: int) -> Actions:
        """Checkpoint memory works by the plan of `generation`."""
        job = self.job
        if (
            job is None
            or job.assignment is None
            or generation != job.generation
            or generation != job.assignment.generation
        ):
            return ()
        job.is_assignment_taken = True
        return EnsureLauncher(), AnswerParked(), Beat()

    def hold(self, order: Hold) -> Actions:
        """Ask the ranks to stop together; heartbeats show when they have.

        Raises:
            NotFoundError, JobClosedError: the node is not in this job (any more).
            FencedError, ConflictError: the order is for another generation.
        """
        return (HoldGeneration(self._job_at("the order to hold", order).generation),)

    def checkpoint_now(self, order: CheckpointNow) -> Actions:
        """Ask the ranks for a version at the next step. Raises as `hold`."""
        self._job_at("the request for a checkpoint", order)
        return (RequestCheckpoint(order.request),)

    def close_job(self, order: CloseJob) -> Actions:
        """Begin to end the job; nothing is to be done for a job that is not here. `job_closed` follows."""
        if self.job is None or self.job.job_id != order.job_id:
            return ()
        self.job.closing = order.outcome
        return MarkClosed(), AnswerParked()

    def job_closed(self) -> Actions:
        """Processes, memory and record of the closing job are gone."""
        if self.job is None or self.job.closing is None:
            return ()
        self._last_closed = self.job.job_id, self.job.closing
        self.job = None
        return (Beat(),)

    # ---- launchers and ranks

    @property
    def wants_launcher(self) -> bool:
        """Whether a launcher must be started."""
        job = self.job
        return (
            job is not None
            and job.spec.launcher is LauncherKind.MANAGED
            and job.closing is None
            and not job.finished
            and job.launcher is None
            and job.num_launcher_starts < self._max_launcher_starts
        )

    def launcher_started(self, process: ProcessIdentity) -> Actions:
        """The agent has started a launcher."""
        job = self._require_job()
        job.launcher = process
        job.num_launcher_starts += 1
        return WatchProcess(process), Persist(), Beat()

    def launcher_hello(
        self, hello: LauncherHello, process: ProcessIdentity, workers: Mapping[int, ProcessIdentity]
    ) -> Actions:
        """Raises NotFoundError, JobClosedError, ConfigurationError, ConflictError: the launcher is not welcome."""
        job = self._job_of_client(hello.job_id)
        # Plain torchrun does not tell its rendezvous handler, which then says 0.
        if hello.num_local_ranks not in (0, job.spec.num_ranks_per_node):
            raise ConfigurationError(
                f"the launcher runs {hello.num_local_ranks} ranks on node {self.node_id}, but job {job.job_id} has "
                f"{job.spec.num_ranks_per_node} a node; give --nproc-per-node {job.spec.num_ranks_per_node}"
            )
        if job.launcher not in (None, process):
            raise ConflictError(
                f"launcher {job.launcher.pid if job.launcher else None} already serves job {job.job_id} on node "
                f"{self.node_id}; launcher {process.pid} must stop"
            )
        job.launcher = process
        job.launcher_connected = True
        return WatchProcess(process), *self._workers_seen(hello.generation, workers), Persist(), Beat()

    def launcher_gone(self, process: ProcessIdentity) -> Actions:
        """The launcher's connection has ended; it may come back."""
        if self.job is None or self.job.launcher != process:
            return ()
        self.job.launcher_connected = False
        return (Beat(),)

    def store_published(self, message: PublishStore) -> Actions:
        """The launcher of slot 0 has opened the store of the newest generation.

        Raises:
            ConflictError: this node is not slot 0.
            GeminiError: as `check_generation`.
        """
        job = self.check_generation("the launcher", message.generation)
        if not 0 < message.port < 1 << 16:
            raise ProtocolError(f"a store cannot listen at port {message.port}")
        if job.slot_of(self.node_id) != 0:
            raise ConflictError(f"node {self.node_id} is not slot 0, whose launcher alone opens the store")
        job.store = Address(host=message.host, port=message.port)
        return (Persist(),)

    def workers_started(self, generation: int, workers: Mapping[int, ProcessIdentity]) -> Actions:
        """The launcher has started ranks. Those of an old generation are only ended."""
        return *self._workers_seen(generation, workers), Persist(), Beat()

    def workers_exited(self, message: WorkersExited) -> Actions:
        """The launcher tells exit codes."""
        job = self._require_job()
        if message.generation != job.generation:
            return ()
        for rank, code in message.exit_codes.items():
            known = job.ranks.get(rank)
            if known is not None and known.generation == message.generation:
                known.exited = True
                known.exit_code = code
                known.detail = message.detail if code else ""
        return Persist(), Beat()

    def node_finished(self, message: Finished) -> Actions:
        """All ranks of this node have ended well. Raises FencedError for an old generation."""
        self.check_generation("the launcher", message.generation).finished = True
        return Persist(), Beat()

    def process_ended(self, process: ProcessIdentity, code: int | None) -> Actions:
        """A watched process has ended."""
        job = self.job
        if job is None:
            return ()
        if job.launcher == process:
            job.launcher = None
            job.launcher_connected = False
            return Persist(), EnsureLauncher(), Beat()
        for rank in job.ranks.values():
            if rank.process == process and not rank.exited:
                rank.exited = True
                rank.exit_code = code
                return Persist(), Beat()
        return ()

    def rank_hello(self, hello: RankHello, process: ProcessIdentity) -> Job:
        """Check a rank before its page is made, and return its job.

        Raises:
            NotFoundError, JobClosedError, FencedError, ConfigurationError, ConflictError: it is not welcome.
        """
        job = self._job_of_client(hello.job_id)
        self.check_generation(f"rank {hello.rank}", hello.generation)
        if hello.world_size != job.world_size:
            raise ConfigurationError(
                f"rank {hello.rank} believes in a world of {hello.world_size} ranks, but job {job.job_id} has "
                f"{job.spec.num_nodes} nodes of {job.spec.num_ranks_per_node} ranks; start just as many"
            )
        slot = job.slot_of(self.node_id)
        if slot is None or hello.rank // job.spec.num_ranks_per_node != slot:
            place = "is a standby" if slot is None else f"is slot {slot}"
            raise ConflictError(
                f"rank {hello.rank} does not belong on node {self.node_id}, "
                f"which {place} in generation {hello.generation}"
            )
        known = job.ranks.get(hello.rank)
        if known is not None and known.said_hello and not known.exited and known.process != process:
            raise ConflictError(
                f"process {known.process.pid} is rank {hello.rank} of generation {hello.generation} already; "
                f"process {process.pid} must stop"
            )
        return job

    def rank_opened(self, hello: RankHello, process: ProcessIdentity, page: str) -> Actions:
        """The rank that was checked has a control page now."""
        job = self._require_job()
        known = job.ranks.get(hello.rank)
        if known is None or known.generation != hello.generation or (known.said_hello and known.process != process):
            known = job.ranks[hello.rank] = Rank(hello.rank, hello.generation, process)
        known.process = process
        known.page = page
        known.said_hello = True
        return WatchProcess(process), Persist(), Beat()

    def restore_answered(self, rank: int, generation: int, source: str) -> None:
        """A verified copy was found for the rank."""
        known = self._rank(rank, generation)
        known.restore_source = source
        known.restore_error = None

    def restore_failed(self, rank: int, generation: int, error: dict[str, Any]) -> Actions:
        """No copy is left for the rank: the heartbeat asks for a new recovery."""
        self._rank(rank, generation).restore_error = error
        return (Beat(),)

    def restored(self, message: Restored) -> Actions:
        """The rank has loaded a version."""
        known = self._rank(message.rank, message.generation)
        known.restored = True
        known.restored_step = message.step
        known.phases_s = dict(message.phases_s)
        return (Beat(),)

    def observe(self, rank: int, generation: int, progress: RankProgress) -> Actions:
        """Take what a control page says; a generation's first finished step and a held one are worth a heartbeat."""
        job = self.job
        known = job.ranks.get(rank) if job else None
        if job is None or known is None or known.generation != generation:
            return ()
        before = known.progress
        known.progress = RankProgress(
            _newer(before.finished_step, progress.finished_step),
            _newer(before.committed_step, progress.committed_step),
            progress.sealed_everywhere_step,
            max(before.num_skipped, progress.num_skipped),
            max(before.stall_us, progress.stall_us),
            _newer(before.held_step, progress.held_step),
        )
        job.committed_step = _newer(job.committed_step, progress.committed_step)
        is_news = (before.finished_step is None) != (known.progress.finished_step is None)
        return (Beat(),) if is_news or before.held_step != known.progress.held_step else ()

    @property
    def awaits_first_step(self) -> bool:
        """Whether a rank of the newest generation runs that has not finished a step yet."""
        job = self.job
        return job is not None and any(
            rank.generation == job.generation and not rank.exited and rank.progress.finished_step is None
            for rank in job.ranks.values()
        )

    @property
    def live_processes(self) -> tuple[ProcessIdentity, ...]:
        """Launcher and ranks that are not known to have ended."""
        if self.job is None:
            return ()
        ranks = tuple(rank.process for rank in self.job.ranks.values() if not rank.exited)
        return ranks if self.job.launcher is None else (self.job.launcher, *ranks)

    # ---- questions

    def next_assignment(self, after_generation: int) -> tuple[int, int, int] | None:
        """Return (generation, slot, number of slots) above `after_generation`, None while this node has no such place.

        Raises:
            JobClosedError: there will be none.
        """
        job = self._require_job()
        if job.closing is not None:
            self._raise_closed(job)
        slot = job.slot_of(self.node_id)
        # A fenced node waits for the plan of the new generation; the old one is void.
        if slot is None or job.assigned_generation != job.generation or job.generation <= after_generation:
            return None
        # A generation whose ranks have begun to end is spent: a launcher that was started anew waits for the next one.
        if any(rank.exited and rank.generation == job.generation for rank in job.ranks.values()):
            return None
        return job.generation, slot, job.spec.num_nodes

    def check_generation(self, who: str, generation: int) -> Job:
        """Return the job if `generation` is its newest and assigned.

        Raises:
            NotFoundError, JobClosedError: there is no job (any more).
            FencedError: the generation is old.
            ProtocolError: the generation has not begun here.
        """
        job = self._require_job()
        if job.closing is not None:
            self._raise_closed(job)
        if generation < job.generation:
            raise FencedError.of(who, generation, job.generation)
        if generation != job.assigned_generation:
            raise ProtocolError(
                f"{who} belongs to generation {generation}, which node {self.node_id} was not assigned to"
            )
        return job

    # ---- helpers

    def _workers_seen(self, generation: int, workers: Mapping[int, ProcessIdentity]) -> Actions:
        job = self._require_job()
        if not workers:
            return ()
        if generation < job.generation:
            return (EndProcesses(tuple(workers.values())),)
        self.check_generation("the launcher", generation)
        for rank, process in workers.items():
            known = job.ranks.get(rank)
            if known is None or known.generation != generation:
                job.ranks[rank] = Rank(rank, generation, process)
            elif not known.said_hello:
                # Otherwise the process that said hello is the one that writes.
                known.process = process
        return tuple(WatchProcess(process) for process in workers.values())

    def _processes_below(self, generation: int) -> tuple[ProcessIdentity, ...]:
        ranks: Iterable[Rank] = self.job.ranks.values() if self.job else ()
        return tuple(rank.process for rank in ranks if rank.generation < generation)

    def _rank(self, rank: int, generation: int) -> Rank:
        job = self.check_generation(f"rank {rank}", generation)
        known = job.ranks.get(rank)
        if known is None or known.generation != generation:
            raise NotFoundError(f"rank {rank} of generation {generation} is not known on node {self.node_id}")
        return known

    def _job_of_order(self, job_id: str) -> Job:
        if self.job is None or self.job.job_id != job_id:
            raise NotFoundError(f"node {self.node_id} does not take part in job {job_id}; start it there first")
        if self.job.closing is not None:
            self._raise_closed(self.job)
        return self.job

    def _job_at(self, what: str, order: Assign | Hold | CheckpointNow) -> Job:
        """The order's job, if the order is for the generation that this node was fenced to."""
        job = self._job_of_order(order.job_id)
        if order.generation < job.generation:
            raise FencedError.of(what, order.generation, job.generation)
        if order.generation > job.generation:
            raise ConflictError(
                f"node {self.node_id} was fenced to generation {job.generation} of {job.job_id}, but {what} is "
                f"for generation {order.generation}; fence it first"
            )
        return job

    def _job_of_client(self, job_id: str) -> Job:
        if self._last_closed is not None and self._last_closed[0] == job_id and self.job is None:
            raise JobClosedError(f"job {job_id} has ended: {self._last_closed[1]}", outcome=self._last_closed[1].value)
        if self.job is None or self.job.job_id != job_id:
            here = f"takes part in job {self.job.job_id}" if self.job else "takes part in no job"
            raise NotFoundError(f"node {self.node_id} does not know job {job_id}, it {here}; check GEMINI_FT_JOB")
        if self.job.closing is not None:
            self._raise_closed(self.job)
        return self.job

    def _require_job(self) -> Job:
        if self.job is None:
            if self._last_closed is not None:
                job_id, outcome = self._last_closed
                raise JobClosedError(f"job {job_id} has ended: {outcome}", outcome=outcome.value)
            raise NotFoundError(f"node {self.node_id} takes part in no job")
        return self.job

    def _raise_closed(self, job: Job) -> NoReturn:
        outcome = job.closing or JobOutcome.STOPPED
        raise JobClosedError(f"job {job.job_id} has ended: {outcome}", outcome=outcome.value)


def _newer(one: int | None, other: int | None) -> int | None:
    return max((step for step in (one, other) if step is not None), default=None)
