"""The size of lazily created optimizer state is known before the first step, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemini_ft.contracts.errors import StateError
from gemini_ft.worker.optimizer_state import predicted_optimizer_state
from gemini_ft.worker.state_codec import TensorSpec, flatten


def _specs(state: dict[str, Any]) -> tuple[TensorSpec, ...]:
    return flatten({"o": state}, allow_meta=True).specs


MAKERS = {
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


@pytest.mark.parametrize("name", MAKERS)
def test_prediction_equals_what_the_first_step_makes(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2).requires_grad_(False))
    optimizer = MAKERS[name]([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}])
    torch.optim.lr_scheduler.LinearLR(optimizer)  # wraps optimizer.step
    before = [p.detach().clone() for p in model.parameters()]
    predicted = _specs(predicted_optimizer_state(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    assert predicted == _specs(optimizer.state_dict())
    assert predicted == _specs(predicted_optimizer_state(optimizer))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_an_optimizer_that_cannot_be_probed_is_named(kind: Any) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(2))])
    sentence = rf"state of {kind.__name__} cannot be found before its first step.*take one optimizer step"
    with pytest.raises(StateError, match=sentence):
        predicted_optimizer_state(optimizer)
