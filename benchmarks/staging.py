"""How long `Checkpointer.step` and its optimizer hook make the training loop wait, against a plain memcpy.

One process, a state of `--state-mib` MiB, an agent without peers (`gemini_ft.worker.testing`). The work between two
steps is a matrix product in one thread, as long as the copy several times over, so that staging can hide behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from gemini_ft.worker import Checkpointer
from gemini_ft.worker.testing import SoloAgent

_NUM_TENSORS = 100
_NUM_WARM_UP = 3


def memcpy_s(num_bytes: int) -> float:
    """Return the median time of a copy between two warm arrays in one thread."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def work_for(seconds: float, matrix: torch.Tensor) -> None:
    """Compute for about `seconds` in this thread."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(matrix, matrix)


def measure(state_mib: int, num_steps: int, work_s: float) -> dict[str, list[float]]:
    """Return the stall of each step, and the iterations' length with and without checkpoints, in seconds."""
    torch.set_num_threads(1)
    count = state_mib * (1 << 20) // 4 // _NUM_TENSORS
    params = [torch.nn.Parameter(torch.randn(count)) for _ in range(_NUM_TENSORS)]
    optimizer = torch.optim.SGD(params, lr=0.0)
    matrix = torch.randn(400, 400)
    model = torch.nn.ParameterList(params)

    def iterate() -> None:
        work_for(work_s, matrix)
        optimizer.step()

    plain = []
    for _ in range(num_steps):
        began = time.perf_counter()
        iterate()
        plain.append(time.perf_counter() - began)
    stalls, iterations = [], []
    with Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.restore()
        for step in range(num_steps + _NUM_WARM_UP):
            before, began = checkpointer.stall, time.perf_counter()
            iterate()
            checkpointer.step(step)
            if step >= _NUM_WARM_UP:
                stalls.append((checkpointer.stall - before).total_seconds())
                iterations.append(time.perf_counter() - began)
    return {"stall_s": stalls, "iteration_s": iterations, "iteration_without_s": plain}


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-mib", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    copy_s = memcpy_s(args.state_mib << 20)
    with (
        tempfile.TemporaryDirectory(prefix="gft", dir="/dev/shm") as folder,
        SoloAgent(Path(folder), capacity_bytes=4 * (args.state_mib << 20)) as agent,
    ):
        os.environ |= agent.environment()
        rows = measure(args.state_mib, args.steps, work_s=max(0.2, 6 * copy_s))
    print(f"{args.state_mib} MiB in {_NUM_TENSORS} tensors, {args.steps} steps, median [lowest-highest]")
    for name, values in rows.items():
        print(f"  {name:20} {statistics.median(values):.4f} [{min(values):.4f}-{max(values):.4f}]")
    stall_s = statistics.median(rows["stall_s"])
    slower = statistics.median(rows["iteration_s"]) / statistics.median(rows["iteration_without_s"])
    print(f"  {'memcpy_s':20} {copy_s:.4f}")
    print(f"  stall / memcpy {stall_s / copy_s:.2f}, iteration with / without checkpoints {slower:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows | {"memcpy_s": copy_s, "state_mib": args.state_mib}, indent=1) + "\n")


if __name__ == "__main__":
    main()
