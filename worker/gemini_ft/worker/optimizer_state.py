"""The size of an optimizer's state before its first step.

Optimizers such as Adam create their state in the first step, but memory for checkpoints is reserved before it. So the
optimizer's own `step` is run once on copies of the parameters on the meta device, which have shapes and no bytes.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch

from gemini_ft.contracts.errors import StateError

__all__ = ["predicted_optimizer_state"]


def predicted_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()` as it will be after the first step; tensors that do not exist yet are on meta.

    Raises:
        StateError: the optimizer cannot step on meta tensors and has no state yet.
    """
    state: dict[str, Any] = optimizer.state_dict()
    num_params = sum(len(group["params"]) for group in optimizer.param_groups)
    if len(state["state"]) == num_params:
        return state
    try:
        predicted = _step_on_meta(optimizer)
    except Exception as error:
        raise StateError(
            f"the size of the state of {type(optimizer).__name__} cannot be found before its first step ({error}); "
            "take one optimizer step before building the Checkpointer",
            path="optimizer/state",
        ) from error
    missing = {
        index: {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        for index, entry in predicted["state"].items()
        if index not in state["state"]
    }
    return {**state, "state": {**state["state"], **missing}}


def _step_on_meta(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # A plain copy would bring the parameters along, and a new object would need the right constructor arguments.
    probe: torch.optim.Optimizer = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    probe.state = defaultdict(dict)
    probe._optimizer_step_pre_hooks = OrderedDict()
    probe._optimizer_step_post_hooks = OrderedDict()
    probe.param_groups = []
    for group in optimizer.param_groups:
        params = [torch.empty_like(p, device="meta", requires_grad=True) for p in group["params"]]
        for meta, param in zip(params, group["params"], strict=True):
            # A parameter that is frozen gets no gradient, and no state.
            meta.grad = torch.empty_like(meta) if param.requires_grad else None
        probe.param_groups.append({**group, "params": params, "fused": None, "capturable": False})
    type(optimizer).step(probe)
    return probe.state_dict()
