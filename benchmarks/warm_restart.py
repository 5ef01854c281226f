"""How long a restart takes: from the SIGKILL of one rank to the end of the next finished step on all ranks.

Four launchers with one rank each train a small GPT with DeepSpeed ZeRO-3 (bf16, CPU, Gloo) on this machine. One rank
is killed in the middle of an iteration, again and again, under three start methods: cold (new interpreters), warm
(forked from a server that has imported torch) and learn (forked from one that has imported what the script imports).
No state is restored: this is the cost of the processes alone.

    python benchmarks/warm_restart.py [--repeats 5] [--methods cold warm learn] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from gemini_ft.agent.launcher.local_agents import LocalAgents

NUM_RANKS = 4
METHODS = ("cold", "warm", "learn")
JOB = "bench-warm-restart"
WAIT_S = 120.0
SETTLED_STEP = 3


def train(folder: Path) -> None:
    """Run as a rank: train until killed, and write the monotonic time of each phase and step."""
    log = Marks(folder / f"marks-{os.environ['GEMINI_FT_GENERATION']}-{os.environ['RANK']}")
    log.mark("script")
    import deepspeed
    import torch

    from gemini_ft.agent.launcher.learning import report_imports

    # Otherwise every start compiles test programs, to choose an optional op that ranks on different nodes cannot use.
    deepspeed.ops.__compatible_ops__ = {}
    log.mark("imported")
    deepspeed.init_distributed("gloo")
    log.mark("joined")
    torch.manual_seed(0)
    model = tiny_gpt()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
    )
    log.mark("initialized")
    step = 0
    while True:
        tokens = torch.randint(0, 256, (4, 129))
        logits = engine(tokens[:, :-1])
        if step == 0:
            log.mark("forward")
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        if step == 0:
            log.mark("backward")
        engine.step()
        step += 1
        log.mark(f"step-{step}")
        if step == 1:
            report_imports()


def tiny_gpt() -> nn.Module:
    """Return a byte-level GPT of 1.7 million parameters."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(192), nn.LayerNorm(192)
            self.qkv, self.out = nn.Linear(192, 576), nn.Linear(192, 192)
            self.mlp = nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            out: torch.Tensor = x + self.mlp(self.norm_2(x))
            return out

    return nn.Sequential(nn.Embedding(256, 192), *(Block() for _ in range(4)), nn.LayerNorm(192), nn.Linear(192, 256))


class Marks:
    """A file of `name monotonic_time` lines, each written at once."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def mark(self, name: str) -> None:
        os.write(self._fd, f"{name} {time.monotonic():.6f}\n".encode())


def read_marks(folder: Path, generation: int, rank: int) -> dict[str, float]:
    """Return the marks that a rank has written so far."""
    path = folder / f"marks-{generation}-{rank}"
    if not path.exists():
        return {}
    return {name: float(at) for name, at in (line.split() for line in path.read_text().splitlines())}


def wait_for(what: str, is_true: Callable[[], bool], launchers: list[subprocess.Popen[bytes]]) -> None:
    """Poll until `is_true`; fail with the name of what was waited for."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        if time.monotonic() > deadline or any(launcher.poll() is not None for launcher in launchers):
            raise SystemExit(f"waited in vain for {what}; see the launchers' logs")
        time.sleep(0.01)


def measure(method: str, num_repeats: int, folder: Path) -> list[dict[str, float]]:
    """Return one row per kill: seconds from the kill to each phase on the slowest rank."""
    from gemini_ft.agent.launcher.local_agents import LocalAgents

    environ = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    rows = []
    with LocalAgents(folder, JOB, NUM_RANKS) as agents:
        launchers = []
        for node in range(NUM_RANKS):
            options = ["--agent-socket", agents.socket_path(node), "--job", JOB, "--start-method", method]
            options += ["--log-dir", str(folder / f"log-{node}"), "--state-dir", str(folder / f"state-{node}")]
            script = ["--", __file__, "--train", str(folder)]
            with (folder / f"launcher-{node}.log").open("wb") as log:
                command = [sys.executable, "-m", "gemini_ft.agent.launcher", *options, *script]
                launchers.append(subprocess.Popen(command, stdout=log, stderr=log, env=environ))
        try:
            generation = agents.order()

            def all_reached(step: int) -> bool:
                return all(f"step-{step}" in read_marks(folder, generation, rank) for rank in range(NUM_RANKS))

            for repeat in range(num_repeats):
                wait_for(
                    f"step {SETTLED_STEP} of generation {generation}", lambda: all_reached(SETTLED_STEP), launchers
                )
                if method == "learn":
                    wait_for(
                        "the learned servers",
                        lambda: all(any(folder.glob(f"state-{n}/learned-*.json")) for n in range(NUM_RANKS)),
                        launchers,
                    )
                rows.append(kill_one(agents, folder, generation, repeat % NUM_RANKS, launchers))
                generation += 1
        finally:
            for launcher in launchers:
                launcher.terminate()
            for launcher in launchers:
                launcher.wait(30)
    return rows


def kill_one(
    agents: LocalAgents,
    folder: Path,
    generation: int,
    rank: int,
    launchers: list[subprocess.Popen[bytes]],
) -> dict[str, float]:
    """Kill a rank half an iteration after it has finished a step; time the generation that follows."""
    marks = read_marks(folder, generation, rank)
    steps = [at for name, at in marks.items() if name.startswith("step-")]
    time.sleep((steps[-1] - steps[-2]) / 2)
    killed_at = time.monotonic()
    os.kill(agents.pids(generation)[rank], signal.SIGKILL)
    following = generation + 1

    def is_over() -> bool:
        return all("step-1" in read_marks(folder, following, r) for r in range(NUM_RANKS))

    wait_for(f"the first step of generation {following}", is_over, launchers)
    all_marks = [read_marks(folder, following, r) for r in range(NUM_RANKS)]
    phases = ("script", "imported", "joined", "initialized", "forward", "backward", "step-1")
    return {phase: max(marks[phase] for marks in all_marks) - killed_at for phase in phases}


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train)
        return
    results = {}
    for method in args.methods:
        with tempfile.TemporaryDirectory(prefix="warm-restart-") as folder:
            results[method] = measure(method, args.repeats, Path(folder))
        print_table(method, results[method])
    if args.json is not None:
        about = {"cpus": os.cpu_count(), "load": os.getloadavg(), "kernel": platform.release(), "python": sys.version}
        args.json.write_text(json.dumps({"about": about, "seconds_from_kill": results}, indent=1))


def print_table(method: str, rows: list[dict[str, float]]) -> None:
    """Print the median and range of each phase, in seconds since the kill, slowest rank."""
    print(f"{method}: seconds from SIGKILL, median of {len(rows)} [lowest-highest], slowest rank")
    for phase in rows[0]:
        values = [row[phase] for row in rows]
        print(f"  {phase:12} {statistics.median(values):6.2f} [{min(values):.2f}-{max(values):.2f}]", flush=True)


if __name__ == "__main__":
    main()
