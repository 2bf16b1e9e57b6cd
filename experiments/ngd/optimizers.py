"""The optimizers that the NGD paper compares, as steps on a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator
from curvlab.optim import NGD, ExactNGD

Step = Callable[[Tensor, Tensor], float]


def make_step(model: nn.Module, loss: nn.Module, settings: Mapping[str, Any]) -> Step:
    """Return a function that takes one step on (inputs, targets) and returns the loss before it.

    Args:
        model: its parameters are moved.
        loss: mean over the batch.
        settings: `name` (sgd, ngd or exact_ngd), `lr`, and the optimizer's own. exact_ngd takes the Fisher matrix
            of each batch.
    """
    own = {key: value for key, value in settings.items() if key != "name"}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings["name"] == "exact_ngd":
        return _exact_step(model, loss, parameters, own)
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "ngd": NGD}
    if settings["name"] not in makers:
        raise ValueError(f"unknown optimizer {settings['name']!r}: choose sgd, ngd or exact_ngd")
    optimizer = makers[settings["name"]](parameters, **own)

    def step(inputs: Tensor, targets: Tensor) -> float:
        value = _backward(model, loss, inputs, targets)
        optimizer.step()
        return value

    return step


def _exact_step(model: nn.Module, loss: nn.Module, parameters: list[nn.Parameter], own: dict[str, Any]) -> Step:
    optimizers: list[ExactNGD] = []

    def step(inputs: Tensor, targets: Tensor) -> float:
        fisher = FisherOperator(model, loss, (inputs, targets))
        if not optimizers:
            optimizers.append(ExactNGD(parameters, fisher, **own))
        value = _backward(model, loss, inputs, targets)
        optimizers[0].step(fisher=fisher)
        return value

    return step


def _backward(model: nn.Module, loss: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.zero_grad()
    value: Tensor = loss(model(inputs), targets)
    value.backward()
    return value.item()
