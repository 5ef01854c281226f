"""What is simulated: cluster, failures, repair, storage and policy, as plain checked values.

Machines are numbered 0..N-1, and machine i sits in slot i. A machine that takes over a slot also takes over its
number and its failure domain.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.planning.erasure import ErasureCode
from gemini_ft.planning.placement import Strategy, build_placement, replica_sets
from gemini_ft.planning.simulation.policies import Policy
from gemini_ft.planning.wasted_time import DAY_S

__all__ = [
    "CodedGroups",
    "Delay",
    "DomainFailures",
    "Domains",
    "ExponentialDelay",
    "FailureKind",
    "FailureProcess",
    "Machines",
    "PersistentTier",
    "PoissonFailures",
    "Redundancy",
    "Replicas",
    "Scenario",
    "TraceFailure",
    "TraceFailures",
    "UniformDelay",
    "WeibullFailures",
]

_MAX_FAILURES = 10_000_000

FailureKind = Literal["software", "hardware"]
"""Software: processes die, every machine and its memory stay. Hardware: the machine is replaced, its memory is lost."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class UniformDelay(_Frozen):
    """Any time between `low_s` and `high_s`, all equally likely."""

    low_s: float = Field(ge=0)
    high_s: float = Field(ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_s < self.low_s:
            raise ValueError(f"high_s is {self.high_s:g}, below low_s {self.low_s:g}; give the larger one as high_s")
        return self


class ExponentialDelay(_Frozen):
    """Exponentially distributed."""

    mean_s: float = Field(gt=0)


def _delay_kind(value: object) -> str:
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", ())
    return "exponential" if "mean_s" in keys else "uniform" if "low_s" in keys or "high_s" in keys else "constant"


Delay = Annotated[
    Annotated[float, Field(ge=0), Tag("constant")]
    | Annotated[UniformDelay, Tag("uniform")]
    | Annotated[ExponentialDelay, Tag("exponential")],
    Discriminator(_delay_kind),
]
"""A number of seconds, `{low_s, high_s}` or `{mean_s}`."""


class PoissonFailures(_Frozen):
    """Each machine fails at a constant rate, independently of its age and of the others."""

    kind: Literal["poisson"] = "poisson"
    failure: FailureKind
    per_machine_per_day: float = Field(ge=0)


class WeibullFailures(_Frozen):
    """Each machine's time to failure is Weibull; a failure renews the machine (age 0).

    Shape below 1: the young fail most; above 1: wear. `are_new`: all machines have age 0 at the start, otherwise they
    have been in service for long, so that the failure rate is 1/mean from the start.
    """

    kind: Literal["weibull"] = "weibull"
    failure: FailureKind
    shape: float = Field(gt=0.1, le=20)
    mean_days: float = Field(gt=0)
    are_new: bool = False


class DomainFailures(_Frozen):
    """Whole failure domains fail at a constant rate each; every machine of it is hit with probability `share`."""

    kind: Literal["domain"] = "domain"
    failure: FailureKind = "hardware"
    per_domain_per_day: float = Field(ge=0)
    share: float = Field(default=1.0, gt=0, le=1)


class TraceFailure(_Frozen):
    """One recorded failure."""

    time_s: float = Field(ge=0)
    failure: FailureKind
    machines: tuple[int, ...] = Field(min_length=1)


class TraceFailures(_Frozen):
    """Recorded failures in order of time, the same for every seed; what lies after the simulated time is ignored."""

    kind: Literal["trace"] = "trace"
    failures: tuple[TraceFailure, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for before, after in pairwise(self.failures):
            if after.time_s < before.time_s:
                raise ValueError(f"the failure at {after.time_s:g} s comes after the one at {before.time_s:g} s")
        return self


FailureProcess = Annotated[
    PoissonFailures | WeibullFailures | DomainFailures | TraceFailures, Field(discriminator="kind")
]


class Machines(_Frozen):
    """How a lost machine is replaced.

    Every loss orders one machine, which arrives after `lead_time_s`. A standby takes the slot at once and the ordered
    machine refills the pool; without one the slot waits for the machine that arrives first. Standbys do not fail.
    """

    num_standbys: int = Field(default=0, ge=0)
    lead_time_s: Delay


class PersistentTier(_Frozen):
    """Storage whose bandwidth all traffic shares in equal parts per transfer.

    `num_other_transfers` of other jobs are always there. `interval_s`: how often a job with its checkpoints in memory
    writes a version here; policies without memory have an interval of their own.
    """

    bandwidth_bytes_per_s: float = Field(gt=0)
    interval_s: float = Field(default=10_800.0, gt=0)
    num_other_transfers: int = Field(default=0, ge=0)


class Domains(_Frozen):
    """Racks of `num_machines` machines each. `are_spread`: neighbouring slots are dealt to different racks, so that a
    replica set shares none if there are enough; otherwise a rack is a run of neighbouring slots.
    """

    num_machines: int = Field(ge=1)
    are_spread: bool = True

    def members(self, num_machines: int) -> tuple[range, ...]:
        """The machines of each rack."""
        num_racks = -(-num_machines // self.num_machines)
        if self.are_spread:
            return tuple(range(rack, num_machines, num_racks) for rack in range(num_racks))
        borders = [*range(0, num_machines, self.num_machines), num_machines]
        return tuple(range(first, end) for first, end in pairwise(borders))


class Replicas(_Frozen):
    """m whole copies of each shard, the local one counts."""

    kind: Literal["replicas"] = "replicas"
    num_replicas: int = Field(default=2, ge=1)
    strategy: Strategy = Strategy.MIXED

    @property
    def sent_shards(self) -> float:
        """What a machine sends for each checkpoint, in shards."""
        return self.num_replicas - 1

    @property
    def kept_shards(self) -> float:
        """What a machine keeps of one version, in shards."""
        return self.num_replicas

    @property
    def num_losses(self) -> int:
        """How many members of a set may be lost."""
        return self.num_replicas - 1

    def sets(self, num_machines: int) -> tuple[tuple[int, ...], ...]:
        """The slots of each set; shards are lost when more than `num_losses` of one are."""
        return _sets(self.strategy, num_machines, self.num_replicas)


@lru_cache(maxsize=8)
def _sets(strategy: Strategy, num_machines: int, num_replicas: int) -> tuple[tuple[int, ...], ...]:
    placement = build_placement(strategy, num_machines, num_replicas)
    return tuple(tuple(sorted(members)) for members in replica_sets(placement))


class CodedGroups(_Frozen):
    """Groups of g machines with an erasure code that survives any t losses; each keeps g/(g-t) of a shard."""

    kind: Literal["coded"] = "coded"
    num_members: int = Field(default=4, ge=2)
    num_losses: int = Field(default=2, ge=1)

    @property
    def sent_shards(self) -> float:
        """What a machine sends for each checkpoint, in shards: a piece of 1/(g-t) to each other member."""
        return float(self._code.traffic_factor)

    @property
    def kept_shards(self) -> float:
        """What a machine keeps of one version, in shards."""
        return float(self._code.memory_factor)

    def sets(self, num_machines: int) -> tuple[tuple[int, ...], ...]:
        """The slots of each group; shards are lost when more than `num_losses` of one are."""
        return self._code.groups(num_machines)

    @property
    def _code(self) -> ErasureCode:
        return ErasureCode(self.num_members, self.num_losses)


Redundancy = Annotated[Replicas | CodedGroups, Field(discriminator="kind")]


class Scenario(_Frozen):
    """One cluster, one job and one policy.

    `shard_bytes` is what one machine checkpoints; `network_bytes_per_s` what one machine sends to a peer while
    training is silent, `idle_s` how long it is silent in an iteration (None: a checkpoint always fits).
    `serialization_bytes_per_s` is how fast a machine serialises for policies that do. `detection_s` and `warm_up_s`
    (from started processes to training) hold unless the policy brings measured phases.
    """

    name: str = Field(min_length=1)
    num_machines: int = Field(ge=1, le=1_000_000)
    duration_days: float = Field(default=30.0, gt=0, le=3650)
    iteration_s: float = Field(gt=0)
    idle_s: float | None = Field(default=None, gt=0)
    shard_bytes: float = Field(gt=0)
    network_bytes_per_s: float = Field(gt=0)
    serialization_bytes_per_s: float = Field(gt=0)
    detection_s: float = Field(ge=0)
    warm_up_s: float = Field(ge=0)
    failures: tuple[FailureProcess, ...]
    machines: Machines
    persistent: PersistentTier
    redundancy: Redundancy = Replicas()
    domains: Domains | None = None
    policy: Policy

    @property
    def total_bytes(self) -> float:
        """Size of one version."""
        return self.num_machines * self.shard_bytes

    @model_validator(mode="after")
    def _check(self) -> Self:
        for index, process in enumerate(self.failures):
            if isinstance(process, DomainFailures) and self.domains is None:
                raise ValueError(f"failures.{index} hits domains, but domains is missing: give domains.num_machines")
            if isinstance(process, TraceFailures):
                highest = max(max(failure.machines) for failure in process.failures)
                lowest = min(min(failure.machines) for failure in process.failures)
                if lowest < 0 or highest >= self.num_machines:
                    raise ValueError(
                        f"failures.{index} names machine {lowest if lowest < 0 else highest}, but machines are "
                        f"numbered 0 to {self.num_machines - 1}"
                    )
        num_failures = self.failures_per_day * self.duration_days
        if num_failures > _MAX_FAILURES:
            raise ValueError(
                f"failures: about {num_failures:.3g} of them are to be simulated; give lower rates or a shorter "
                f"duration_days, for at most {_MAX_FAILURES:.0e} in a run"
            )
        try:
            self.redundancy.sets(self.num_machines)
        except ConfigurationError as error:
            raise ValueError(f"redundancy: {error}") from None
        return self

    @property
    def failures_per_day(self) -> float:
        """Mean number of failures a day, all processes together; a domain that fails counts once."""
        num_domains = 0 if self.domains is None else len(self.domains.members(self.num_machines))
        rate = 0.0
        for process in self.failures:
            match process:
                case PoissonFailures(per_machine_per_day=per_day):
                    rate += per_day * self.num_machines
                case WeibullFailures(mean_days=mean_days):
                    rate += self.num_machines / mean_days
                case DomainFailures(per_domain_per_day=per_day):
                    rate += per_day * num_domains
                case TraceFailures(failures=failures):
                    rate += (
                        sum(failure.time_s < self.duration_days * DAY_S for failure in failures) / self.duration_days
                    )
        return rate

    def changed(self, **values: object) -> Scenario:
        """Return a checked copy with other values."""
        return Scenario.model_validate({**dict(self), **values})
