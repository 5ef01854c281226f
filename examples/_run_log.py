"""What an example writes so that two runs can be compared bit for bit."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash

__all__ = ["LossLog", "arguments", "leave", "tensors_of", "write_digests"]


def arguments(description: str) -> argparse.Namespace:
    """Parse the command line that the examples share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--loss-log", type=Path, help="append a JSON line a step here; each rank adds its number")
    parser.add_argument("--digest-out", type=Path, help="write digests of the final state here")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--no-checkpoint", action="store_true", help="train without Gemini-FT")
    return parser.parse_args()


class LossLog:
    """A JSON line for every finished step, written by each rank to a file of its own: `PATH.RANK`.

    `at` is the machine's monotonic clock; `pace_s` is the shortest time from one line to the next.
    """

    def __init__(self, path: Path | None, pace_s: float = 0.0) -> None:
        self._pace_s = pace_s
        self._written_at = time.monotonic()
        self._path = path and path.with_name(f"{path.name}.{dist.get_rank()}")
        self._generation = int(os.environ.get("GEMINI_FT_GENERATION", "0"))

    def write(self, step: int, loss: torch.Tensor, committed_step: int | None = None) -> None:
        """Append one line; the loss is exact, as a hexadecimal float. `committed_step`: newest committed version."""
        line = {
            "step": step,
            "rank": dist.get_rank(),
            "generation": self._generation,
            "loss": loss.item().hex(),
            "at": time.monotonic(),
            "committed_step": committed_step,
        }
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        elif dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        time.sleep(max(0.0, self._written_at + self._pace_s - time.monotonic()))
        self._written_at = time.monotonic()


def tensors_of(state: Any) -> list[torch.Tensor]:
    """Return all tensors of a nested state, in the order in which they stand there."""
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


def write_digests(path: Path | None, state: Any) -> None:
    """Write the xxh3-128 of each rank's final state, and of all of them together; collective."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors_of(state):
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    ranks: list[Any] = [torch.zeros(16, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.frombuffer(bytearray(hasher.digest()), dtype=torch.uint8))
    digests = [bytes(row.tolist()).hex() for row in ranks]
    if path is not None and dist.get_rank() == 0:
        combined = xxhash.xxh3_128_hexdigest("".join(digests).encode())
        path.write_text(json.dumps({"combined": combined, "ranks": digests}, indent=1) + "\n")


def leave() -> NoReturn:
    """End this process well, at once: torch 2.13 now and then aborts while the interpreter takes Gloo apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
