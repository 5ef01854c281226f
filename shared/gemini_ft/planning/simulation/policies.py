"""The ways of making checkpoints and coming back that are compared (paper section 7.1; the last one is ours)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gemini_ft.planning.simulation.demo_report import MeasuredRecovery

__all__ = ["Gemini", "GeminiFT", "HighFreq", "Policy", "Strawman"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Strawman(_Frozen):
    """Checkpoints to the persistent tier at a fixed interval (3 h in the paper).

    Serialisation is left out, as in the paper's figures. A write belongs to the training processes: any failure
    abandons it.
    """

    kind: Literal["strawman"] = "strawman"
    interval_s: float = Field(default=10_800.0, gt=0, description="1/f, wall time")


class HighFreq(_Frozen):
    """Checkpoints to the persistent tier as often as it takes them.

    Training waits for the serialisation of each, then the write runs beside it. `interval_s` None: the least number
    of whole iterations that holds both. A write belongs to the training processes: any failure abandons it.
    """

    kind: Literal["high_freq"] = "high_freq"
    interval_s: float | None = Field(default=None, gt=0, description="1/f, wall time, serialisation included")


class Gemini(_Frozen):
    """The paper's system: a checkpoint of every iteration in the memory of machines and peers.

    A checkpoint travels during the iteration after its own and is complete at its end; one that does not fit into the
    idle time is spread over more iterations. After a failure, live machines serialise every replica that they hold,
    and only then are lost ones replaced (sections 6.2, 7.3). Redundancy is whole again with the first checkpoint
    after the restart. Versions for the persistent tier leave from memory and stop nothing.
    """

    kind: Literal["gemini"] = "gemini"


class GeminiFT(_Frozen):
    """This project: as GEMINI, but nothing is serialised, and redundancy is restored right after the retrieval.

    A version is taken to be complete an iteration later, as in GEMINI, although demos lose less. Machines are ordered
    as soon as the loss is known. With `measured`, the phases of a recovery and the stall of a
    step are those of a demo: fixed times as they are; transfers never shorter than their bytes take on the
    scenario's network. Without it, detection and warm-up are the scenario's: a restart from cold processes.
    """

    kind: Literal["gemini_ft"] = "gemini_ft"
    measured: MeasuredRecovery | None = None


Policy = Annotated[Strawman | HighFreq | Gemini | GeminiFT, Field(discriminator="kind")]
