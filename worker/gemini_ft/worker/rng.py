"""The random number generators of a process, restored last, so that nothing that restoring does can advance them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from gemini_ft.contracts.errors import StateError

__all__ = ["RngState"]


class RngState:
    """Stateful over Python's `random`, numpy's global generator, torch's CPU generator and those of the CUDA devices.

    Generators that a script makes for itself (`random.Random`, `np.random.default_rng`, `torch.Generator`) are state
    of the script: put `getstate()`, `bit_generator.state` or `get_state()` into a Stateful of your own.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator, copied."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            # Asking would start CUDA in a process that does not use it.
            "cuda": torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator.

        Raises:
            StateError: the state was taken with another number of CUDA devices.
        """
        cuda = state_dict["cuda"]
        if cuda and len(cuda) != torch.cuda.device_count():
            raise StateError(
                f"rng was kept with {len(cuda)} CUDA devices, this process sees {torch.cuda.device_count()}; "
                "set CUDA_VISIBLE_DEVICES as it was",
                path="rng/cuda",
            )
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
