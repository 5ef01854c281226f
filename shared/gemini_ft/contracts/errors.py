"""The one error tree.

GeminiError
|-- ConfigurationError     a setting or an argument is wrong
|   |-- CapacityError      the memory that a job needs does not fit
|   `-- InvalidRequestError   a part of a request has a value that cannot be used
|-- StateError             a state_dict holds something that cannot be kept or does not match
|-- ProtocolError          a frame or message is malformed, oversized or out of order
|-- AuthenticationError    a token or key is absent or wrong
|-- ForbiddenError         a token is good, but not for this
|-- ConflictError          an identity or a resource is already in use
|-- PreconditionFailedError   something has changed since it was looked at
|-- NotFoundError          a job, node or version is unknown
|-- FencedError            a write carries an old generation
|-- IntegrityError         bytes do not match their digest
|-- NoVersionError         no complete version can be restored
|-- UnavailableError       a process that is needed cannot be reached
|-- TooManyStreamsError    too many streams of the API are open
|-- WaitTimeoutError       a bounded wait ran out
`-- JobClosedError         the job has ended

Every error stores its facts as attributes; `str(error)` is one sentence: what happened, to whom, and what to
change. `to_wire` and `from_wire` carry an error across a process border without pickle.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

__all__ = [
    "AuthenticationError",
    "CapacityError",
    "ConfigurationError",
    "ConflictError",
    "FencedError",
    "ForbiddenError",
    "GeminiError",
    "IntegrityError",
    "InvalidRequestError",
    "JobClosedError",
    "NoVersionError",
    "NotFoundError",
    "PreconditionFailedError",
    "ProtocolError",
    "StateError",
    "TooManyStreamsError",
    "UnavailableError",
    "WaitTimeoutError",
    "from_wire",
]


class GeminiError(Exception):
    """Base of all errors that Gemini-FT raises on purpose. `code` is stable and goes over the wire."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to_wire(self) -> dict[str, Any]:
        """Return a JSON-able form that `from_wire` turns into an equal error."""
        return {"code": self.code, "message": str(self), "facts": self.facts}


class ConfigurationError(GeminiError):
    """A setting or an argument is wrong; the sentence names it and the allowed values."""

    code = "configuration"


class CapacityError(ConfigurationError):
    """The memory that a job needs does not fit; facts: need_bytes, have_bytes, knob."""

    code = "capacity"


class InvalidRequestError(ConfigurationError):
    """A part of a request has a value that cannot be used; facts: field."""

    code = "invalid_request"


class StateError(GeminiError):
    """A state_dict holds something that cannot be kept, or does not match what was saved; facts: path."""

    code = "state"


class ProtocolError(GeminiError):
    """A frame or message is malformed, oversized or out of order; the connection is closed after it."""

    code = "protocol"


class AuthenticationError(GeminiError):
    """A token or key is absent or wrong."""

    code = "authentication"


class ForbiddenError(GeminiError):
    """The token is good, but not for this."""

    code = "forbidden"


class ConflictError(GeminiError):
    """An identity or a resource is already in use; the sentence shows both parties."""

    code = "conflict"


class PreconditionFailedError(GeminiError):
    """What is to be changed is no longer what If-Match says."""

    code = "precondition_failed"


class NotFoundError(GeminiError):
    """A job, node or version is unknown."""

    code = "not_found"


class FencedError(GeminiError):
    """A write carries an old generation; facts: generation (of the write), current_generation."""

    code = "fenced"

    @classmethod
    def of(cls, who: str, generation: int, current_generation: int) -> FencedError:
        """Build the sentence for a write of `who` that carried `generation`."""
        return cls(
            f"{who} belongs to generation {generation}, but the job is at generation {current_generation}; "
            "the write was refused and the writer must stop",
            generation=generation,
            current_generation=current_generation,
        )


class IntegrityError(GeminiError):
    """Bytes do not match the digest taken when they were staged; facts: where, expected, found."""

    code = "integrity"


class NoVersionError(GeminiError):
    """No complete, verified version can be restored; the sentence says which shards are lost."""

    code = "no_version"


class UnavailableError(GeminiError):
    """A process that is needed cannot be reached; the sentence names it and its address."""

    code = "unavailable"


class TooManyStreamsError(GeminiError):
    """Too many streams of the API are open; facts: retry_after_s."""

    code = "too_many_streams"


class WaitTimeoutError(GeminiError):
    """A bounded wait ran out; facts: what, waited_s."""

    code = "wait_timeout"

    @classmethod
    def of(cls, what: str, waited: timedelta | float) -> WaitTimeoutError:
        """Build the sentence for a wait for `what` that ran out after `waited`."""
        waited_s = waited.total_seconds() if isinstance(waited, timedelta) else waited
        return cls(f"waited {waited_s:g} s for {what}, which did not happen", what=what, waited_s=waited_s)


class JobClosedError(GeminiError):
    """The job has ended; facts: outcome (`succeeded`, `failed` or `stopped`)."""

    code = "job_closed"


def _tree(root: type[GeminiError]) -> dict[str, type[GeminiError]]:
    # A subclass without a code of its own is its parent on the other side.
    found = {root.code: root} if "code" in vars(root) else {}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_wire(wire: dict[str, Any]) -> GeminiError:
    """Rebuild an error from `to_wire`; an unknown code becomes a plain GeminiError with the same sentence."""
    kind = _tree(GeminiError).get(str(wire.get("code")), GeminiError)
    facts = wire.get("facts")
    return kind(str(wire.get("message", "unknown error")), **(facts if isinstance(facts, dict) else {}))
