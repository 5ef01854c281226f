"""One job: how it gets on, what it has cost, who holds its versions, what its ranks say, and what can be done to it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from nicegui import ui

from gemini_ft.contracts.api import JobModel, NodeModel, RecoveryModel, VersionDetailModel, VersionModel
from gemini_ft.contracts.errors import GeminiError, NotFoundError
from gemini_ft.contracts.ids import JobId
from gemini_ft.dashboard.actions import confirm, job_actions, node_actions
from gemini_ft.dashboard.dashboard import Dashboard, Visit
from gemini_ft.dashboard.feed import collect
from gemini_ft.dashboard.feed_state import FeedState
from gemini_ft.dashboard.frame import frame
from gemini_ft.dashboard.history import Sample, step_rate
from gemini_ft.dashboard.job_charts import ProgressChart
from gemini_ft.dashboard.job_model import Account, Span, account, timeline
from gemini_ft.dashboard.parts import ActionBar, heading, panel
from gemini_ft.dashboard.rank_log import RankLog
from gemini_ft.dashboard.tables import DataTable, Markup, PlainTable, figures, plain_table
from gemini_ft.dashboard.words import (
    duration,
    memory,
    node_name,
    of_steps,
    phase_text,
    share,
    step,
    time_of_day,
    utc_now,
)

__all__ = ["install"]

_NUM_VERSIONS = 8
_NUM_RECOVERIES = 200
_DRAIN = "Drain"


def install(dashboard: Dashboard) -> None:
    """Add the page."""

    @ui.page("/jobs/{job_id}")
    def job(request: Request, job_id: JobId) -> Response | None:
        visit = dashboard.visit(request)
        if visit is None:
            return RedirectResponse("/login", 303)
        with frame(visit, f"/jobs/{job_id}", f"Job {job_id}"):
            visit.shows.append(_JobPage(visit, job_id).show)
        return None


class _Facts:
    """What only this page asks for, and how long each answer is good for."""

    def __init__(self, visit: Visit, job_id: JobId) -> None:
        self._visit = visit
        self._job_id = job_id
        self._alone: JobModel | None = None
        self._asked_for: tuple[object, ...] = ()
        self.versions: list[VersionModel] = []
        self.newest: VersionDetailModel | None = None
        self.recoveries: list[RecoveryModel] = []
        self.problem = ""

    async def job(self, state: FeedState) -> JobModel | None:
        """The job; one that is too old to be among those that everybody sees is asked for alone."""
        if state.cluster is None or self._job_id in state.jobs:
            return state.jobs.get(self._job_id)
        if self._alone is None or self._alone.outcome is None:
            self._alone = await self._visit.api.job(self._job_id)
        return self._alone

    async def renew(self, job: JobModel, state: FeedState) -> None:
        """Ask again for what may have changed since the last time."""
        events = state.events_of(job.job_id) or ()
        wanted = (job.committed_step, job.generation, job.phase, events[-1].id if events else 0)
        if wanted == self._asked_for:
            return
        api = self._visit.api
        self.versions = await collect(api.versions(job.job_id, page_size=_NUM_VERSIONS), _NUM_VERSIONS)
        self.recoveries = await collect(api.recoveries(job.job_id, page_size=_NUM_RECOVERIES), _NUM_RECOVERIES)
        if self.versions:
            with contextlib.suppress(NotFoundError):  # newer ones have taken its place meanwhile
                self.newest = await api.version(job.job_id, self.versions[0].step)
        self._asked_for = wanted


class _JobPage:
    def __init__(self, visit: Visit, job_id: JobId) -> None:
        self._visit = visit
        self._job_id = job_id
        self._facts = _Facts(visit, job_id)
        self._title = heading(f"Job {job_id}", 1)
        with panel("State"):
            self._says = ui.label().props('role="status"')
            self._numbers = PlainTable()
            self._actions = ActionBar(visit)
            self._problem = ui.label().classes("notice refused").props('role="alert"')
            self._problem.visible = False
        with panel("Progress", "w6"):
            self._progress = ProgressChart()
        with panel("Where its time went", "w6"):
            self._account = PlainTable()
            self._spans = PlainTable()
        with panel("Nodes"):
            columns = {"name": "node", "part": "part", "memory": "checkpoint memory, used of planned"}
            columns |= {"whole": "newest version on all holders", "heard": "state"}
            if visit.session.may_change_nodes:
                columns["actions"] = "actions"
            self._nodes = DataTable("Nodes of the job", columns, on_act=self._act_on_node)
        with panel("Ranks"):
            columns = {"name": "rank", "node": "node", "state": "state", "finished": "finished step"}
            columns |= {
                "committed": "committed version",
                "sealed": "sealed everywhere",
                "stall": "waited for checkpoints",
            }
            columns |= {"skipped": "versions skipped", "restored": "started from"}
            self._ranks = DataTable("Ranks", columns, on_act=lambda _, rank: self._log.read(int(rank)))
        with panel("Log of a rank"):
            self._log = RankLog(visit, job_id)
        with panel("Versions", "w6"):
            self._versions = PlainTable()
            self._holders = PlainTable()
        with panel("Recoveries", "w6"):
            ui.link("As waterfalls, with the source of every shard", f"/recoveries?job={job_id}")
            self._recoveries = PlainTable()

    async def show(self, state: FeedState) -> None:
        self._visit.feed.learn(self._job_id)
        try:
            job = await self._facts.job(state)
            if job is not None:
                await self._facts.renew(job, state)
        except GeminiError as error:
            self._complain(str(error))
            return
        if job is None:
            return
        self._complain("")
        members, samples = state.members(job.job_id), state.samples(job.job_id)
        spans = timeline(state.events_of(job.job_id) or (), utc_now())
        stall_s = samples[-1].stall_s if samples else 0.0
        self._title.text = f"{job.spec.name}: {phase_text(job.phase)}"
        self._says.text = _says(job)
        self._numbers.show(figures(_numbers(job, samples, members)))
        self._actions.show(job.job_id, job_actions(job), allowed=self._visit.session.may_change)
        self._progress.show(list(samples))
        self._account.show(figures(_account_figures(account(job, spans, self._facts.recoveries, stall_s))))
        self._spans.show(_timeline(spans))
        self._nodes.show([_node_row(node) for node in members])
        self._ranks.show(_rank_rows(job, members))
        self._versions.show(_versions(self._facts.versions))
        self._holders.show(_holders(self._facts.newest, state))
        self._recoveries.show(_recoveries(self._facts.recoveries))
        await self._log.show(job)

    def _complain(self, sentence: str) -> None:
        if self._problem.text != sentence:
            self._problem.text = sentence
            self._problem.visible = bool(sentence)

    async def _act_on_node(self, label: str, node_id: str) -> None:
        node = self._visit.feed.state.nodes.get(node_id)
        for action in () if node is None else node_actions(node):
            if action.label == label:
                await confirm(self._visit, action)


def _says(job: JobModel) -> str:
    """Return what the job says of itself, in one sentence."""
    if job.waiting_for:
        return f"{phase_text(job.phase)}, generation {job.generation}, waiting for {job.waiting_for}"
    cause = job.cause.partition("\n")[0]
    return f"{phase_text(job.phase)}, generation {job.generation}{f': {cause}' if cause else ''}"


def _numbers(job: JobModel, samples: Sequence[Sample], members: list[NodeModel]) -> dict[str, str]:
    newest = samples[-1] if samples else None
    rate = step_rate(samples)
    behind = None if newest is None else newest.lag_steps
    at_risk = None if newest is None else newest.commit_lag_steps
    begun_after = -1 if job.restored_step is None else job.restored_step
    num_done = 0 if job.finished_step is None else job.finished_step - begun_after
    stall_s = 0.0 if newest is None else newest.stall_s
    seated = [node for node in members if node.slot is not None]
    return {
        "finished step": step(job.finished_step),
        "committed version": step(job.committed_step),
        "not committed yet": "unknown" if at_risk is None else of_steps(at_risk),
        "replication lag": "unknown" if behind is None else of_steps(behind),
        "step rate": "unknown" if rate is None else f"{rate:.3g} steps/s",
        "staging stall": f"{duration(stall_s / num_done)} a step" if num_done > 0 else "unknown",
        "nodes": f"{len(seated)} of {job.spec.num_nodes}",
        "standbys": f"{len(job.standbys)} of {job.spec.num_standbys}",
        "replicas": str(job.spec.num_replicas),
        "checkpoint every": of_steps(job.spec.checkpoint_interval_steps),
        "created": f"{time_of_day(job.created_at)} UTC",
    }


def _account_figures(found: Account) -> dict[str, str]:
    return {
        "goodput": "unknown" if found.goodput is None else share(found.goodput),
        "wasted so far": duration(found.wasted_s),
        "useful": duration(found.useful_s),
        "recovering": duration(found.recovering_s),
        "steps done twice": duration(found.lost_work_s),
        "waiting for checkpoints": duration(found.stall_s),
        "waiting otherwise": duration(found.waiting_s),
    }


def _timeline(spans: list[Span]) -> str:
    total_s = sum(span.length_s for span in spans)
    if not total_s:
        return ""
    begun_at, rows = spans[0].begun_at, []
    for span in spans:
        left = (span.begun_at - begun_at).total_seconds() / total_s
        rows.append(
            (
                span.activity,
                Markup.bar(left, span.length_s / total_s, span.activity),
                span.generation,
                time_of_day(span.begun_at),
                duration(span.length_s),
            )
        )
    header = ("what it did", "when", "generation", "from (UTC)", "for")
    return plain_table("Its life, newest first", header, rows[::-1][:30])


def _node_row(node: NodeModel) -> dict[str, object]:
    return {
        "id": node.node_id,
        "href": f"/?node={node.node_id}",
        "name": node_name(node),
        "part": "standby" if node.slot is None else f"slot {node.slot}",
        "memory": memory(node),
        "whole": "yes" if node.redundancy_whole else "not yet",
        "heard": f"{node.status}{', draining' if node.draining else ', cordoned' if node.cordoned else ''}",
        "actions": [action.label for action in node_actions(node) if action.label != "Remove"],
    }


def _rank_rows(job: JobModel, members: list[NodeModel]) -> list[dict[str, object]]:
    found = [(rank, node) for node in members for rank in node.ranks if rank.generation == job.generation]
    return [
        {
            "id": str(rank.rank),
            "picks": True,
            "name": f"rank {rank.rank}",
            "node": node_name(node),
            "state": rank.state if rank.exit_code is None else f"{rank.state} ({rank.exit_code})",
            "finished": step(rank.finished_step),
            "committed": step(rank.committed_step),
            "sealed": step(rank.sealed_everywhere_step),
            "stall": duration(rank.stall_us / 1e6),
            "skipped": rank.num_skipped,
            "restored": "zero" if rank.restored_step is None else f"step {rank.restored_step}, {rank.restore_source}",
        }
        for rank, node in sorted(found, key=lambda pair: pair[0].rank)
    ]


def _versions(versions: list[VersionModel]) -> str:
    rows = [(version.step, version.generation, time_of_day(version.committed_at)) for version in versions]
    return plain_table("Newest that were recorded", ("step", "generation", "committed at (UTC)"), rows)


def _holders(version: VersionDetailModel | None, state: FeedState) -> str:
    if version is None:
        return ""
    names = {node_id: node_name(node) for node_id, node in state.nodes.items()}
    rows = [
        (
            f"rank {shard.rank}",
            ", ".join(names.get(holder.node_id, holder.node_id) for holder in shard.holders),
            "yes" if shard.is_sealed_everywhere else "not yet",
            next((holder.digest[:12] for holder in shard.holders if holder.digest), "not looked at"),
        )
        for shard in version.ranks
    ]
    return plain_table(f"Who holds version {version.step}", ("shard", "holders", "sealed on all", "digest"), rows)


def _recoveries(recoveries: list[RecoveryModel]) -> str:
    rows = [
        (
            recovery.generation,
            recovery.outcome,
            recovery.cause.partition("\n")[0],
            "unknown" if recovery.num_steps_lost is None else recovery.num_steps_lost,
            duration(sum(recovery.phases_ms.values()) / 1000),
        )
        for recovery in recoveries[:10]
    ]
    return plain_table("Newest first", ("generation", "outcome", "cause", "steps lost", "took"), rows)
