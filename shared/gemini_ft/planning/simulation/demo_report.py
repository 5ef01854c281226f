"""Measured phases of recoveries, read from the report of `gemini-ft demo --json`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["MeasuredPhases", "MeasuredRecovery", "read_demo_report"]

_COORDINATION = ("fence", "plan", "re_rendezvous")
_RETRIEVAL = ("reserve", "fetch", "load")
_RANK_KILLED = ("a", "a'")
_MACHINE_LOST = ("c",)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MeasuredPhases(_Frozen):
    """One recovery, cut into what the simulation tells apart."""

    detection_s: float = Field(ge=0, description="from the failure to the fence")
    coordination_s: float = Field(ge=0, description="fence, plan and rendezvous")
    retrieval_s: float = Field(ge=0, description="memory reserved, shards fetched and loaded")
    warm_up_s: float = Field(ge=0, description="set-up of the script, and what the first step takes longer")


class MeasuredRecovery(_Frozen):
    """Recoveries of a demo, the median over the drills of a kind, and the stall of a step."""

    software: MeasuredPhases
    hardware: MeasuredPhases
    stall_s: float = Field(ge=0, description="what a checkpoint makes training wait")
    re_replication_s: float = Field(ge=0, description="from the next step to whole redundancy, after a lost machine")


class _Read(BaseModel):
    """Only what is used here is described; the report may have more."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class _Drill(_Read):
    key: str
    phases_ms: dict[str, float] = {}
    step_after_ms: float | None = None
    whole_again_ms: float | None = None


class _Stall(_Read):
    mean_ms: float
    step_ms: float


class _Report(_Read):
    drills: tuple[_Drill, ...]
    stall: _Stall


def read_demo_report(path: Path) -> MeasuredRecovery:
    """Return what the demo that wrote `path` has measured.

    Drills (a) and (a') kill a rank and stand for software failures, (c) loses a machine. The first step's phase
    counts only as far as it exceeds a usual step.

    Raises:
        ConfigurationError: the file cannot be read, is no report, or lacks a drill; the sentence names the file.
    """
    try:
        report = _Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"the demo report {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigurationError(f"{path} is no report of `gemini-ft demo --json`: {key}: {first['msg']}") from None
    step_s = report.stall.step_ms / 1000
    lost = _drills(path, report, _MACHINE_LOST)
    whole_ms = [
        max(0.0, drill.whole_again_ms - drill.step_after_ms)
        for drill in lost
        if drill.whole_again_ms is not None and drill.step_after_ms is not None
    ]
    if not whole_ms:
        raise ConfigurationError(f"the demo report {path} does not tell when drill (c) had all copies again")
    return MeasuredRecovery(
        software=_median([_phases(drill, step_s) for drill in _drills(path, report, _RANK_KILLED)]),
        hardware=_median([_phases(drill, step_s) for drill in lost]),
        stall_s=report.stall.mean_ms / 1000,
        re_replication_s=statistics.median(whole_ms) / 1000,
    )


def _drills(path: Path, report: _Report, keys: Sequence[str]) -> list[_Drill]:
    found = [drill for drill in report.drills if drill.key in keys and drill.phases_ms]
    if not found:
        raise ConfigurationError(
            f"the demo report {path} has no recovery of drill {' or '.join(f'({key})' for key in keys)}; "
            "run the whole demo"
        )
    return found


def _phases(drill: _Drill, step_s: float) -> MeasuredPhases:
    def seconds(*names: str) -> float:
        return sum(drill.phases_ms.get(name, 0.0) for name in names) / 1000

    return MeasuredPhases(
        detection_s=seconds("detect"),
        coordination_s=seconds(*_COORDINATION),
        retrieval_s=seconds(*_RETRIEVAL),
        warm_up_s=max(0.0, seconds("set_up")) + max(0.0, seconds("first_step") - step_s),
    )


def _median(phases: Sequence[MeasuredPhases]) -> MeasuredPhases:
    return MeasuredPhases.model_validate(
        {name: statistics.median(getattr(one, name) for one in phases) for name in MeasuredPhases.model_fields}
    )
