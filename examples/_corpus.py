"""Text to train on that every machine has: the source of the Python standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

__all__ = ["Batches", "standard_library_text"]

_MAX_BYTES = 4 << 20


def standard_library_text() -> torch.Tensor:
    """Return the first 4 MiB of the library's top-level modules in the order of their names, as uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _MAX_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:_MAX_BYTES]


class Batches:
    """Batches of one rank, drawn at random by a generator of its own: the data position is the generator's state."""

    def __init__(self, text: torch.Tensor, batch: int, length: int, seed: int, rank: int) -> None:
        self._text, self._batch, self._length = text, batch, length
        self._generator = torch.Generator().manual_seed(seed * 100_003 + rank)
        self._num_drawn = 0

    def draw(self) -> torch.Tensor:
        """Return the next (batch, length + 1) byte values as int64."""
        starts = torch.randint(len(self._text) - self._length - 1, (self._batch,), generator=self._generator)
        self._num_drawn += 1
        return torch.stack([self._text[i : i + self._length + 1] for i in starts.tolist()]).long()

    def state_dict(self) -> dict[str, object]:
        """Return the data position."""
        return {"generator": self._generator.get_state(), "num_drawn": self._num_drawn}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Go on from a data position."""
        generator, num_drawn = state_dict["generator"], state_dict["num_drawn"]
        assert isinstance(generator, torch.Tensor)
        assert isinstance(num_drawn, int)
        self._generator.set_state(generator)
        self._num_drawn = num_drawn
