"""The optimizers that the NGD paper compares, each with the step that it takes on a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator
from curvlab.optim import NGD, ExactNGD
from curvlab.training import Learner, Step, StepInfo, TrainingBatch, gradient_step


def make_optimizer(
    model: nn.Module, loss: nn.Module, example: tuple[Tensor, Tensor], settings: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer, Step]:
    """Return an optimizer and its step, as `train` takes them.

    Args:
        model: its parameters are moved.
        loss: mean over the batch.
        example: (inputs, targets) of at least one example; exact_ngd needs one before the first batch.
        settings: `name` (sgd, ngd or exact_ngd), `lr`, and the optimizer's own. exact_ngd takes the Fisher matrix
            of each batch.
    """
    own = {key: value for key, value in settings.items() if key != "name"}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings["name"] == "exact_ngd":
        return ExactNGD(parameters, FisherOperator(model, loss, example), **own), fisher_step
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "ngd": NGD}
    if settings["name"] not in makers:
        raise ValueError(f"unknown optimizer {settings['name']!r}: choose sgd, ngd or exact_ngd")
    return makers[settings["name"]](parameters, **own), gradient_step


def fisher_step(learner: Learner, batch: TrainingBatch) -> StepInfo:
    """Move by (F + κI)⁻¹ ∇L_B with F and ∇L_B of the same batch; the optimizer is `ExactNGD`."""
    optimizer = learner.optimizer
    if not isinstance(optimizer, ExactNGD) or not isinstance(learner.loss.loss, nn.Module):
        raise TypeError("fisher_step needs ExactNGD and a loss module")
    fisher = FisherOperator(learner.model, learner.loss.loss, (batch.inputs, batch.targets))
    optimizer.zero_grad()
    value = learner.batch_loss(batch)
    value.backward()
    optimizer.step(fisher=fisher)
    return StepInfo(value.item())
