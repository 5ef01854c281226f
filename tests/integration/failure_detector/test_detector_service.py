"""The detector as a process on a real NATS: killed, restarted, cut off and fed with garbage."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, DeliverPolicy

from gemini_ft.contracts import subjects
from gemini_ft.contracts.errors import AuthenticationError, WaitTimeoutError
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.messages import Address, Heartbeat, RankState, RankStatus, Verdict, VerdictKind
from gemini_ft.failure_detector.service import FailureDetector
from gemini_ft.failure_detector.settings import DetectorSettings
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.localstack.processes import ManagedProcess
from gemini_ft.localstack.waiting import wait_until
from gemini_ft.security.nats_access import NatsAccess
from gemini_ft.security.secret_files import write_secret

INTERVAL_S = 0.1
QUICK = {"PATIENCE_S": "0.5", "ACCEPTABLE_PAUSE_S": "0.5", "STALL_S": "0.5", "GRACE_S": "1"}


class Fleet:
    """Agents that send heartbeats as long as they are not silenced."""

    def __init__(self, client: Client, num_nodes: int) -> None:
        self._client = client
        self.incarnations = {f"node-{number}": new_incarnation() for number in range(num_nodes)}
        self.sequences = dict.fromkeys(self.incarnations, 0)
        self.silenced: set[str] = set()
        self.ranks: dict[str, tuple[RankStatus, ...]] = {}
        self._task = asyncio.create_task(self._send_forever())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _send_forever(self) -> None:
        while True:
            for node_id in self.incarnations.keys() - self.silenced:
                await self._client.publish(subjects.heartbeat_subject(node_id), self._next(node_id))
            await asyncio.sleep(INTERVAL_S)

    def _next(self, node_id: str) -> bytes:
        self.sequences[node_id] += 1
        heartbeat = Heartbeat(
            node_id=node_id,
            incarnation=self.incarnations[node_id],
            sequence=self.sequences[node_id],
            address=Address(host="127.0.0.1", port=1),
            interval_s=INTERVAL_S,
            job_id="job-1",
            ordered_generation=1,
            ranks=self.ranks.get(node_id, ()),
        )
        return heartbeat.model_dump_json().encode()


class Verdicts:
    """What the stream of verdicts holds, read from its beginning."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def all(self) -> list[Verdict]:
        jetstream = self._client.jetstream()
        config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
        subscription = await jetstream.subscribe(subjects.VERDICTS, ordered_consumer=True, config=config)
        num_messages = (await jetstream.stream_info(subjects.VERDICT_STREAM)).state.messages
        found = [Verdict.model_validate_json((await subscription.next_msg(5)).data) for _ in range(num_messages)]
        await subscription.unsubscribe()
        return found

    async def told(self) -> list[tuple[VerdictKind, str]]:
        return [(verdict.kind, verdict.node_id) for verdict in await self.all()]


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            raise WaitTimeoutError.of(what, timeout_s)
        await asyncio.sleep(0.05)


def detector_process(server: NatsServer, directory: Path, *options: str, **settings: str) -> ManagedProcess:
    token_file = write_secret(directory / "nats-token", server.token or "")
    prefix = "GEMINI_FT_DETECTOR_"
    return ManagedProcess(
        [
            *(sys.executable, "-m", "gemini_ft.failure_detector"),
            *("--nats", server.url, "--nats-token-file", str(token_file), "--ready-file", str(directory / "ready")),
            *options,
        ],
        name="failure detector",
        log_path=directory / "detector.log",
        env={**os.environ, **{prefix + name: value for name, value in (QUICK | settings).items()}},
        parent_death_signal=signal.SIGKILL,
    )


def start_ready(process: ManagedProcess, directory: Path) -> None:
    (directory / "ready").unlink(missing_ok=True)
    process.start()
    wait_until((directory / "ready").exists, "the failure detector to be ready", 20.0)


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    client = Client()

    async def ignore(_: Exception) -> None:
        """The connection breaks on purpose in these tests."""

    await client.connect(
        nats_server.url,
        token=nats_server.token,
        error_cb=ignore,
        reconnect_time_wait=0.05,
        max_reconnect_attempts=-1,
    )
    yield client
    await client.close()


@pytest.fixture
async def fleet(client: Client) -> AsyncIterator[Fleet]:
    fleet = Fleet(client, 4)
    yield fleet
    await fleet.close()


@pytest.fixture
def detector(nats_server: NatsServer, tmp_path: Path) -> Iterator[ManagedProcess]:
    process = detector_process(nats_server, tmp_path)
    start_ready(process, tmp_path)
    yield process
    process.kill()


@pytest.mark.usefixtures("detector")
async def test_silence_and_dead_ranks_become_verdicts_in_the_stream(client: Client, fleet: Fleet) -> None:
    verdicts = Verdicts(client)
    await until(lambda: _heard(fleet), "the first heartbeats")
    fleet.ranks["node-1"] = (RankStatus(rank=1, generation=1, pid=7, state=RankState.EXITED, exit_code=-9),)
    await until(lambda: _has(verdicts, VerdictKind.RANK_EXITED), "the verdict about the rank")
    fleet.silenced.add("node-2")
    await until(lambda: _has(verdicts, VerdictKind.FAILED), "the verdict about the node")
    fleet.silenced.clear()
    await until(lambda: _has(verdicts, VerdictKind.RECOVERED), "the node's recovery")

    assert await verdicts.told() == [
        (VerdictKind.RANK_EXITED, "node-1"),
        (VerdictKind.SUSPECTED, "node-2"),
        (VerdictKind.FAILED, "node-2"),
        (VerdictKind.RECOVERED, "node-2"),
    ]


async def test_a_killed_nats_costs_no_verdict_and_no_node(
    nats_server: NatsServer, client: Client, fleet: Fleet, detector: ManagedProcess
) -> None:
    verdicts = Verdicts(client)
    await until(lambda: _heard(fleet), "the first heartbeats")
    nats_server.kill()
    await asyncio.to_thread(wait_until, lambda: "cannot be used" in detector.log_tail(), "the loss to be noticed", 20.0)
    nats_server.start()
    await until(lambda: _lists(verdicts), "the stream to be back")
    assert detector.running

    fleet.silenced.add("node-0")
    await until(lambda: _has(verdicts, VerdictKind.FAILED), "the verdict after the restart")

    assert await verdicts.told() == [(VerdictKind.SUSPECTED, "node-0"), (VerdictKind.FAILED, "node-0")]


async def test_a_killed_detector_finds_who_died_meanwhile_and_blames_nobody_else(
    client: Client, fleet: Fleet, detector: ManagedProcess, tmp_path: Path
) -> None:
    verdicts = Verdicts(client)
    await until(lambda: _heard(fleet), "the first heartbeats")
    detector.kill()
    fleet.silenced.add("node-3")
    start_ready(detector, tmp_path)
    await until(lambda: _has(verdicts, VerdictKind.FAILED), "the verdict about the node that died meanwhile")

    assert await verdicts.told() == [(VerdictKind.SUSPECTED, "node-3"), (VerdictKind.FAILED, "node-3")]


async def test_a_stopped_detector_blames_nobody_when_it_continues(
    client: Client, fleet: Fleet, detector: ManagedProcess
) -> None:
    verdicts = Verdicts(client)
    await until(lambda: _heard(fleet), "the first heartbeats")
    detector.send_signal(signal.SIGSTOP)
    resumed_after = {node: sequence + 30 for node, sequence in fleet.sequences.items()}
    await until(lambda: _reached(fleet, resumed_after), "three seconds of heartbeats")
    detector.send_signal(signal.SIGCONT)
    fleet.silenced.add("node-1")
    await until(lambda: _has(verdicts, VerdictKind.FAILED), "a verdict that is right")

    assert {node for _, node in await verdicts.told()} == {"node-1"}


@pytest.mark.usefixtures("detector")
async def test_garbage_and_foreign_heartbeats_are_ignored(
    client: Client, fleet: Fleet, detector: ManagedProcess
) -> None:
    await client.publish("gemini.heartbeat.node-0", b"\xff{")
    await client.publish("gemini.heartbeat.node-9", fleet._next("node-0"))
    await asyncio.to_thread(
        wait_until,
        lambda: "that is no heartbeat" in detector.log_tail() and "which is not its subject" in detector.log_tail(),
        "both to be refused in the log",
        20.0,
    )

    assert detector.running


async def test_jumps_of_the_wall_clock_blame_nobody(
    nats_server: NatsServer, client: Client, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_time = time.time
    jumps = [0.0, 27.0, -3600.0, 86_400.0]
    monkeypatch.setattr(time, "time", lambda: true_time() + jumps[int(time.monotonic() * 10) % len(jumps)])
    settings = DetectorSettings(patience_s=0.5, acceptable_pause_s=0.5, stall_s=0.5, grace_s=0.5)
    assert nats_server.token
    access = NatsAccess(url=nats_server.url, token_file=nats_server.token_file)
    detector = FailureDetector(access, settings)
    running = asyncio.create_task(detector.run())
    await detector.ready.wait()
    enough = {node: sequence + 30 for node, sequence in fleet.sequences.items()}
    await until(lambda: _reached(fleet, enough), "three seconds of heartbeats")
    fleet.silenced.add("node-2")
    verdicts = Verdicts(client)
    await until(lambda: _has(verdicts, VerdictKind.FAILED), "the one right verdict")
    running.cancel()
    await asyncio.wait([running])

    assert {node for _, node in await verdicts.told()} == {"node-2"}


async def test_a_wrong_token_is_refused_with_a_sentence(nats_server: NatsServer, tmp_path: Path) -> None:
    access = NatsAccess(url=nats_server.url, token_file=write_secret(tmp_path / "guessed", "guessed"))
    with pytest.raises(AuthenticationError, match="refuses the failure detector; check its credentials or token file"):
        await FailureDetector(access, DetectorSettings()).run()


def test_a_missing_token_file_ends_with_one_sentence(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        process = detector_process(server, tmp_path)
        (tmp_path / "nats-token").unlink()
        process.start()

        assert process.wait(20.0) == 2
        assert process.log_tail().startswith("error: --nats-token-file: ")


async def _heard(fleet: Fleet) -> bool:
    return min(fleet.sequences.values()) > 10


async def _reached(fleet: Fleet, sequences: dict[str, int]) -> bool:
    return all(fleet.sequences[node] >= sequence for node, sequence in sequences.items())


async def _has(verdicts: Verdicts, kind: VerdictKind) -> bool:
    return kind in {told for told, _ in await verdicts.told()}


async def _lists(verdicts: Verdicts) -> bool:
    try:
        await verdicts.all()
    except TimeoutError:
        return False
    return True


async def test_metrics_and_json_logs_tell_what_it_heard_and_concluded(
    nats_server: NatsServer, client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    detector = detector_process(nats_server, tmp_path, "--metrics-listen", "127.0.0.1:0", "--log-format", "json")
    start_ready(detector, tmp_path)
    try:
        verdicts = Verdicts(client)
        await until(lambda: _heard(fleet), "the first heartbeats")
        fleet.ranks["node-1"] = (RankStatus(rank=1, generation=1, pid=7, state=RankState.EXITED, exit_code=-9),)
        fleet.silenced.add("node-2")
        await until(lambda: _has(verdicts, VerdictKind.FAILED), "the verdict about the node")
        lines = [json.loads(line) for line in detector.log_path.read_text().splitlines()]
        (url,) = re.findall(r"serving metrics at (\S+)", "\n".join(line["message"] for line in lines))
        async with httpx.AsyncClient() as http:
            told = (await http.get(url)).text.splitlines()
    finally:
        detector.kill()

    values = dict(line.rsplit(" ", 1) for line in told if line.startswith("gemini_ft_"))
    assert float(values["gemini_ft_detector_heartbeats_total"]) >= 4
    assert float(values['gemini_ft_detector_phi{node_id="node-2"}']) >= DetectorSettings().fail_phi
    assert float(values['gemini_ft_detector_phi{node_id="node-0"}']) < DetectorSettings().suspect_phi
    assert values['gemini_ft_detector_nodes{status="failed"}'] == "1.0"
    assert values['gemini_ft_detector_nodes{status="alive"}'] == "3.0"
    assert values['gemini_ft_detector_verdicts_total{kind="rank_exited"}'] == "1.0"
    assert values["gemini_ft_nats_connected"] == "1.0"
    about = [line for line in lines if line.get("rank") == 1]
    assert [(line["process"], line["node_id"], line["job_id"], line["generation"]) for line in about] == [
        ("failure-detector", "node-1", "job-1", 1)
    ]
