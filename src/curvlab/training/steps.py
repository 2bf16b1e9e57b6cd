"""What one training step does with a batch: functions of one form, which can be exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from curvlab.arguments import positive
from curvlab.problem import Batches, Data, FunctionLoss, Problem, output_loss
from curvlab.problem.batch import Inputs
from curvlab.problem.closed_forms import refuse_ambiguous_classes
from curvlab.problem.model_function import called, eval_mode, logits_of
from curvlab.problem.own_losses import LossFunction
from curvlab.problem.parameters import checked_model
from curvlab.problem.problem import checked_weights
from curvlab.problem.repeatable import check_differentiable
from curvlab.seeding import generator_of

Loss: TypeAlias = nn.Module | LossFunction


# ----------------------------------------------------------------------------- the loss of a batch
class MeanLoss:
    """L_B = 1/|B| sum_{i in B} w_i l_i, with w_i = 1 where no weights are given.

    l_i is scaled so that equal weights of 1 give the loss itself: for language models l_i is the summed loss of
    sequence i, times |B| over the number of tokens that the batch predicts. The sum is divided by the number of
    examples of the batch, never by the sum of the weights: L_B is linear in the weights, dL_B/dw_i = l_i / |B|,
    and an example of weight 0 is removed while the others keep the weight they had. To have the mean over the
    remaining ones, give them the weight N / (number of remaining examples).

    Logits are (B, C), or (B, T, V) with one label for each position, where classes come last.

    Args:
        loss: mean over examples: nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), another module, or a
            function of (outputs, targets).
    """

    def __init__(self, loss: Loss) -> None:
        if isinstance(loss, type) or not callable(loss):
            output_loss(loss)  # says what to pass
        self.loss = loss

    def __call__(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return L_B, (); `weights` is (B,)."""
        if weights is not None:
            return (self.per_example(outputs, targets) * weights).mean()
        sequences = outputs.ndim > 2 and not targets.is_floating_point() and outputs.shape[:-1] == targets.shape
        if sequences and isinstance(self.loss, nn.CrossEntropyLoss):
            refuse_ambiguous_classes(outputs, targets)
            outputs, targets = outputs.flatten(0, -2), targets.flatten()
        try:
            value: Tensor = self.loss(outputs, targets)
        except (RuntimeError, IndexError, ValueError):
            output_loss(self.loss).check(outputs, targets)  # says what does not fit
            raise
        if outputs.shape != targets.shape and outputs.squeeze(-1).shape == targets.squeeze(-1).shape:
            # (B, 1) and (B,): PyTorch's losses broadcast them to (B, B).
            output_loss(self.loss).check(outputs, targets)
        if not isinstance(value, Tensor):
            raise TypeError(f"the loss returns {type(value).__name__}: return a tensor, so that autograd knows it")
        if value.ndim:
            raise ValueError(
                f"the loss returns shape {tuple(value.shape)} for a batch: return one number, the mean over its "
                "examples (reduction='mean')"
            )
        return value

    def per_example(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return l_i, (B,), whose mean is L_B without weights."""
        reduction = getattr(self.loss, "reduction", "mean")
        if reduction not in ("mean", "batchmean"):
            raise ValueError(
                f"reduction='{reduction}': weights of examples are those of a mean, so the loss needs "
                "reduction='mean'"
            )
        known = output_loss(self.loss)
        if not isinstance(known, FunctionLoss):  # its check calls the function twice more
            known.check(outputs, targets)
        return known.per_example(outputs, targets) * (len(targets) / known.count(targets))


def sampled_label_loss(
    loss: nn.Module, outputs: Tensor, targets: Tensor, *, generator: torch.Generator | int
) -> Tensor:
    """Return -Σ_n log p(ŷ_n | h_n) / √N, ŷ drawn from the model: its gradient is d of Eq. 8 (Ginger, 2024).

    E d dᵀ is FisherOperator(model, loss, batch), with its conventions: N counts the predictions that the loss
    averages over (predicted tokens; all single outputs of nn.MSELoss, which is read as the Gaussian with
    p ∝ exp(-(h - y)²)), and is 1 for reduction="sum". Compute the outputs in eval mode, as the authors' code does.

    Args:
        loss: nn.CrossEntropyLoss (classes last), nn.MSELoss or nn.BCEWithLogitsLoss.
        outputs: of the model, with their graph.
        targets: only their shape counts, and which of them cross-entropy ignores: those are not drawn.
        generator: draws the labels; or a seed.

    Cost: that of the loss.
    """
    closed_form = output_loss(loss)
    closed_form.check(outputs, targets)
    drawn = closed_form.sample_targets(outputs.detach(), targets, generator_of(generator, outputs.device))
    of_drawn = closed_form.for_sampled_targets()
    count = 1.0 if closed_form.reduction == "sum" else of_drawn.count(drawn)
    return of_drawn.per_example(outputs, drawn).sum() / max(count, 1.0) ** 0.5


# -------------------------------------------------------------------------- the model and its data
def opened(
    model: nn.Module | Problem,
    loss: Loss | None,
    data: Data | None,
    name: str = "data",
    *,
    weights: Tensor | None = None,
) -> tuple[nn.Module, Loss, Batches, Tensor | None]:
    """Return model, loss, data and the examples' weights for training: opened, or out of a `Problem`.

    The model may be in train mode, and examples others at each reading: `Problem.of` refuses both.
    """
    if isinstance(model, Problem) or loss is None:
        problem = Problem.of(model, loss, data, weights)
        if problem.selected is not None:
            raise ValueError("pass the problem itself, not a sample of it")
        return problem.model, cast("Loss", problem.given_loss), problem.data.in_fixed_order(), problem.weights
    examples = cast("Data", data)
    read = Batches.of(checked_model(model), examples, batch_size=1, name=name, repeatable=False).in_fixed_order()
    return model, loss, read, None if weights is None else checked_weights(weights, read.num_examples)


def model_outputs(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return what the model computes: a tensor, or the `.logits` of a Hugging Face model's record."""
    return logits_of(called(model, inputs))


def differs_in_training(model: nn.Module) -> str | None:
    """Name a module of dropout or BatchNorm, whose forward differs in training; None where there is none."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0):
            return f"module '{name}' ({type(module).__name__})"
    return None


# -------------------------------------------------------------------------------------- the steps
@dataclass(frozen=True)
class TrainingBatch:
    """The examples of one step, on the model's device.

    Attributes:
        inputs: (B, ...), or a mapping of such.
        targets: (B, ...).
        weights: (B,), see `MeanLoss`; None: all 1.
    """

    inputs: Any  # Inputs: a step of one's own knows which of the two its model takes
    targets: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class StepInfo:
    """What a step saw, at the weights before it.

    Attributes:
        loss: L_B of its batch.
        gradient_norm: ‖∇L_B‖ before clipping; nan where nothing asked for it.
    """

    loss: float
    gradient_norm: float = math.nan


@dataclass(frozen=True)
class Learner:
    """What a step works on.

    Attributes:
        model: its parameters that require gradients are moved.
        loss: of a batch.
        optimizer: of those parameters.
        max_gradient_norm: gradients are scaled down to this norm; None: never.
        gradient_norm: a step that finds ‖∇L_B‖ at most this does not move; None: every step moves.
        l2: `closure_step` adds l2/2 ‖w‖² to the loss, for optimizers without a weight decay of their own.
    """

    model: nn.Module
    loss: MeanLoss
    optimizer: torch.optim.Optimizer
    max_gradient_norm: float | None = None
    gradient_norm: float | None = None
    l2: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_gradient_norm", "gradient_norm"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters that require gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def batch_loss(self, batch: TrainingBatch) -> Tensor:
        """Return L_B, (). Cost: one forward pass."""
        outputs = check_differentiable(model_outputs(self.model, batch.inputs))
        return self.loss(outputs, batch.targets, batch.weights)

    def measured_norm(self) -> float:
        """Return ‖gradient‖, clip it if that was asked for; nan without a pass over it where nobody needs it."""
        if self.max_gradient_norm is not None:
            return float(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_gradient_norm))
        if self.gradient_norm is not None:
            return gradient_norm(self.parameters)
        return math.nan

    def arrived(self, norm: float) -> bool:
        """Return whether a gradient of this norm ends the training."""
        return self.gradient_norm is not None and norm <= self.gradient_norm


Step: TypeAlias = Callable[[Learner, TrainingBatch], StepInfo]


def gradient_step(learner: Learner, batch: TrainingBatch) -> StepInfo:
    """Move by the gradient of the batch's loss. Cost: one forward and one backward pass.

    Nothing moves when the loss is not finite, or the gradient norm small enough.
    """
    learner.optimizer.zero_grad()
    return _move(learner, learner.batch_loss(batch))


def _move(learner: Learner, loss: Tensor) -> StepInfo:
    value = loss.item()
    if not math.isfinite(value):
        return StepInfo(value)
    loss.backward()
    norm = learner.measured_norm()
    if not learner.arrived(norm):
        learner.optimizer.step()
    return StepInfo(value, norm)


def curvature_step(learner: Learner, batch: TrainingBatch) -> StepInfo:
    """Let Ginger or QNG see a gradient of sampled labels, then move by the gradient of the loss.

    The optimizer's `update_curvature()` reads the gradient of `sampled_label_loss`, with the model in eval mode.
    Example weights enter the loss alone. The draws come from the global random state, which `train` seeds: the
    order of the batches is that of `gradient_step` from the same seed. Of outputs that are not finite no labels
    can be drawn: the optimizer then sees nothing.

    Cost: two forward and two backward passes.
    """
    with eval_mode(learner.model):
        _see_sampled_labels(learner, model_outputs(learner.model, batch.inputs), batch)
    return gradient_step(learner, batch)


def shared_curvature_step(learner: Learner, batch: TrainingBatch) -> StepInfo:
    """As `curvature_step`, with both gradients from one forward pass in the mode that the model is in.

    In train mode the sampled labels are those of the network with the batch's own statistics (BatchNorm) and with
    dropout, and their gradient flows through both; without such layers it is the same step as `curvature_step`.

    Cost: one forward and two backward passes.
    """
    outputs = model_outputs(learner.model, batch.inputs)
    _see_sampled_labels(learner, outputs, batch, again=True)
    learner.optimizer.zero_grad()
    return _move(learner, learner.loss(outputs, batch.targets, batch.weights))


def _see_sampled_labels(learner: Learner, outputs: Tensor, batch: TrainingBatch, *, again: bool = False) -> None:
    """Hand the gradient for sampled labels to the optimizer; `again`: another gradient of `outputs` follows."""
    update = getattr(learner.optimizer, "update_curvature", None)
    if update is None:
        raise TypeError(
            f"curvature_step needs an optimizer with update_curvature(), such as Ginger, got "
            f"{type(learner.optimizer).__name__}: use gradient_step for it"
        )
    if not isinstance(learner.loss.loss, nn.Module):
        raise TypeError(
            "curvature_step draws labels from the loss's distribution, which a function does not say: pass "
            "nn.CrossEntropyLoss(), nn.MSELoss() or nn.BCEWithLogitsLoss(), or take an optimizer such as NGD"
        )
    learner.optimizer.zero_grad()
    if not bool(outputs.isfinite().all()):
        return
    sampled = sampled_label_loss(learner.loss.loss, outputs, batch.targets, generator=torch.default_generator)
    sampled.backward(retain_graph=again)
    update()


def closure_step(learner: Learner, batch: TrainingBatch) -> StepInfo:
    """Let an optimizer that evaluates the loss several times, such as L-BFGS, move on one batch.

    Cost: one forward and one backward pass for each evaluation.
    """
    parameters = learner.parameters
    first = math.nan

    def evaluate() -> Tensor:
        nonlocal first
        learner.optimizer.zero_grad()
        loss = learner.batch_loss(batch)
        first = loss.item() if math.isnan(first) else first
        if learner.l2:
            loss = loss + 0.5 * learner.l2 * sum(parameter.square().sum() for parameter in parameters)
        loss.backward()
        return loss.detach()

    norm = step_by_closure(learner.optimizer, evaluate, parameters, gradient_norm_at_end=learner.gradient_norm)
    return StepInfo(first, norm)


def step_by_closure(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Tensor],
    parameters: list[nn.Parameter],
    *,
    gradient_norm_at_end: float | None,
) -> float:
    """Take one step of `optimizer`, unless the gradient is small enough; return the gradient's norm before it.

    Args:
        optimizer: its `step` takes a closure.
        closure: zeroes the gradients, computes the loss, calls backward() and returns the loss.
        parameters: whose gradients count.
        gradient_norm_at_end: no step where the norm is at most this; None: always a step.

    Cost: no evaluation beside those of the optimizer itself.
    """
    value: Tensor | None = closure()
    norm = gradient_norm(parameters)
    if not bool(torch.isfinite(value)) or (gradient_norm_at_end is not None and norm <= gradient_norm_at_end):  # type: ignore[arg-type]
        return norm

    def with_first_known() -> Tensor:
        nonlocal value
        known, value = value, None
        return closure() if known is None else known

    optimizer.step(with_first_known)  # type: ignore[arg-type]  # torch types the closure's loss as float
    return norm


def gradient_norm(parameters: list[nn.Parameter]) -> float:
    """Return the norm of all gradients together."""
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
