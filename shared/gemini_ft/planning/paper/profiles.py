"""Idle profiles of the models that the paper trained on 16 machines of 8 GPUs (paper sections 5.2, 7.2 and 7.4).

Printed in the paper: the network rates (400 and 100 Gbps a machine, shared by 8 GPUs), the shard of GPT-2 100B
(9.4 GB a GPU), the longest idle span of GPT-2 40B (1.6 s), the iteration of GPT-2 100B (62 s), the buffer
(128 MB in 4 parts).
Read off figures (+- 2 % of the axis): all other iteration times (Figs 7, 13a, 16), idle and checkpoint times (Figs 8,
13b).
Derived: a shard is 9.4 GB times the parameters over 100 billion. The copy out of the buffer is taken for the slower
stage, so that its rate is the shard of GPT-2 (100B on p4d, 40B on p3dn) over its checkpoint time; the paper does
not say which stage it is.
Calibrated: the idle time apart from the longest span is cut in 24 equal spans, so that one buffer costs the 3.5 % of
Fig 16; any number from 4 to 256 gives 3.3 to 3.8 %. The longest span comes first and takes 1.6 / 5.7 of the idle time
in every model.
Assumed: slack 0.9 (the paper gives no value), start-up latency 50 us, 2 GB of free device memory (the paper says that
more than 2 GB does not fit).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.profile import IdleProfile, IdleSpan

__all__ = ["PAPER_MODELS", "Machine", "PaperModel", "fig16_profile", "paper_model"]

_NUM_GPUS_PER_MACHINE = 8
_SHARD_BYTES_PER_BILLION = 94_000_000
_LONGEST_SPAN = 1.6 / 5.7
_NUM_EQUAL_SPANS = 24


@dataclass(frozen=True, slots=True)
class Machine:
    """An instance type; rates are those of one GPU."""

    name: str
    bandwidth_bytes_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model as trained in the paper. `idle_s` and `checkpoint_s` are per iteration, read off Figs 8 and 13b."""

    name: str
    machine: Machine
    num_billion_parameters: int
    iteration_s: float
    idle_s: float
    checkpoint_s: float

    @property
    def shard_bytes(self) -> int:
        """What one GPU checkpoints."""
        return self.num_billion_parameters * _SHARD_BYTES_PER_BILLION

    def profile(self, *, iteration_s: float | None = None, num_equal_spans: int = _NUM_EQUAL_SPANS) -> IdleProfile:
        """Return the profile of one iteration: the longest span, then `num_equal_spans` equal ones.

        `iteration_s` replaces the iteration time of Figs 7 and 13a.
        """
        longest_s = self.idle_s * _LONGEST_SPAN
        equal_s = (self.idle_s - longest_s) / num_equal_spans
        return IdleProfile(
            iteration_s=self.iteration_s if iteration_s is None else iteration_s,
            spans=tuple(IdleSpan(mean_s=span_s) for span_s in (longest_s, *[equal_s] * num_equal_spans)),
            bandwidth_bytes_per_s=self.machine.bandwidth_bytes_per_s,
            latency_s=50e-6,
            copy_bytes_per_s=self.machine.copy_bytes_per_s,
            shard_bytes=self.shard_bytes,
            buffer_bytes=128_000_000,
            num_parts=4,
            slack=0.9,
            free_device_bytes=2_000_000_000,
        )


def _gpu_share(gigabits_per_s: float) -> float:
    return gigabits_per_s * 1e9 / 8 / _NUM_GPUS_PER_MACHINE


_P4D = Machine("p4d.24xlarge", _gpu_share(400), 100 * _SHARD_BYTES_PER_BILLION / 2.5)
_P3DN = Machine("p3dn.24xlarge", _gpu_share(100), 40 * _SHARD_BYTES_PER_BILLION / 4.4)

PAPER_MODELS: Mapping[str, PaperModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            PaperModel("gpt2-100b", _P4D, 100, iteration_s=62.0, idle_s=10.0, checkpoint_s=2.5),
            PaperModel("roberta-100b", _P4D, 100, iteration_s=79.0, idle_s=11.7, checkpoint_s=2.5),
            PaperModel("bert-100b", _P4D, 100, iteration_s=73.0, idle_s=11.2, checkpoint_s=2.5),
            PaperModel("gpt2-10b", _P3DN, 10, iteration_s=11.0, idle_s=2.0, checkpoint_s=1.4),
            PaperModel("gpt2-20b", _P3DN, 20, iteration_s=22.5, idle_s=3.2, checkpoint_s=2.3),
            PaperModel("gpt2-40b", _P3DN, 40, iteration_s=45.0, idle_s=5.7, checkpoint_s=4.4),
            PaperModel("roberta-40b", _P3DN, 40, iteration_s=48.0, idle_s=6.4, checkpoint_s=4.5),
            PaperModel("bert-40b", _P3DN, 40, iteration_s=46.5, idle_s=6.0, checkpoint_s=4.5),
        )
    }
)
"""Name -> model: the 100B models on 16 p4d.24xlarge, the others on 16 p3dn.24xlarge."""


def paper_model(name: str) -> PaperModel:
    """Return the model called `name`.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        return PAPER_MODELS[name]
    except KeyError:
        raise ConfigurationError(f"the paper has no model {name!r}; choose one of {', '.join(PAPER_MODELS)}") from None


def fig16_profile(*, num_equal_spans: int = _NUM_EQUAL_SPANS) -> IdleProfile:
    """Return the profile behind Fig 16: GPT-2 40B on p3dn, whose iteration that figure shows as 43.5 s."""
    return PAPER_MODELS["gpt2-40b"].profile(iteration_s=43.5, num_equal_spans=num_equal_spans)
