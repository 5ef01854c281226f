"""Agents, messages, a database and people as the coordinator's decisions see them: a model, with injected time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import (
    Address,
    Assign,
    CheckpointNow,
    CloseJob,
    Fence,
    Heartbeat,
    HeldVersion,
    Hold,
    Inventory,
    JobSpec,
    Order,
    OrderDone,
    OrderReply,
    RankState,
    RankStatus,
    StartJob,
    Verdict,
    VerdictKind,
)
from gemini_ft.coordinator import actions
from gemini_ft.coordinator.observations import Observations
from gemini_ft.coordinator.reconcile import decide
from gemini_ft.coordinator.settings import CoordinatorSettings
from gemini_ft.coordinator.state import Cluster, HoldReason, JobPhase, JobView, NodeStatus, NodeView

JOB = "job-1"
NUM_NODES = 4
SETTINGS = CoordinatorSettings()
SPEC = JobSpec(
    name="job", num_nodes=NUM_NODES, num_ranks_per_node=1, num_standbys=1, max_recoveries_without_progress=10**6
)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Agent:
    """One node as the protocol wants it; digests carry the generation that computed them, so histories can be told
    apart.
    """

    node_id: str
    incarnation: str = field(default_factory=new_incarnation)
    alive: bool = True
    sequence: int = 0
    job: StartJob | None = None
    ordered: int = 0
    assign: Assign | None = None
    copies: dict[tuple[int, int], HeldVersion] = field(default_factory=dict)
    finished_step: int | None = None
    committed_step: int | None = None
    held_step: int | None = None
    sealed_everywhere_step: int | None = None
    hold: int = 0
    request: int = 0
    exited: bool = False

    @property
    def slot(self) -> int | None:
        if self.assign is None:
            return None
        return next((slot for slot, node_id in self.assign.slots.items() if node_id == self.node_id), None)

    def beat(self) -> Heartbeat:
        self.sequence += 1
        ranks = []
        if self.assign is not None and self.slot is not None:
            ranks.append(
                RankStatus(
                    rank=self.slot,
                    generation=self.assign.generation,
                    pid=1,
                    state=RankState.EXITED if self.exited else RankState.RUNNING,
                    finished_step=self.finished_step,
                    committed_step=self.committed_step,
                    held_step=self.held_step,
                    sealed_everywhere_step=self.sealed_everywhere_step,
                )
            )
        return Heartbeat(
            node_id=self.node_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            address=Address(host="h", port=1),
            interval_s=0.5,
            job_id=JOB if self.job else None,
            ordered_generation=self.ordered,
            assigned_generation=self.assign.generation if self.assign else 0,
            ranks=tuple(ranks),
            launcher_pid=1,
            launcher_connected=True,
        )

    def obey(self, order: Order) -> OrderReply | None:
        done = OrderDone(node_id=self.node_id, incarnation=self.incarnation)
        match order:
            case StartJob():
                self.job = order
            case CloseJob():
                self.job = self.assign = self.finished_step = self.committed_step = None
                self.copies, self.ordered, self.hold, self.request = {}, 0, 0, 0
            case Fence():
                if self.job is None or order.generation < self.ordered:
                    return None
                self.ordered = order.generation
                if self.assign is not None and self.assign.generation < order.generation:
                    self.assign, self.exited = None, False
                return Inventory(
                    node_id=self.node_id,
                    incarnation=self.incarnation,
                    generation=order.generation,
                    held=tuple(self.copies.values()),
                    committed_step=self.committed_step,
                )
            case Assign():
                if self.job is None or order.generation < self.ordered:
                    return None
                if self.assign is None or self.assign.generation < order.generation:
                    newest = -1 if order.restore_step is None else order.restore_step
                    self.copies = {key: copy for key, copy in self.copies.items() if key[1] <= newest}
                    self.finished_step = order.restore_step
                    self.sealed_everywhere_step = self.held_step = None
                    self.ordered = order.generation
                self.assign = order
            case Hold() | CheckpointNow():
                if self.assign is None or order.generation != self.ordered:
                    return None
                if isinstance(order, Hold):
                    self.hold = order.generation
                else:
                    self.request = order.request
        return done


class World:
    """Agents, a database that compares and sets, a mailbox that loses and reorders, and a coordinator that forgets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.agents = {f"node-{name}": Agent(f"node-{name}") for name in range(NUM_NODES + 2)}
        self.nodes = {
            agent.node_id: NodeView(
                agent.node_id,
                agent.incarnation,
                "host",
                {},
                Address(host="h", port=1),
                NodeStatus.ALIVE,
                0,
                None,
                None,
                EPOCH,
            )
            for agent in self.agents.values()
        }
        self.job = JobView(
            job_id=JOB,
            spec=SPEC,
            job_key="00",
            phase=JobPhase.PENDING,
            generation=0,
            zero_generation=0,
            from_zero=False,
            waiting_for="",
            cause="",
            blocked_by=(),
            num_fruitless_recoveries=0,
            progress_step=None,
            committed_step=None,
            created_at=EPOCH,
        )
        self.history: dict[int, int] = {}
        self.num_steps_lost: dict[int, int] = {}
        self.mail: list[tuple[str, str, Order]] = []
        self.late: list[Heartbeat] = []
        self.seen = Observations(lambda: self.now)

    # ---- the database

    def view(self) -> Cluster:
        ours = [node for node in self.nodes.values() if node.job_id == JOB]
        job = replace(
            self.job,
            slots={node.slot: node.node_id for node in ours if node.slot is not None},
            standbys=tuple(node.node_id for node in ours if node.slot is None),
        )
        return Cluster({JOB: job}, dict(self.nodes))

    def set_node(self, node_id: str, **changes: object) -> None:
        self.nodes[node_id] = replace(self.nodes[node_id], **changes)  # type: ignore[arg-type]

    def _apply(self, action: actions.Action) -> None:
        if isinstance(action, actions.Send):
            self.mail.append((action.node_id, action.incarnation, action.order))
            return
        if isinstance(action, actions.Revive):
            self.set_node(action.node_id, status=NodeStatus.ALIVE)
            return
        if (action.generation, action.phase) != (self.job.generation, self.job.phase):
            return
        self._apply_transition(action)
        if self.job.phase is not action.phase:
            self.job = replace(self.job, waiting_for="")

    def _apply_transition(self, action: actions.Transition) -> None:
        match action:
            case actions.Admit():
                for slot, node_id in action.slots.items():
                    self.set_node(node_id, job_id=JOB, slot=slot)
                for node_id in action.standbys:
                    self.set_node(node_id, job_id=JOB)
                self.job = replace(self.job, generation=1, phase=JobPhase.FENCING)
            case actions.Recruit():
                assert self.nodes[action.node_id].job_id is None
                self.set_node(action.node_id, job_id=JOB)
            case actions.Dismiss():
                self.set_node(action.node_id, job_id=None)
            case actions.BeginGeneration():
                self.begin_generation(action.cause)
            case actions.OrderHold():
                held = JobPhase.STOPPING if action.reason is HoldReason.STOP else self.job.phase
                self.job = replace(self.job, phase=held, hold_reason=action.reason)
            case actions.Suspend():
                assert action.final_step == max(self.history), "a step is lost"
                self.job = replace(
                    self.job,
                    generation=self.job.generation + 1,
                    phase=JobPhase.SUSPENDED,
                    plan=None,
                    hold_reason=HoldReason.NONE,
                    committed_step=action.final_step,
                    final_step=action.final_step,
                )
            case actions.AssignPlan():
                self._check_plan(action)
                sources = set(itertools.chain.from_iterable(action.plan.sources.values()))
                for node in list(self.nodes.values()):
                    if node.slot is not None:
                        self.set_node(node.node_id, slot=None, job_id=JOB if node.node_id in sources else None)
                for slot, node_id in action.plan.slots.items():
                    self.set_node(node_id, slot=slot, job_id=JOB)
                restored = dict(self.job.restored_steps) | {self.job.generation: action.plan.restore_step}
                self.job = replace(self.job, phase=JobPhase.ASSIGNED, plan=action.plan, restored_steps=restored)
            case actions.CompleteRecovery():
                self.job = replace(self.job, phase=JobPhase.RUNNING)
            case actions.Block():
                self.job = replace(self.job, phase=JobPhase.BLOCKED, cause=action.sentence, blocked_by=action.lost)
            case actions.RecordVersion():
                self.job = replace(self.job, committed_step=action.step)
            case actions.Explain():
                self.job = replace(self.job, waiting_for=action.waiting_for)

    def _check_plan(self, action: actions.AssignPlan) -> None:
        plan = action.plan
        assert sorted(plan.slots) == list(range(NUM_NODES))
        assert len(set(plan.slots.values())) == NUM_NODES
        step = plan.restore_step
        if step is None:
            assert self.job.committed_step is None, "a committed job started from zero by itself"
            self.history = {}
            return
        for rank in range(NUM_NODES):
            assert plan.sources[rank]
            for node_id in plan.sources[rank]:
                agent = self.agents[node_id]
                if agent.alive:
                    digest = agent.copies[rank, step].shard_digest
                    assert digest == f"{rank}.{step}.{self.history[step]}", "a copy of a history that was given up"
        self.num_steps_lost[self.job.generation] = max(self.history) - step
        self.history = {known: generation for known, generation in self.history.items() if known <= step}

    def begin_generation(self, cause: str) -> None:
        hold_reason = self.job.hold_reason if self.job.hold_reason is HoldReason.STOP else HoldReason.NONE
        self.job = replace(
            self.job,
            generation=self.job.generation + 1,
            phase=JobPhase.FENCING,
            plan=None,
            cause=cause,
            hold_reason=hold_reason,
        )

    # ---- what people wish

    def stop(self) -> None:
        if self.job.phase in (JobPhase.ASSIGNED, JobPhase.RUNNING):
            phase = JobPhase.STOPPING if self.job.phase is JobPhase.RUNNING else self.job.phase
            self.job = replace(self.job, phase=phase, hold_reason=HoldReason.STOP)

    def resume(self) -> None:
        if self.job.phase is JobPhase.SUSPENDED:
            self.begin_generation("a person resumed the job")

    def drain(self, node_id: str) -> None:
        """One node at a time, so that there are always enough others."""
        if not any(node.draining for node in self.nodes.values()):
            self.set_node(node_id, cordoned=True, draining=True)

    def uncordon(self, node_id: str) -> None:
        self.set_node(node_id, cordoned=False, draining=False)

    # ---- what happens

    def turn(self) -> None:
        """The coordinator looks once."""
        cluster = self.view()
        job = cluster.jobs[JOB]
        generation = job.generation
        self.seen.note_phase(JOB, job.generation, job.phase)
        for action in decide(cluster, self.seen, self.now, SETTINGS):
            self._apply(action)
        assert self.job.generation >= generation

    def beat(self, agent: Agent) -> None:
        if agent.alive:
            heartbeat = agent.beat()
            self.late.append(heartbeat)
            self.seen.hear(heartbeat)

    def deliver(self, index: int, *, lose_reply: bool) -> None:
        if not self.mail:
            return
        node_id, _, order = self.mail.pop(index % len(self.mail))
        agent = self.agents[node_id]
        reply = agent.obey(order) if agent.alive else None
        if reply is not None and not lose_reply:
            self.seen.hear_reply(node_id, order, reply)

    def train(self) -> None:
        members = sorted(
            (
                agent
                for agent in self.agents.values()
                if agent.assign is not None and agent.slot is not None and agent.alive
            ),
            key=lambda agent: agent.slot or 0,
        )
        generations = {agent.assign.generation for agent in members if agent.assign is not None}
        if len(members) != NUM_NODES or len(generations) != 1 or any(agent.exited for agent in members):
            return
        (generation,) = generations
        if any(agent.held_step is not None for agent in members) or not self._restored(members):
            return
        held = any(agent.hold == generation for agent in members)
        step = 0 if members[0].finished_step is None else members[0].finished_step + 1
        for slot, agent in enumerate(members):
            assert agent.assign is not None
            agent.committed_step = step if held else step - 1 if step else None
            agent.held_step = step if held else None
            agent.finished_step = agent.sealed_everywhere_step = step
            for holder in agent.assign.placement[slot]:
                copies = members[holder].copies
                copies[slot, step] = HeldVersion(
                    rank=slot, step=step, generation=generation, shard_digest=f"{slot}.{step}.{generation}"
                )
                copies.pop((slot, step - 2), None)
        self.history[step] = generation

    def _restored(self, members: list[Agent]) -> bool:
        """All holders have what the plan restores; a rank ends if none of its sources is left."""
        for slot, agent in enumerate(members):
            assert agent.assign is not None
            step = agent.assign.restore_step
            if step is None or agent.sealed_everywhere_step is not None:
                continue
            having = [self.agents[node_id].copies.get((slot, step)) for node_id in agent.assign.sources[slot]]
            copy = next((copy for copy in having if copy is not None), None)
            if copy is None:
                self.exit_rank(agent)
                return False
            for holder in agent.assign.placement[slot]:
                members[holder].copies[slot, step] = copy
            agent.sealed_everywhere_step = step
        return True

    def verdict(self, agent: Agent, kind: VerdictKind) -> None:
        verdict = Verdict(
            kind=kind,
            node_id=agent.node_id,
            incarnation=agent.incarnation,
            job_id=JOB,
            generation=agent.assign.generation if agent.assign else 0,
            rank=agent.slot if kind is VerdictKind.RANK_EXITED else None,
            sequence=agent.sequence,
        )
        if kind is VerdictKind.RANK_EXITED:
            self.seen.hear_rank_verdict(verdict)
        elif self.seen.hear_node_verdict(verdict) and self.nodes[agent.node_id].incarnation == agent.incarnation:
            self.set_node(agent.node_id, status=NodeStatus.FAILED, judged_sequence=agent.sequence)

    def die(self, agent: Agent) -> None:
        agent.alive, agent.copies = False, {}
        self.verdict(agent, VerdictKind.FAILED)

    def come_back(self, agent: Agent) -> None:
        """A machine that died starts anew, without its memory."""
        if not agent.alive:
            self.agents[agent.node_id] = Agent(agent.node_id)
            self._registered(self.agents[agent.node_id])

    def restart_agent(self, agent: Agent) -> None:
        """The memory and the ranks outlive the agent."""
        if agent.alive:
            agent.incarnation, agent.sequence = new_incarnation(), 0
            self._registered(agent)

    def _registered(self, agent: Agent) -> None:
        self.set_node(agent.node_id, incarnation=agent.incarnation, status=NodeStatus.ALIVE, judged_sequence=0)

    def exit_rank(self, agent: Agent) -> None:
        if agent.alive and agent.assign is not None and agent.slot is not None:
            agent.exited = True
            self.verdict(agent, VerdictKind.RANK_EXITED)

    def rounds(self, num_rounds: int) -> None:
        """Everything arrives, rank exits are told again by the detector, and time passes."""
        for _ in range(num_rounds):
            for agent in self.agents.values():
                self.beat(agent)
                if agent.exited:
                    self.verdict(agent, VerdictKind.RANK_EXITED)
            self.turn()
            while self.mail:
                self.deliver(0, lose_reply=False)
            self.train()
            self.now += 1.0

    def rounds_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Let rounds pass until something is so; 20 are enough for anything."""
        for _ in range(20):
            if condition():
                return
            self.rounds(1)
        raise AssertionError(f"20 rounds were not enough for {what}: {self.job}")

    def settle(self) -> None:
        """No more failures: whoever is dead returns, and a suspended job is resumed."""
        for agent in list(self.agents.values()):
            self.come_back(agent)
        for _ in range(60):
            self.resume()
            self.rounds(1)
