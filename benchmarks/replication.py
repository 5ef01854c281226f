"""How long a checkpoint takes to be sealed on two nodes, both ways at once, against what memory and sockets can do.

Two agents with one rank each, four processes on this machine. Each rank copies its shard into its buffer chunk by
chunk, with a digest each; its agent streams the chunks to the other one while that goes on. Beside it, in the same
run: a plain copy of the same size, and the same bytes both ways over plain TCP sockets between two processes.

    python benchmarks/replication.py [--shard-mib 512] [--repeats 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

from gemini_ft.agent.replicas.service import LocalReplicaService
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.contracts.buffer_format import ShardBuffer, digest
from gemini_ft.contracts.control_page import CONTROL_PAGE_BYTES, RankPage
from gemini_ft.contracts.ids import new_incarnation
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged
from gemini_ft.contracts.messages import Address, Assign, JobSpec

JOB = "bench-replication"
KEY = "5a" * 32
PATIENCE = timedelta(seconds=120)
MIB = 1 << 20
NUM_WARM_UPS = 2
CHUNKS_A_NOTICE = 4
POLL_S = 0.001


def map_file(path: str) -> memoryview:
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0))


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def rank_main(arguments: argparse.Namespace) -> None:
    """Stage a version for each line `step base_step` on standard input, and tell what a rank tells its agent."""
    source = memoryview(os.urandom(MIB) * arguments.shard_mib)
    buffers = [ShardBuffer.open(map_file(path)) for path in arguments.buffers]
    for line in sys.stdin:
        step, base_step = json.loads(line)
        index = step % 2  # steps follow one another, so the other buffer holds the base
        buffer = buffers[index]
        header = buffer.begin(JOB, 1, arguments.rank, 2, step, len(source))
        say(kind="begun", step=step, buffer=index, base_step=base_step)
        size = buffer.geometry.chunk_bytes
        for chunk, target in buffer.chunks(header):
            piece = source[chunk * size : (chunk + 1) * size]
            buffer.set_chunk_digest(chunk, digest(piece))
            target[:] = piece
            if (chunk + 1) % CHUNKS_A_NOTICE == 0:
                say(kind="staged", step=step, num_chunks=chunk + 1)
        say(kind="sealed", step=step, digest=buffer.seal(b"{}").shard_digest.hex(), at=time.monotonic())


async def agent_main(arguments: argparse.Namespace) -> None:
    """Be the agent of one node, and the parent of its rank. Speaks JSON lines with the benchmark."""
    rank = arguments.rank
    name = f"node-{rank}"
    service = LocalReplicaService(ReplicaSettings(memory_dir=Path(arguments.memory_dir) / name))
    address = await service.start(None)
    spec = JobSpec(name="bench", num_nodes=2, num_ranks_per_node=1, num_replicas=2)
    await service.open_job(JOB, KEY, spec, name, new_incarnation())
    await service.fence(1)
    say(address=address.model_dump())
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    addresses = json.loads(await reader.readline())
    await service.assign(
        Assign(
            job_id=JOB,
            generation=1,
            slots={0: "node-0", 1: "node-1"},
            addresses={node: Address(**value) for node, value in addresses.items()},
            placement={0: (0, 1), 1: (1, 0)},
            restore_step=None,
        )
    )
    page = RankPage(map_file(str(service.open_rank(rank, 1)))[:CONTROL_PAGE_BYTES])
    paths = await service.reserve(rank, 2, arguments.shard_mib * MIB, 4096, PATIENCE)
    child = await asyncio.create_subprocess_exec(
        *own_command("rank", rank, arguments),
        "--buffers",
        *map(str, paths),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    say(ready=True)
    while line := await reader.readline():
        step, base_step = json.loads(line)
        child.stdin.write(line)
        began = time.monotonic()
        sealed = 0.0
        while not sealed:
            notice = json.loads(await child.stdout.readline())
            match notice["kind"]:
                case "begun":
                    size_bytes = arguments.shard_mib * MIB
                    service.fill_begun(
                        FillBegun(
                            generation=1,
                            rank=rank,
                            step=step,
                            buffer=notice["buffer"],
                            data_bytes=size_bytes,
                            base_step=base_step,
                        )
                    )
                case "staged":
                    service.staged(Staged(generation=1, rank=rank, step=step, num_chunks=notice["num_chunks"]))
                case _:
                    service.sealed(Sealed(generation=1, rank=rank, step=step, shard_digest=notice["digest"]))
                    sealed = notice["at"]
        while page.sealed_everywhere_step != step:  # noqa: ASYNC110  (shared memory has no event)
            await asyncio.sleep(POLL_S)
        say(began=began, staged=sealed, sealed_everywhere=time.monotonic())
    child.stdin.close()
    await child.wait()
    await service.close_job()
    await service.close()


def socket_main(arguments: argparse.Namespace) -> None:
    """One end of the plain socket: send a shard and receive one at the same time, for each line."""
    if arguments.port:
        sock = socket.create_connection(("127.0.0.1", arguments.port))
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            say(port=server.getsockname()[1])
            sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    source, sink = (
        memoryview(bytearray(os.urandom(MIB) * arguments.shard_mib)),
        memoryview(bytearray(arguments.shard_mib * MIB)),
    )
    say(ready=True)

    def send() -> None:
        for start in range(0, len(source), MIB):
            sock.sendall(source[start : start + MIB])

    for _ in sys.stdin:
        began = time.monotonic()
        sender = threading.Thread(target=send)
        sender.start()
        received = 0
        while received < len(sink):
            received += sock.recv_into(sink[received : received + MIB])
        sender.join()
        say(began=began, sealed_everywhere=time.monotonic())


def memcpy_s(shard_mib: int) -> float:
    source, sink = memoryview(bytearray(os.urandom(MIB) * shard_mib)), memoryview(bytearray(shard_mib * MIB))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        sink[:] = source
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def own_command(role: str, rank: int, arguments: argparse.Namespace) -> list[str]:
    return [sys.executable, __file__, "--role", role, "--rank", str(rank), "--shard-mib", str(arguments.shard_mib)]


class Pair:
    """Two processes that speak JSON lines; they end with this object."""

    def __init__(self, commands: list[list[str]]) -> None:
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands
        ]

    def tell(self, what: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()

    def hear(self) -> list[dict[str, float]]:
        return [self.hear_one(index) for index in range(len(self._processes))]

    def hear_one(self, index: int) -> dict[str, float]:
        stream = self._processes[index].stdout
        assert stream is not None
        line = stream.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with {self._processes[index].wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=60)


def measure_replication(arguments: argparse.Namespace) -> dict[str, list[float]]:
    folder = tempfile.mkdtemp(prefix="gemini-bench-", dir=arguments.tmpfs)
    try:
        pair = Pair([[*own_command("agent", rank, arguments), "--memory-dir", folder] for rank in range(2)])
        pair.tell({f"node-{rank}": answer["address"] for rank, answer in enumerate(pair.hear())})
        pair.hear()
        rows: dict[str, list[float]] = {"staged_s": [], "sealed_everywhere_s": [], "after_local_seal_s": []}
        for step in range(arguments.repeats + NUM_WARM_UPS):
            pair.tell([step, step - 1 if step else None])
            answers = pair.hear()
            began, staged, sealed = (
                pick(answer[key] for answer in answers)
                for pick, key in ((min, "began"), (max, "staged"), (max, "sealed_everywhere"))
            )
            if step >= NUM_WARM_UPS:
                rows["staged_s"].append(staged - began)
                rows["sealed_everywhere_s"].append(sealed - began)
                rows["after_local_seal_s"].append(sealed - staged)
        pair.end()
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_sockets(arguments: argparse.Namespace) -> list[float]:
    server = Pair([own_command("socket", 0, arguments)])
    port = str(int(server.hear()[0]["port"]))
    client = Pair([[*own_command("socket", 1, arguments), "--port", port]])
    server.hear()
    client.hear()
    times = []
    for _ in range(arguments.repeats + NUM_WARM_UPS):
        server.tell("go")
        client.tell("go")
        answers = server.hear() + client.hear()
        times.append(
            max(answer["sealed_everywhere"] for answer in answers) - min(answer["began"] for answer in answers)
        )
    server.end()
    client.end()
    return times[NUM_WARM_UPS:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard-mib", type=int, default=512, help="size of each rank's shard")
    parser.add_argument("--repeats", type=int, default=7, help="measured versions, after two that warm up")
    parser.add_argument("--tmpfs", default="/dev/shm", help="where the replica store lives")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    for name in ("role", "memory-dir"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    for name in ("rank", "port"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--buffers", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    match arguments.role:
        case "rank":
            rank_main(arguments)
        case "agent":
            asyncio.run(agent_main(arguments))
        case "socket":
            socket_main(arguments)
        case _:
            report(arguments)


def report(arguments: argparse.Namespace) -> None:
    rows = measure_replication(arguments)
    sockets = measure_sockets(arguments)
    copy_s = memcpy_s(arguments.shard_mib)
    sealed_s, socket_s = statistics.median(rows["sealed_everywhere_s"]), statistics.median(sockets)
    print(
        f"{arguments.shard_mib} MiB a rank, two nodes, both ways at once; {os.cpu_count()} CPUs, {platform.machine()}"
    )
    for name, values in (*rows.items(), ("plain_sockets_s", sockets)):
        print(f"  {name:20} {statistics.median(values):.3f} [{min(values):.3f}-{max(values):.3f}]")
    print(f"  {'memcpy_s':20} {copy_s:.3f}")
    print(f"  sealed everywhere / plain sockets {sealed_s / socket_s:.2f}, / memcpy {sealed_s / copy_s:.1f}")
    if arguments.json:
        facts = rows | {"plain_sockets_s": sockets, "memcpy_s": copy_s, "shard_mib": arguments.shard_mib}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
