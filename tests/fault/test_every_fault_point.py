"""Kill a rank or an agent before and after each write of the protocol, one by one, in a training that goes on.

After each the newest committed version must come back byte for byte, and every later step must be the one of the
undisturbed run. When an agent has been killed, so is a rank: what the agent left behind is what must be restored.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from live_job import LiveJob
from replica_cluster import flip_bit

from gemini_ft.faults import FAULT_POINTS, FAULT_VARIABLE

pytestmark = pytest.mark.timeout(180)

RANK_POINTS = sorted(point for point in FAULT_POINTS if point.startswith("rank."))
AGENT_POINTS = sorted(FAULT_POINTS - set(RANK_POINTS))
RANK, PEER = 0, 1


def fault(point: str) -> str:
    """The second passage is in the midst of things; of chunks, one in the middle of a version is."""
    if point.startswith("store.") or point.endswith("_restore"):
        return f"{point}=kill"
    return f"{point}:{20 if 'chunk' in point else 2}=kill"


@pytest.mark.parametrize("point", RANK_POINTS)
def test_a_rank_killed_at_this_point(job: LiveJob, point: str) -> None:
    mark = job.mark()
    if point.endswith("_restore"):
        job.arm_rank_at_start(RANK, fault(point))
        job.kill_rank(PEER)
        mark = job.wait_generation(mark, f"a rank to die at {point}", 2)
    else:
        job.arm_rank(RANK, fault(point))
    job.recovered(mark)


@pytest.mark.parametrize("point", AGENT_POINTS)
def test_an_agent_killed_at_this_point(job: LiveJob, point: str) -> None:
    mark, name = job.mark(), job.node_of(RANK)
    recovers_already = PROVOCATIONS.get(point, live_on)(job, name, fault(point))
    job.stack.wait_agent_killed(name, f"the agent to reach {point}")
    if not recovers_already:
        job.kill_rank(PEER)
    job.stack.start_agent(name)
    # While the agent is away no version can be committed, and steps go on.
    job.recovered(mark, most_steps_redone=None)


def live_on(job: LiveJob, name: str, fault: str) -> bool:
    """The agent takes up its job again, which leads past nearly all points."""
    job.stack.arm_agent(name, fault)
    return False


def reboot(job: LiveJob, name: str, fault: str) -> bool:
    """The machine comes back without its memory, which is set aside and filled again in the recovery."""
    job.stack.kill_node(name)
    job.stack.nodes[name].agent.start({FAULT_VARIABLE: fault})
    return True


def damage(job: LiveJob, name: str, fault: str) -> bool:
    """A replica was damaged while no agent ran; the next one finds that out and gives it up."""
    job.stack.kill_agent(name)
    flip_bit(job.memory(name), PEER, max(job.held_steps(name, PEER)))
    job.stack.nodes[name].agent.start({FAULT_VARIABLE: fault})
    return False


PROVOCATIONS: dict[str, Callable[[LiveJob, str, str], bool]] = {
    "store.before_allocate": reboot,
    "store.before_rename": reboot,
    "store.after_rename": reboot,
    "store.before_discard": damage,
    "store.after_discard": damage,
}


def test_the_run_ends_as_if_nothing_had_happened(job: LiveJob) -> None:
    job.end()
