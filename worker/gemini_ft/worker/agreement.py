"""What the ranks agree on: one tiny all-reduce a step, launched before the optimizer steps and read after it.

The group is Gloo and of our own, so that its collectives have one order, whatever the script does on its groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from gemini_ft.contracts.errors import GeminiError, UnavailableError, from_wire

__all__ = ["Agreed", "Agreement"]

_ERROR_BYTES = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Agreed:
    """The same on every rank. `committed_step`: newest step that every rank has sealed everywhere, if all have one.

    `is_hold_wanted`: some rank has been told to hold. `checkpoint_request`: newest request that every rank has seen.
    """

    committed_step: int | None
    failed: bool
    is_hold_wanted: bool = False
    checkpoint_request: int = 0


class Agreement:
    """The ranks' agreement; without torch.distributed there is one rank, which agrees with itself.

    Args:
        process_group: ranks of the job; the default group if None. Building the agreement is collective.
        timeout: bound of every collective.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group: Any = None
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self._group = dist.new_group(ranks, timeout=timeout, backend="gloo")
        self._values = torch.zeros(4, dtype=torch.int64)
        self._work: Any = None
        self._launched = False

    @property
    def launched(self) -> bool:
        """True between `launch` and `result`."""
        return self._launched

    def launch(
        self, sealed_step: int | None, failed: bool, is_hold_wanted: bool = False, checkpoint_request: int = 0
    ) -> None:
        """Begin the all-reduce of this step; returns at once."""
        self._values[0] = 0 if sealed_step is None else sealed_step + 1
        self._values[1] = 0 if failed else 1
        self._values[2] = 0 if is_hold_wanted else 1
        self._values[3] = checkpoint_request
        if self._group is not None:
            self._work = dist.all_reduce(self._values, dist.ReduceOp.MIN, self._group, async_op=True)
        self._launched = True

    def result(self) -> Agreed:
        """Wait for the all-reduce.

        Raises:
            UnavailableError: another rank is gone or did not answer in time.
        """
        if self._work is not None:
            self._wait(self._work)
            self._work = None
        self._launched = False
        sealed, well, goes_on, request = self._values.tolist()
        return Agreed(sealed - 1 if sealed else None, not well, not goes_on, request)

    def same(self, value: int | None) -> bool:
        """Return whether `value` is the same on every rank; collective."""
        number = -1 if value is None else value
        extremes = torch.tensor([number, -number])
        if self._group is not None:
            self._wait(dist.all_reduce(extremes, dist.ReduceOp.MIN, self._group, async_op=True))
        return bool(extremes[0] == -extremes[1])

    def first_error(self, mine: GeminiError | None) -> GeminiError | None:
        """Return the error of the lowest rank that has one, the same on every rank; collective."""
        if self._group is None:
            return mine
        encoded = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
        if mine is not None:
            data = _encode_error(mine)
            encoded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.zeros_like(encoded) for _ in range(dist.get_world_size(self._group))]
        self._wait(dist.all_gather(everyone, encoded, self._group, async_op=True))
        for rank, row in enumerate(everyone):
            data = row.numpy().tobytes().rstrip(b"\0")
            if data:
                return _decode_error(data, rank)
        return None

    def together(self, act: Callable[[], T]) -> T:
        """Call `act`, and return its result when no rank has failed; collective.

        Raises:
            GeminiError: the error of the lowest rank that failed, the same on every rank.
        """
        result, mine = None, None
        try:
            result = act()
        except GeminiError as error:
            mine = error
        first = self.first_error(mine)
        if first is not None:
            raise first from mine
        return cast(T, result)

    def _wait(self, work: Any) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise UnavailableError(f"the ranks could not agree, one of them is gone or stuck: {error}") from error


def _encode_error(error: GeminiError) -> bytes:
    message = str(error)[: _ERROR_BYTES // 8]
    return json.dumps({"code": error.code, "message": message}).encode()


def _decode_error(data: bytes, rank: int) -> GeminiError:
    wire = json.loads(data)
    return from_wire({**wire, "message": f"rank {rank}: {wire['message']}"})
