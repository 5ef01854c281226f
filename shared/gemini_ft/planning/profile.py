"""What a job's iterations leave idle: the input of the traffic schedule (paper section 5.4)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["IdleProfile", "IdleSpan", "load_profile"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class IdleSpan(_Frozen):
    """A time within an iteration in which training sends nothing."""

    mean_s: float = Field(ge=0, description="mean length over the profiled iterations")
    std_s: float = Field(default=0.0, ge=0, description="standard deviation of the length")
    start_s: float | None = Field(default=None, ge=0, description="from the start of the iteration")


class IdleProfile(_Frozen):
    """One iteration without checkpoints, and one rank's share of the machine. All rates are bytes per second."""

    iteration_s: float = Field(gt=0, description="length of an iteration without checkpoints")
    spans: tuple[IdleSpan, ...] = Field(description="in the order of the iteration; the last one ends before Update")
    bandwidth_bytes_per_s: float = Field(gt=0, description="B: to the peer, while training sends nothing")
    latency_s: float = Field(default=0.0, ge=0, description="alpha: start-up time of one transfer")
    copy_bytes_per_s: float = Field(gt=0, description="from a received chunk's buffer to the peer's CPU memory")
    shard_bytes: int = Field(ge=0, description="C: what one rank checkpoints")
    buffer_bytes: int = Field(default=128 << 20, gt=0, description="R: reserved on the receiving device")
    num_parts: int = Field(default=4, ge=1, description="p: parts of the buffer, used in turn")
    slack: float = Field(default=0.9, gt=0, le=1, description="mu: the part of a span that is planned with")
    free_device_bytes: int = Field(ge=0, description="device memory that training leaves free")

    @property
    def spans_s(self) -> tuple[float, ...]:
        """Mean length of each span."""
        return tuple(span.mean_s for span in self.spans)

    @property
    def idle_s(self) -> float:
        """Idle time of one iteration."""
        return sum(self.spans_s)

    @property
    def starts_s(self) -> tuple[float, ...]:
        """Start of each span; where the profile gives none, the busy time is spread evenly around the spans."""
        given = [span.start_s for span in self.spans if span.start_s is not None]
        if given:
            return tuple(given)
        busy_s = max(0.0, self.iteration_s - self.idle_s) / (len(self.spans) + 1)
        return tuple(busy_s * (index + 1) + sum(self.spans_s[:index]) for index in range(len(self.spans)))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_parts > self.buffer_bytes:
            raise ValueError(f"buffer_bytes is {self.buffer_bytes}, too small for num_parts {self.num_parts}")
        # Sums of measured floats may exceed their total by rounding.
        end_s = self.iteration_s * (1 + 1e-9)
        if self.idle_s > end_s:
            raise ValueError(f"the spans add up to {self.idle_s:g} s, but iteration_s is {self.iteration_s:g}")
        num_given = sum(span.start_s is not None for span in self.spans)
        if num_given not in (0, len(self.spans)):
            raise ValueError(
                f"{num_given} of {len(self.spans)} spans have a start_s: give it to all of them or to none"
            )
        windows = [(start_s, start_s + mean_s) for start_s, mean_s in zip(self.starts_s, self.spans_s, strict=True)]
        for index, ((_, before_s), (start_s, _)) in enumerate(pairwise(windows)):
            if start_s < before_s - 1e-9 * self.iteration_s:
                raise ValueError(
                    f"spans.{index + 1} starts at {start_s:g} s, before spans.{index} ends at {before_s:g} s: "
                    "give the spans in order and without overlap"
                )
        if windows and windows[-1][1] > end_s:
            raise ValueError(f"the last span ends at {windows[-1][1]:g} s, but iteration_s is {self.iteration_s:g}")
        return self


def load_profile(path: Path) -> IdleProfile:
    """Return the profile in the JSON file `path`.

    Raises:
        ConfigurationError: the file cannot be read or is no profile; the sentence names the file and the line or key.
    """
    try:
        return IdleProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"the idle profile {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigurationError(f"the idle profile {path} is wrong: {f'{key}: ' if key else ''}{reason}") from None
