"""Verdicts from heartbeats and silence, under a clock that the test moves."""

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import Address, Heartbeat, RankState, RankStatus, Verdict, VerdictKind
from gemini_ft.failure_detector.judge import Judge
from gemini_ft.failure_detector.settings import DetectorSettings

SETTINGS = DetectorSettings()
INTERVAL_S = 0.25
JOB = "job-1"
SUSPECTED, FAILED, RECOVERED = VerdictKind.SUSPECTED, VerdictKind.FAILED, VerdictKind.RECOVERED


class Agent:
    """Makes the heartbeats of one node; `facts` are what it currently tells."""

    def __init__(self, node_id: str, **facts: object) -> None:
        self.node_id = node_id
        self.facts = facts
        self.incarnation = new_incarnation()
        self.sequence = 0

    def restart(self) -> None:
        self.incarnation, self.sequence = new_incarnation(), 0

    def heartbeat(self) -> Heartbeat:
        self.sequence += 1
        return Heartbeat(
            node_id=self.node_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            address=Address(host="127.0.0.1", port=1),
            interval_s=INTERVAL_S,
            **self.facts,  # type: ignore[arg-type]  # the test's own keywords
        )


class Scene:
    """A judge, its agents and their clock."""

    def __init__(self, *agents: Agent, settings: DetectorSettings = SETTINGS) -> None:
        self.settings = settings
        self.agents = agents
        self.now = 1000.0
        self.judge = Judge(settings, self.now)
        self.verdicts: list[Verdict] = []
        self.kept: list[Heartbeat] = []

    def beat(self, agent: Agent) -> None:
        self.kept.append(agent.heartbeat())
        self.verdicts += self.judge.hear(self.kept[-1], self.now)

    def pass_time(self, seconds: float, alive: Iterable[Agent] | None = None, *, echo: bool = True) -> None:
        """Tick as the service does, while `alive` (all agents by default) send heartbeats in time."""
        senders = list(self.agents if alive is None else alive)
        ticks_a_beat = round(INTERVAL_S / self.settings.tick_s)
        for tick in range(round(seconds / self.settings.tick_s)):
            self.now += self.settings.tick_s
            if tick % ticks_a_beat == 0:
                for agent in senders:
                    self.beat(agent)
                if echo:
                    self.judge.echo(self.now)
            self.verdicts += self.judge.tick(self.now)

    def told(self, agent: Agent | None = None) -> list[VerdictKind]:
        return [verdict.kind for verdict in self.verdicts if agent is None or verdict.node_id == agent.node_id]


def _nodes(num_nodes: int, **facts: object) -> list[Agent]:
    return [Agent(f"node-{number}", **facts) for number in range(num_nodes)]


def _rank(rank: int, generation: int = 1, **facts: object) -> RankStatus:
    known = {"pid": 100 + rank, "state": RankState.RUNNING} | facts
    return RankStatus(rank=rank, generation=generation, **known)  # type: ignore[arg-type]  # the test's own keywords


def _job(*ranks: RankStatus, generation: int = 1, **facts: object) -> dict[str, object]:
    return {
        "job_id": JOB,
        "ordered_generation": generation,
        "ranks": ranks,
    } | facts


# ---- silence


def test_a_silent_node_is_suspected_soon_and_failed_once_patience_is_over() -> None:
    lost, *others = agents = _nodes(4)
    scene = Scene(*agents)
    scene.pass_time(10)

    scene.pass_time(3, others)
    assert scene.told() == [SUSPECTED]
    scene.pass_time(60, others)

    assert scene.told() == [SUSPECTED, FAILED]
    assert {(verdict.node_id, verdict.incarnation) for verdict in scene.verdicts} == {(lost.node_id, lost.incarnation)}
    assert scene.verdicts[1].silent_s == pytest.approx(SETTINGS.patience_s + INTERVAL_S, abs=1.0)


def test_silence_is_judged_at_once_when_the_job_has_broken() -> None:
    lost, *others = agents = _nodes(4, **_job())
    for rank, agent in enumerate(agents):
        agent.facts = _job(_rank(rank))
    scene = Scene(*agents)
    scene.pass_time(10)

    others[0].facts = _job(_rank(1, state=RankState.EXITED, exit_code=1))
    scene.pass_time(2.5, others)

    assert scene.told(lost) == [SUSPECTED, FAILED]
    assert scene.verdicts[-1].silent_s is not None
    assert scene.verdicts[-1].silent_s < 2.5


def test_a_node_that_misses_a_fence_is_judged_at_once() -> None:
    _lost, *others = agents = _nodes(4, **_job())
    scene = Scene(*agents)
    scene.pass_time(10)

    for agent in others:
        agent.facts = _job(generation=2)
    scene.pass_time(2.5, others)

    assert scene.told() == [SUSPECTED, FAILED]


def test_an_agent_that_restarts_within_patience_fails_nobody() -> None:
    restarted, *others = agents = _nodes(4, **_job(_rank(0)))
    scene = Scene(*agents)
    scene.pass_time(10)

    scene.pass_time(6, others)
    restarted.restart()
    scene.pass_time(30)

    assert scene.told() == [SUSPECTED, RECOVERED]
    assert scene.verdicts[-1].incarnation == restarted.incarnation


def test_a_node_that_falls_silent_twice_is_judged_twice_with_different_ids() -> None:
    flaky, *others = agents = _nodes(4)
    scene = Scene(*agents)
    for _ in range(2):
        scene.pass_time(10)
        scene.pass_time(30, others)
    scene.pass_time(10)

    assert scene.told(flaky) == [SUSPECTED, FAILED, RECOVERED] * 2
    ids = [verdict.verdict_id for verdict in scene.verdicts]
    assert len(set(ids)) == len(ids)


def test_repeated_late_and_outdated_heartbeats_revive_nobody() -> None:
    lost, *others = agents = _nodes(4)
    scene = Scene(*agents)
    scene.pass_time(5)
    lost.restart()
    scene.pass_time(5)
    scene.pass_time(30, others)
    assert scene.told(lost) == [SUSPECTED, FAILED]

    for heartbeat in scene.kept:
        assert scene.judge.hear(heartbeat, scene.now) == []
    scene.pass_time(5, others)

    assert scene.told(lost) == [SUSPECTED, FAILED]


@settings(max_examples=40, deadline=None)
@given(jitter=st.lists(st.floats(0.0, 0.9), min_size=1, max_size=60))
def test_heartbeats_that_come_within_the_acceptable_pause_blame_nobody(jitter: list[float]) -> None:
    judge, now, agent = Judge(SETTINGS, 0.0), 0.0, Agent("node-1", **_job(generation=1))
    for delay_s in jitter:
        assert judge.hear(agent.heartbeat(), now) == []
        arrival = now + INTERVAL_S + delay_s
        while now + SETTINGS.tick_s < arrival:
            now += SETTINGS.tick_s
            judge.echo(now)
            assert judge.tick(now) == []
        now = arrival


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["beat", "silence", "restart", "old"]), max_size=25), st.randoms())
def test_verdicts_about_one_node_alternate_whatever_arrives(events: list[str], random: Random) -> None:
    """Suspected, failed and recovered follow each other in this order, each naming the newest life only."""
    subject, *others = agents = _nodes(5)
    scene = Scene(*agents)
    scene.pass_time(1)
    for event in events:
        if event == "restart":
            subject.restart()
        if event in ("restart", "beat"):
            scene.beat(subject)
        if event == "old":
            scene.verdicts += scene.judge.hear(random.choice(scene.kept), scene.now)
        if event == "silence":
            scene.pass_time(4, others)
    allowed = {None: {SUSPECTED}, SUSPECTED: {FAILED, RECOVERED}, FAILED: {RECOVERED}, RECOVERED: {SUSPECTED}}
    before = None
    for kind in scene.told(subject):
        assert kind in allowed[before]
        before = kind
    assert set(scene.told()) == set(scene.told(subject))


# ---- the detector suspects itself


def test_a_stalled_detector_blames_nobody() -> None:
    scene = Scene(*_nodes(4, **_job()))
    scene.pass_time(10)

    scene.now += 60
    scene.pass_time(30)

    assert scene.told() == []


def test_after_a_stall_a_node_that_is_really_gone_is_still_found() -> None:
    lost, *others = agents = _nodes(4)
    scene = Scene(*agents)
    scene.pass_time(10)

    scene.now += 60
    scene.pass_time(SETTINGS.grace_s + SETTINGS.patience_s + 3, others)

    assert scene.told() == [SUSPECTED, FAILED]
    assert scene.verdicts[0].node_id == lost.node_id


def test_nobody_is_judged_while_the_broker_does_not_echo() -> None:
    scene = Scene(*_nodes(4))
    scene.pass_time(10)

    scene.pass_time(120, [], echo=False)
    assert "broker" in scene.judge.held_for
    scene.pass_time(20)

    assert scene.told() == []
    assert scene.judge.held_for == ""


def test_a_reconnection_gives_everybody_grace() -> None:
    scene = Scene(*_nodes(4))
    scene.pass_time(10)

    scene.judge.reconnected(scene.now)
    scene.pass_time(SETTINGS.grace_s - 1, [])
    scene.pass_time(20)

    assert scene.told() == []


def test_when_most_nodes_fall_silent_together_the_detector_holds_first_and_believes_later() -> None:
    *lost, survivor = agents = _nodes(4)
    scene = Scene(*agents)
    scene.pass_time(10)

    scene.pass_time(SETTINGS.mass_silence_hold_s - 1, [survivor])
    assert scene.told() == []
    assert "3 of 4 nodes" in scene.judge.held_for
    scene.pass_time(10, [survivor])

    assert sorted(scene.told()) == sorted([SUSPECTED, FAILED] * 3)
    assert {verdict.node_id for verdict in scene.verdicts} == {agent.node_id for agent in lost}


def test_half_of_the_nodes_are_not_most_of_them() -> None:
    *lost, third, fourth = agents = _nodes(4)
    scene = Scene(*agents)
    scene.pass_time(10)

    scene.pass_time(20, [third, fourth])

    assert sorted(scene.told()) == sorted([SUSPECTED, FAILED] * len(lost))


def test_nodes_that_fail_one_after_the_other_are_no_mass_silence() -> None:
    agents = _nodes(5)
    scene = Scene(*agents)
    for alive in range(5, 0, -1):
        scene.pass_time(30, agents[:alive])

    assert scene.told().count(FAILED) == 4


def test_a_restarted_detector_finds_a_node_that_died_while_it_was_dead() -> None:
    lost, *others = agents = _nodes(4)
    before = Scene(*agents)
    before.pass_time(10)
    scene = Scene(*agents)
    for agent in agents:
        scene.judge.remember(agent.heartbeat(), scene.now)

    scene.pass_time(SETTINGS.grace_s, others)
    assert scene.told() == []
    scene.pass_time(20, others)

    assert scene.told() == [SUSPECTED, FAILED]
    assert scene.verdicts[0].incarnation == lost.incarnation


def test_a_remembered_heartbeat_neither_replaces_nor_accuses() -> None:
    agent = Agent("node-1", **_job(_rank(0, state=RankState.EXITED, exit_code=1)))
    old = agent.heartbeat()
    scene = Scene(agent)
    scene.beat(agent)
    scene.verdicts.clear()

    scene.judge.remember(old, scene.now)

    assert scene.judge.hear(old, scene.now) == []


def test_a_failed_node_is_forgotten_in_the_end() -> None:
    forgetful = DetectorSettings(forget_s=60.0)
    lost, *others = agents = _nodes(3)
    scene = Scene(*agents, settings=forgetful)
    scene.pass_time(5)
    scene.pass_time(120, others)
    assert scene.told() == [SUSPECTED, FAILED]

    scene.beat(lost)

    assert scene.told() == [SUSPECTED, FAILED]


# ---- ranks


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"exit_code": -9, "detail": "the last line"}, "by signal 9\nthe last line"),
        ({"exit_code": 1}, "with status 1"),
        ({"exit_code": None}, "with unknown status"),
    ],
)
def test_a_dead_rank_is_told_at_once_and_once(facts: dict[str, object], words: str) -> None:
    agent = Agent("node-1", **_job(_rank(0), _rank(1)))
    scene = Scene(agent)
    scene.pass_time(2)

    agent.facts = _job(_rank(0), _rank(1, state=RankState.EXITED, **facts))
    scene.beat(agent)
    assert scene.told() == [VerdictKind.RANK_EXITED]
    scene.pass_time(5)

    assert len(scene.verdicts) == 1
    verdict = scene.verdicts[0]
    assert (verdict.job_id, verdict.generation, verdict.rank) == (JOB, 1, 1)
    assert words in verdict.detail


def test_a_rank_that_ends_well_is_no_failure() -> None:
    scene = Scene(Agent("node-1", **_job(_rank(0, state=RankState.EXITED, exit_code=0))))
    scene.pass_time(5)

    assert scene.told() == []


def test_an_unknown_status_is_no_failure_once_the_launcher_says_that_all_ended_well() -> None:
    scene = Scene(Agent("node-1", **_job(_rank(0, state=RankState.EXITED), finished=True)))
    scene.pass_time(5)

    assert scene.told() == []


def test_ranks_that_a_fence_has_ended_are_no_failure() -> None:
    first, second = agents = _nodes(2)
    first.facts = _job(_rank(0, generation=2), generation=2)
    second.facts = _job(_rank(1, generation=1, state=RankState.EXITED, exit_code=-9), generation=1)
    scene = Scene(*agents)
    scene.pass_time(5)

    assert scene.told() == []


def test_the_same_rank_may_fail_again_in_the_next_generation() -> None:
    agent = Agent("node-1")
    scene = Scene(agent)
    for generation in (1, 2):
        agent.facts = _job(_rank(0, generation, state=RankState.EXITED, exit_code=1), generation=generation)
        scene.pass_time(2)

    assert [verdict.generation for verdict in scene.verdicts] == [1, 2]


# ---- hangs


def _hanging(finished_steps: list[int | None]) -> list[Agent]:
    return [
        Agent(f"node-{rank}", **_job(_rank(rank, finished_step=step), hang_timeout_s=20.0))
        for rank, step in enumerate(finished_steps)
    ]


def test_a_job_without_progress_is_called_hung_and_the_furthest_behind_is_named() -> None:
    agents = _hanging([8, 7, 7, 8])
    scene = Scene(*agents)
    scene.pass_time(19)
    assert scene.told() == []
    scene.pass_time(30)

    assert scene.told() == [VerdictKind.RANK_HUNG]
    assert scene.verdicts[0].rank == 1
    assert "finished step 7 last" in scene.verdicts[0].detail


def test_one_rank_that_advances_keeps_its_job_from_being_hung() -> None:
    agents = _hanging([0, 0])
    scene = Scene(*agents)
    for step in range(5):
        agents[0].facts = _job(_rank(0, finished_step=step), hang_timeout_s=20.0)
        scene.pass_time(15)

    assert scene.told() == []


def test_a_held_rank_never_hangs_and_one_that_does_not_get_there_does() -> None:
    agents = _hanging([8, 8])
    scene = Scene(*agents)
    scene.pass_time(15)
    agents[0].facts = _job(_rank(0, finished_step=8, held_step=8), hang_timeout_s=20.0)
    scene.pass_time(15)
    assert scene.told() == [], "a rank that has just been held is progress"
    scene.pass_time(10)
    assert [(verdict.kind, verdict.rank) for verdict in scene.verdicts] == [(VerdictKind.RANK_HUNG, 1)]


def test_a_job_whose_ranks_are_all_held_never_hangs() -> None:
    held = [Agent(f"node-{r}", **_job(_rank(r, finished_step=8, held_step=8), hang_timeout_s=20.0)) for r in (0, 1)]
    scene = Scene(*held)
    scene.pass_time(60)
    assert scene.told() == []


def test_a_stall_of_the_detector_is_no_hang() -> None:
    scene = Scene(*_hanging([3, 3]))
    scene.pass_time(15)
    scene.now += 15
    scene.pass_time(15)

    assert scene.told() == []


def test_a_job_without_a_timeout_or_without_running_ranks_never_hangs() -> None:
    endless = Agent("node-1", **_job(_rank(0)))
    ended = Agent("node-2", **_job(_rank(1, state=RankState.EXITED, exit_code=0), job_id="job-2", hang_timeout_s=1.0))
    scene = Scene(endless, ended)
    scene.pass_time(60)

    assert scene.told() == []
