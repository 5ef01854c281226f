"""The rendezvous handler and the agent link against agents on real sockets, without launchers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from gemini_ft.agent.launcher.agent_link import SocketAgentLink
from gemini_ft.agent.launcher.local_agents import LocalAgents
from gemini_ft.agent.launcher.rendezvous import GeminiRendezvousHandler, create_handler_factory
from gemini_ft.contracts.errors import (
    ConfigurationError,
    JobClosedError,
    NotFoundError,
    UnavailableError,
    WaitTimeoutError,
)
from gemini_ft.contracts.local_protocol import Finished, LauncherHello, WorkersExited, WorkersStarted

JOB = "job-1"
SOON = timedelta(seconds=10)


def wait_for(what: str, is_true: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # The handler leaves in it what torch copies into ranks.
    for name in ("GEMINI_FT_AGENT_SOCKET", "GEMINI_FT_JOB", "GEMINI_FT_GENERATION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[LocalAgents]:
    with LocalAgents(tmp_path, JOB, num_slots=2, num_standbys=1) as agents:
        yield agents


class Node:
    """One node's handler, and its rendezvous in a thread."""

    def __init__(self, agents: LocalAgents, index: int, store_timeout: timedelta = SOON) -> None:
        self.link = SocketAgentLink(agents.socket_path(index), JOB, num_local_ranks=1)
        self.handler = GeminiRendezvousHandler(self.link, JOB, store_timeout)
        self._pool = ThreadPoolExecutor(1)

    def join(self) -> Future[RendezvousInfo]:
        return self._pool.submit(self.handler.next_rendezvous)

    def close(self) -> None:
        self.link.close(timedelta(seconds=1))
        self._pool.shutdown()


@pytest.fixture
def nodes(agents: LocalAgents) -> Iterator[list[Node]]:
    nodes = [Node(agents, index) for index in range(3)]
    yield nodes
    if not nodes[2].link.is_closed():
        agents.close_job("stopped")
    for node in nodes:
        node.close()


def test_slots_meet_on_a_fresh_store_in_each_generation(agents: LocalAgents, nodes: list[Node]) -> None:
    ports = []
    for generation in (1, 2):
        agents.order()
        infos = [future.result(20) for future in [node.join() for node in nodes[:2]]]
        assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
        assert [node.handler.generation for node in nodes[:2]] == [generation] * 2
        assert os.environ["GEMINI_FT_GENERATION"] == str(generation)
        bootstrap = {
            (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
            for info in infos
            if info.bootstrap_store_info
        }
        assert len(bootstrap) == 1
        ports.append(bootstrap.pop()[1])
        assert not infos[1].store.check(["seen"]), "an old generation's key is in the new store"
        infos[0].store.set("seen", "yes")
        assert infos[1].store.get("seen") == b"yes"
    assert ports[0] != ports[1]


def test_the_store_listens_on_the_assigned_address_only(agents: LocalAgents, nodes: list[Node]) -> None:
    agents.order()
    for future in [node.join() for node in nodes[:2]]:
        info = future.result(20)
    assert info.bootstrap_store_info is not None
    port = info.bootstrap_store_info.master_port
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]


def test_ranks_must_leave_once_a_newer_generation_is_ordered(agents: LocalAgents, nodes: list[Node]) -> None:
    agents.order()
    for future in [node.join() for node in nodes[:2]]:
        future.result(20)
    handler = nodes[1].handler
    assert handler.num_nodes_waiting() == 0
    agents.order(assign=False)
    assert handler.num_nodes_waiting() == 1


def test_a_failure_during_a_recovery_leads_on_to_the_next_generation(agents: LocalAgents, nodes: list[Node]) -> None:
    agents.order()
    joining = nodes[1].join()
    wait_for("slot 1 to be assigned", lambda: nodes[1].link.ordered_generation() == 1)
    # Slot 0 never opens generation 1's store: its node is lost, the standby takes the slot, and a fence comes first.
    agents.order(assign=False)
    agents.order(slots={0: 2, 1: 1})
    standby = nodes[2].join()
    assert (joining.result(20).rank, standby.result(20).rank) == (1, 0)
    assert nodes[1].handler.generation == nodes[2].handler.generation == 3


def test_a_store_that_is_gone_again_is_not_joined(agents: LocalAgents, nodes: list[Node]) -> None:
    agents.order()
    nodes[0].link.publish_store(1, "127.0.0.1", 1)
    joining = nodes[1].join()
    agents.order()
    assert nodes[0].join().result(20).rank == 0
    assert joining.result(20).rank == 1
    assert nodes[1].handler.generation == 2


def test_waiting_for_a_store_is_bounded_and_named(agents: LocalAgents) -> None:
    node = Node(agents, 1, store_timeout=timedelta(seconds=0.2))
    agents.order()
    with pytest.raises(RendezvousTimeoutError, match="slot 0 to open the store of generation 1"):
        node.join().result(20)
    node.close()


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "stopped"])
def test_a_parked_standby_hears_that_the_job_is_closed(agents: LocalAgents, nodes: list[Node], outcome: str) -> None:
    agents.order()
    parked = nodes[2].join()
    agents.close_job(outcome)
    with pytest.raises(RendezvousGracefulExitError):
        parked.result(20)
    handler = nodes[2].handler
    assert handler.closed is not None
    assert handler.closed.facts["outcome"] == outcome
    assert handler.is_closed()
    assert handler.num_nodes_waiting() == 1


def test_a_parked_standby_goes_on_learning(agents: LocalAgents) -> None:
    polls: list[float] = []
    link = SocketAgentLink(agents.socket_path(2), JOB, num_local_ranks=1)
    handler = GeminiRendezvousHandler(link, JOB, while_parked=lambda: polls.append(time.monotonic()))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(handler.next_rendezvous)
        wait_for("two polls while parked", lambda: len(polls) >= 2)
        agents.close_job("stopped")
        with pytest.raises(RendezvousGracefulExitError):
            joining.result(20)
    handler.shutdown()


def test_an_unknown_job_is_refused(agents: LocalAgents) -> None:
    with pytest.raises(NotFoundError, match="check --job"):
        SocketAgentLink(agents.socket_path(0), "job-2", 1)


def test_an_absent_agent_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"no agent answers at .*/none\.sock"):
        SocketAgentLink(str(tmp_path / "none.sock"), JOB, 1, connect_timeout=timedelta(seconds=0.3))
    with pytest.raises(ConfigurationError, match="107 bytes"):
        SocketAgentLink("/" + "x" * 200, JOB, 1)


def test_a_restarted_agent_hears_of_running_ranks_and_of_all_it_missed(agents: LocalAgents) -> None:
    link = SocketAgentLink(agents.socket_path(0), JOB, num_local_ranks=2)
    agents.order()
    link.workers_started(1, {0: 11, 1: 12})
    wait_for("the started ranks", lambda: agents.of_kind(WorkersStarted))
    agents.stop_agent(0)
    link.workers_exited(1, {0: 0})
    link.workers_exited(1, {1: 0}, "the end")
    link.finished(1)
    assert link.ordered_generation() == 1
    assert not link.is_closed()
    with pytest.raises(WaitTimeoutError, match="an assignment above generation 1"):
        link.next_assignment(1, timedelta(seconds=0.2))
    agents.start_agent(0)
    link.close(SOON)
    hello = agents.of_kind(LauncherHello)[1][1]
    assert (hello.generation, hello.worker_pids) == (0, {})
    assert [message.exit_codes for _, message in agents.of_kind(WorkersExited)] == [{0: 0}, {1: 0}]
    assert len(agents.of_kind(Finished)) == 1


def test_a_request_survives_the_agent_s_restart(agents: LocalAgents) -> None:
    link = SocketAgentLink(agents.socket_path(0), JOB, num_local_ranks=1)
    link.workers_started(0, {0: 11})
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(link.next_assignment, 0, SOON)
        wait_for("the news", lambda: agents.of_kind(WorkersStarted))
        agents.stop_agent(0)
        agents.start_agent(0)
        agents.order()
        assert asking.result(20).generation == 1
    assert agents.of_kind(LauncherHello)[-1][1].worker_pids == {0: 11}
    agents.close_job("succeeded")
    with pytest.raises(JobClosedError):
        link.next_assignment(1, SOON)
    link.close(SOON)


def test_the_entry_point_returns_the_creator_of_handlers() -> None:
    creator = create_handler_factory()
    with pytest.raises(ConfigurationError, match="107 bytes"):
        creator(RendezvousParameters("gemini", "/" + "x" * 200, JOB, 1, 1))
