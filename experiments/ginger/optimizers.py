"""The optimizers of the races, by the settings that the config gives them, each with its step."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from curvlab.lab.data import cropped_and_flipped
from curvlab.optim import NGD, QNG, Ginger
from curvlab.training import (
    Learner,
    MeanLoss,
    Step,
    StepInfo,
    TrainingBatch,
    curvature_step,
    gradient_step,
    shared_curvature_step,
    train,
)
from experiments.ginger.step_cost import step_cost

PADDING = 4  # pixels of 32; He et al. (2016)
WITH_CURVATURE = {"ginger": Ginger, "qng": QNG}
LABELS = ("sampled", "data", "none")
NUM_MEASURED = 10  # steps of a training at which clipped entries are counted
CLIPPED = 0.999  # of the clip: rounding


def make_optimizer(model: nn.Module, settings: Mapping[str, Any]) -> tuple[torch.optim.Optimizer, Step]:
    """Return an optimizer and its step, as `train` takes them.

    Args:
        model: its parameters are moved.
        settings: `optimizer` (momentum, adam, ginger, qng, ngd, muon, soap), `lr`, and the optimizer's own. Of
            ginger and qng also `labels`, of the gradient that their curvature sees: "sampled" from the model (a
            second gradient, in eval mode, which shares its forward pass where there is neither BatchNorm nor
            dropout); "data": the loss's own gradient, in train mode; "none": no curvature.
    """
    own = {key: value for key, value in settings.items() if key not in ("optimizer", "labels")}
    name, parameters = settings["optimizer"], [p for p in model.parameters() if p.requires_grad]
    if name in WITH_CURVATURE:
        sampled = curvature_step if any(map(_has_modes, model.modules())) else shared_curvature_step
        steps: dict[str, Step] = {"sampled": sampled, "data": data_label_step, "none": step_without_curvature}
        if settings["labels"] not in steps:
            raise ValueError(f"unknown labels {settings['labels']!r}: choose {', '.join(LABELS)}")
        return WITH_CURVATURE[name](parameters, **own), steps[settings["labels"]]
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "momentum": lambda lr, momentum: torch.optim.SGD(parameters, lr=lr, momentum=momentum),
        "adam": lambda lr, momentum, decay: torch.optim.Adam(parameters, lr=lr, betas=(momentum, decay)),
        "ngd": lambda **settings: NGD(parameters, **settings),
        "muon": lambda **settings: MuonWithAdam(model, **settings),
        "soap": lambda **settings: _soap(parameters, **settings),
    }
    if name not in makers:
        raise ValueError(f"unknown optimizer {name!r}: choose {', '.join([*WITH_CURVATURE, *makers])}")
    return makers[name](**own), gradient_step


def _has_modes(module: nn.Module) -> bool:
    """Return whether a module computes something else in eval mode."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0)


def gradients_per_step(settings: Mapping[str, Any]) -> int:
    """Return how many gradients of a batch a step takes: two where the curvature has one of its own."""
    return 2 if settings["optimizer"] in WITH_CURVATURE and settings["labels"] == "sampled" else 1


def why_unavailable(settings: Mapping[str, Any]) -> str | None:
    """Return what is missing for an optimizer, or None."""
    if settings["optimizer"] == "soap" and importlib.util.find_spec("pytorch_optimizer") is None:
        return "pytorch-optimizer is not installed: pip install 'curvlab[benchmark]'"
    return None


# ------------------------------------------------------------------------------------ steps
def data_label_step(learner: Learner, batch: TrainingBatch) -> StepInfo:
    """Let Ginger or QNG see the loss's own gradient, scaled as Eq. 8 (the empirical Fisher matrix), then step.

    Cost: one forward and one backward pass.
    """
    learner.optimizer.zero_grad()
    loss = learner.batch_loss(batch)
    value = loss.item()
    if not math.isfinite(value):
        return StepInfo(value)
    loss.backward()
    gradients = [parameter.grad for parameter in learner.parameters if parameter.grad is not None]
    root = len(batch.targets) ** 0.5  # the sum over the batch divided by its root, from the mean
    torch._foreach_mul_(gradients, root)
    learner.optimizer.update_curvature()  # type: ignore[attr-defined]  # Ginger or QNG
    torch._foreach_mul_(gradients, 1 / root)
    learner.optimizer.step()
    return StepInfo(value)


def step_without_curvature(learner: Learner, batch: TrainingBatch) -> StepInfo:
    """Take a gradient step by Ginger that never sees a curvature, of which it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return gradient_step(learner, batch)


def augmented(step: Step) -> Step:
    """Return the step on randomly cropped and flipped images.

    The draws come from the global random state, which `train` seeds and keeps in its checkpoints.
    """

    def augmented_step(learner: Learner, batch: TrainingBatch) -> StepInfo:
        padding = PADDING * batch.inputs.shape[-1] // 32
        inputs = cropped_and_flipped(batch.inputs, padding=padding, generator=torch.default_generator)
        return step(learner, TrainingBatch(inputs, batch.targets, batch.weights))

    return augmented_step


def clipped_shares(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    settings: Mapping[str, Any],
    *,
    num_steps: int,
    batch_size: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Train by an optimizer that clips, and return at some steps which `share` of the entries was clipped.

    Those entries of the step are lr times the clip, up or down, whatever the gradient's size: a share of 1 makes
    the step a sign. Entries that never had a gradient (a pixel that is always 0) count as not clipped.
    """
    optimizer, plain = make_optimizer(model, settings)
    at = sorted({round(num_steps ** (place / NUM_MEASURED)) for place in range(NUM_MEASURED + 1)})
    size = CLIPPED * settings["lr"] * settings["clip"]
    count, shares = 0, []

    def step(learner: Learner, batch: TrainingBatch) -> StepInfo:
        nonlocal count
        count += 1
        before = [parameter.detach().clone() for parameter in learner.parameters] if count in at else []
        info = plain(learner, batch)
        if before:
            moved = [(now - old).abs() for now, old in zip(learner.parameters, before, strict=True)]
            shares.append(float(torch.cat([entries.flatten() for entries in moved]).ge(size).double().mean()))
        return info

    train(
        model,
        nn.CrossEntropyLoss(),
        data,
        num_steps=num_steps,
        batch_size=batch_size,
        optimizer=optimizer,
        step=step,
        generator=generator,
        progress=False,
    )
    return {"step": at, "share": shares}


def counted_step(model: nn.Module, batch: TrainingBatch, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flops` and `memory` (bytes, at most alive at one time) of a training step, as `Cost` says."""
    optimizer, step = make_optimizer(model.train(), settings)
    learner = Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer)
    cost = step_cost(learner, batch, step=step, num_repeats=1)
    return {"flops": cost.flops, "memory": cost.peak_bytes}


# ------------------------------------------------------------------------------------ optimizers
def _soap(
    parameters: list[nn.Parameter], lr: float, momentum: float, decay: float, **settings: Any
) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP  # an extra

    return SOAP(parameters, lr=lr, betas=(momentum, decay), weight_decay=0.0, **settings)


class MuonWithAdam(torch.optim.Optimizer):
    """torch.optim.Muon on hidden weights, as matrices (out, rest); torch.optim.Adam on vectors and the last layer.

    Both take one learning rate: Muon's update is scaled to the root mean square of Adam's (its setting
    "match_rms_adamw"). No weight decay.

    Args:
        model: its parameters that require gradients; those with two or more axes are weights.
        lr: of both.
        momentum: of Muon (with Nesterov's step, its default), and Adam's first coefficient.
        decay: Adam's second coefficient.
    """

    def __init__(self, model: nn.Module, lr: float, *, momentum: float, decay: float) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weights = [parameter for parameter in trained if parameter.ndim > 1][:-1]
        if not weights:
            raise ValueError(
                "muon needs a network with a hidden layer: this one has no weights but the last layer's"
            )
        hidden = set(weights)
        others = [parameter for parameter in trained if parameter not in hidden]
        # Muon takes matrices only: views, so that what it changes is the convolution's own kernel.
        self._matrices = [(weight, weight.detach().flatten(1)) for weight in weights]
        super().__init__([{"params": weights, "lr": lr}, {"params": others, "lr": lr}], {})
        self._muon = torch.optim.Muon(
            [view for _, view in self._matrices],
            lr=lr,
            momentum=momentum,
            weight_decay=0.0,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adam = torch.optim.Adam(others, lr=lr, betas=(momentum, decay))

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Any = None
    ) -> None:
        """Take one step; a closure is not supported."""
        if closure is not None:
            raise ValueError("MuonWithAdam takes no closure: compute the gradients before step()")
        for weight, view in self._matrices:
            view.grad = None if weight.grad is None else weight.grad.flatten(1)
        for group, inner in zip(self.param_groups, (self._muon, self._adam), strict=True):
            inner.param_groups[0]["lr"] = group["lr"]
            inner.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of both."""
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of both."""
        self._muon.load_state_dict(state_dict["muon"])
        self._adam.load_state_dict(state_dict["adam"])
        for group, inner in zip(self.param_groups, (self._muon, self._adam), strict=True):
            group["lr"] = inner.param_groups[0]["lr"]
