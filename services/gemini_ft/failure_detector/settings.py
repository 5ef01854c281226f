"""What can be tuned, each with its reason. An environment variable wins over the default."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gemini_ft.contracts.errors import ConfigurationError

__all__ = ["ENVIRONMENT_PREFIX", "DetectorSettings"]

ENVIRONMENT_PREFIX = "GEMINI_FT_DETECTOR_"


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """Thresholds of the detector. All durations are seconds on its own monotonic clock."""

    num_intervals: int = 100
    """How many arrivals of a node its rhythm is learnt from."""

    deviation_floor_s: float = 0.1
    """A rhythm is never trusted to be steadier than this."""

    acceptable_pause_s: float = 1.0
    """Silence beyond the usual interval that a busy node may show."""

    patience_s: float = 15.0
    """The same while the node's job is not known to be broken. A silent agent whose job trains on is most likely
    being restarted, and waiting for it costs nothing; once the job has broken, every second counts."""

    suspect_phi: float = 3.0
    """Suspicion at which a node is called suspected: one false alarm in 10^3 silences."""

    fail_phi: float = 8.0
    """Suspicion at which a node is called failed: one false alarm in 10^8 silences."""

    grace_s: float = 10.0
    """How long nobody is judged by old heartbeats after a start, a reconnection or a stall of the detector."""

    mass_silence_window_s: float = 5.0
    """Nodes whose last heartbeats lie this close together fell silent together."""

    mass_silence_hold_s: float = 30.0
    """How long the detector suspects itself when most nodes fell silent together, before it believes it."""

    stall_s: float = 1.0
    """A tick that comes this much too late, or a broker that keeps a message this long, proves nothing about nodes."""

    tick_s: float = 0.05
    """Period of the judgement."""

    forget_s: float = 3600.0
    """How long a failed node is remembered."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigurationError(
                    f"the failure detector's {field.name} is {getattr(self, field.name)}, but must be above zero; "
                    f"change {ENVIRONMENT_PREFIX}{field.name.upper()}"
                )
        if self.suspect_phi > self.fail_phi:
            raise ConfigurationError(
                f"the failure detector's suspect_phi {self.suspect_phi} is above its fail_phi {self.fail_phi}, "
                "so that nodes would fail without having been suspected; lower suspect_phi"
            )
        if self.stall_s > self.acceptable_pause_s:
            raise ConfigurationError(
                f"the failure detector's stall_s {self.stall_s} is above its acceptable_pause_s "
                f"{self.acceptable_pause_s}, so that nodes would be blamed for its own stalls; lower stall_s"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "DetectorSettings":
        """Read GEMINI_FT_DETECTOR_<FIELD>; raises ConfigurationError for a value that is not a number in range."""
        given: dict[str, int | float] = {}
        for field in dataclasses.fields(cls):
            variable = ENVIRONMENT_PREFIX + field.name.upper()
            if variable in environment:
                number = int if field.type is int else float
                try:
                    given[field.name] = number(environment[variable])
                except ValueError:
                    raise ConfigurationError(
                        f"{variable} is {environment[variable]!r}, which is not a number; give one or unset it"
                    ) from None
        return cls(**given)  # type: ignore[arg-type]  # each number has the type of its field
