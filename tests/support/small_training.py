"""The training that the fault tests disturb: small, deterministic, and every step leaves a digest of its whole state.

As in a sharded run every rank has state of its own: parameters that are not averaged, random generators, a place in
the data. `FOLDER/arm-at-start.RANK` arms a fault point once; `FOLDER/arm.RANK` does when `FOLDER/arm` appears, and
`FOLDER/end` ends the training, both on all ranks after the same step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from gemini_ft.faults import arm
from gemini_ft.worker import Checkpointer

WIDTH = 64
HIDDEN = 384
BATCH = 16


class DataPosition:
    """Where this rank is in its endless data."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._next = 0

    def draw(self) -> torch.Tensor:
        self._next += 1
        generator = torch.Generator().manual_seed(self._rank * 1_000_003 + self._next)
        return torch.randn(BATCH, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Training:
    """A network whose first part all ranks share, while the second is each rank's own."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        torch.manual_seed(0)
        shared = (torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Dropout(0.2), torch.nn.Linear(HIDDEN, WIDTH))
        torch.manual_seed(1 + rank)
        self._model = torch.nn.Sequential(*shared, torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        self._shared = [parameter for layer in shared for parameter in layer.parameters()]
        self._num_ranks = num_ranks
        self._data = DataPosition(rank)
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, gamma=0.99)
        self._scheduler = scheduler
        self.parts = {"model": self._model, "optimizer": self.optimizer, "scheduler": scheduler, "data": self._data}

    def step(self, arms: bool = False, ends: bool = False) -> tuple[bool, bool]:
        """Train one step; return whether some rank wants to arm its fault point, and to end, the same on all ranks."""
        inputs = self._data.draw()
        loss = (self._model(inputs) - inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in self._shared]
        # One collective, of one size in every run: the order in which Gloo sums depends on the size.
        sums = torch.cat([torch.tensor([float(arms), float(ends)]), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(sums)
        averages = (sums[2:] / self._num_ranks).split([gradient.numel() for gradient in gradients])
        for gradient, average in zip(gradients, averages, strict=True):
            gradient.copy_(average.view_as(gradient))
        self.optimizer.step()
        self._scheduler.step()
        return bool(sums[0] > 0), bool(sums[1] > 0)

    def digest(self) -> str:
        """Of everything that decides the next step."""
        hasher = xxhash.xxh3_128()
        _update(
            hasher, {**{name: part.state_dict() for name, part in self.parts.items()}, "rng": torch.get_rng_state()}
        )
        return hasher.hexdigest()


def _update(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            hasher.update(str(key).encode())
            _update(hasher, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _update(hasher, item)
    else:
        hasher.update(repr(value).encode())


class Log:
    """JSON lines; each is written at once, so that a killed rank has said all that it did."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._descriptor = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._generation = int(os.environ.get("GEMINI_FT_GENERATION", "0"))

    def write(self, kind: str, step: int | None, digest: str, committed_step: int | None = None) -> None:
        line = {
            "kind": kind,
            "generation": self._generation,
            "step": step,
            "digest": digest,
            "committed_step": committed_step,
        }
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def train_under_gemini(folder: Path, training: Training, log: Log, rank: int, pace_s: float) -> None:
    """Train until `FOLDER/end` appears; a step takes at least `pace_s`, as if it computed more."""
    _arm_once(folder / f"arm-at-start.{rank}")
    with Checkpointer(training.parts) as checkpointer:
        restored = checkpointer.restore()
        log.write("restored", restored, training.digest())
        step, ended = -1 if restored is None else restored, False
        while not ended:
            step += 1
            time.sleep(pace_s)
            arms, ended = training.step((folder / "arm").exists(), (folder / "end").exists())
            digest = training.digest()
            if arms:
                (folder / "arm").unlink(missing_ok=True)
                _arm_once(folder / f"arm.{rank}")
            checkpointer.step(step)
            log.write("step", step, digest, checkpointer.committed_step)
    log.write("end", step, training.digest())


def train_undisturbed(training: Training, log: Log, next_limit: Callable[[], str]) -> None:
    """Train as far as the lines that `next_limit` returns say, until it returns an empty one."""
    step = 0
    while limit := next_limit():
        while step <= int(limit):
            training.step()
            log.write("step", step, training.digest())
            step += 1


def _arm_once(path: Path) -> None:
    try:
        specification = path.read_text()
    except FileNotFoundError:
        return
    path.unlink()
    arm(specification)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pace-s", type=float, default=0.02)
    parser.add_argument("--undisturbed", action="store_true", help="without Gemini-FT, as far as lines of stdin say")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.undisturbed:
        dist.init_process_group("gloo", f"file://{args.folder / 'store'}", rank=rank, world_size=num_ranks)
    else:
        dist.init_process_group("gloo")
    training, log = Training(rank, num_ranks), Log(args.folder, rank)
    if args.undisturbed:
        train_undisturbed(training, log, sys.stdin.readline)
    else:
        train_under_gemini(args.folder, training, log, rank, args.pace_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
