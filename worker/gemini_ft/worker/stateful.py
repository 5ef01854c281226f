"""What the worker library asks of the objects whose state it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["PredictsState", "Stateful"]


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is kept, as in torch.distributed.checkpoint: a module, an optimizer, a data position."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the whole state; its tensors may be the live ones, they are never written to."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over `state_dict`. Tensors that were live are filled already and are passed as they are."""
        ...


@runtime_checkable
class PredictsState(Stateful, Protocol):
    """A Stateful whose tensors appear only in the first step, but whose size must be known before it."""

    def predicted_state_dict(self) -> Mapping[str, Any]:
        """Return the state as it will be after the first step; tensors that do not exist yet are on `meta`."""
        ...
