"""The exact derivative of test measurements by the weights of a training run's examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from curvlab.influence.derivatives import Measurement
from curvlab.influence.unrolled.forward import displacements
from curvlab.influence.unrolled.measured import Reduction, measured_gradients
from curvlab.influence.unrolled.reverse import weight_derivatives
from curvlab.linalg import flatten
from curvlab.problem import Data, Pairs, output_loss
from curvlab.shown import Shown, Summary, counted
from curvlab.training import Replay, TrainingHistory, TrainingRun
from curvlab.training.history import State
from curvlab.training.steps import Loss

# How far the replay may end from the model, relative to how far the run went: rounding, which training amplifies.
_GAP = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass(frozen=True, repr=False)
class UnrolledResponse(Shown):
    """Derivatives through a training run.

    Attributes:
        scores: (num_measurements, num_points), N dm/dw_i: the change of a measurement per unit of weight that is
            added to example i's loss in the mean training loss, as influence scores have it. Leaving one of N
            points out is a weight of -1/N.
        mode: "reverse" or "forward".
        gap: ‖θ_T of the replay - the model's θ‖ / ‖model's θ - θ_0‖: rounding.
        num_stored_states: the most states of the training (1 + num_buffers vectors) held at a time.
    """

    scores: Tensor
    mode: str
    gap: float
    num_stored_states: int

    def summary(self) -> Summary:
        """Return the range of the scores, and how well the training was replayed."""
        return Summary(
            "unrolled response",
            f"from {float(self.scores.min()):.3g} to {float(self.scores.max()):.3g}",
            f"{self.scores.shape[0]:,} x {self.scores.shape[1]:,} scores; the replay ends {self.gap:.2g} away",
            (f"{self.mode} mode", f"{counted(self.num_stored_states, 'state')} held at most"),
        )


def unrolled_response(
    model: nn.Module,
    loss: Loss,
    train_data: Pairs,
    test: Data,
    *,
    run: TrainingRun | TrainingHistory,
    points: Tensor | Sequence[int] | None = None,
    measurement: Measurement | None = None,
    reduction: Reduction = "none",
    mode: Literal["auto", "reverse", "forward"] = "auto",
) -> UnrolledResponse:
    """Return N dm(θ_T)/dw_i of every test example's measurement m by the weight w_i of every training example.

    θ_T(w) is where the run ends when each batch has the loss 1/|B| sum_i w_i l_i; the derivative is taken at the
    run's own weights and is exact, the optimizer's momentum and moving averages included (Hara, Nitanda & Maehara
    2019 for plain SGD). Reverse mode goes back once for all examples, with one column for each measurement: of
    θ_{t+1} = U(θ_t, g_t), λ_t = ∂_θ Uᵀ λ_{t+1} + H_B ∂_g Uᵀ λ_{t+1}. Forward mode carries dθ_t/dw_i along, one
    column for each point, and stores nothing.

    Args:
        model: as trained by `run`; the derivative is refused where the replay does not end at its parameters.
        loss: as `train` had it: with a closed form, or any mean over examples of the user's own.
        train_data: as `train` had it.
        test: examples that are measured.
        run: what `train(..., record=True)` returned, or a `TrainingRun`.
        points: indices of the training examples that are asked for; None: all.
        measurement: (outputs, targets) -> (M,), one number for each test example; default: its loss.
        reduction: "mean" for the mean measurement alone, one row of scores.
        mode: "auto": reverse, unless there are fewer points than measurements and the loss has a closed form
            (PyTorch has no forward mode for the derivatives of some others, such as nn.HuberLoss).

    Cost: reverse three trainings, and a second backward pass of each batch for every measurement; forward one
    training, and a tangent of a gradient for every point. Memory: reverse 2 √T + 1 states, forward none; for each
    column a state, and the activations of a batch. The run's batches are part of what is differentiated, and
    are not cut; a killed call starts again.
    """
    if mode not in ("auto", "reverse", "forward"):
        raise ValueError(f"mode must be 'auto', 'reverse' or 'forward', got {mode!r}")
    replay = Replay(model, loss, train_data, TrainingRun.of(run))
    chosen = torch.arange(replay.num_examples) if points is None else torch.as_tensor(points).long()
    _check_points(chosen, replay.num_examples)
    gradients = measured_gradients(model, loss, test, measurement=measurement, reduction=reduction)
    if mode == "auto":
        fewer = len(chosen) < len(gradients) and not output_loss(loss).twice_backward
        mode = "forward" if fewer else "reverse"
    if mode == "reverse":
        derivatives, end = weight_derivatives(replay, gradients)
        scores = derivatives[:, chosen.to(derivatives.device)]
    else:
        columns, end = displacements(replay, chosen)
        scores = gradients @ columns
    return UnrolledResponse(
        replay.num_examples * scores, mode, checked_gap(replay, model, end), replay.peak_states
    )


def checked_gap(replay: Replay, model: nn.Module, end: State) -> float:
    """Return how far the replay ends from the model, or raise a ValueError where that is not rounding."""
    trained = flatten([parameter.detach() for parameter in model.parameters() if parameter.requires_grad])
    start = replay.first_state()[0]
    gap = float((end[0] - trained).norm() / (trained - start).norm().clamp(min=torch.finfo(trained.dtype).tiny))
    if not gap <= _GAP.get(trained.dtype, 1e-2):
        raise ValueError(
            f"the replayed run ends elsewhere than the model: {gap:.2g} of the way from its start. Check that "
            "start, batches, rule and example_weights are those of this training, and that its "
            "gradients were not clipped; in float32 a long or unstable training cannot be replayed: train in "
            "float64."
        )
    return gap


def _check_points(points: Tensor, num_examples: int) -> None:
    if points.ndim != 1 or not len(points) or int(points.min()) < 0 or int(points.max()) >= num_examples:
        raise ValueError(
            f"points must be indices of training examples from 0 to {num_examples - 1}, got shape "
            f"{tuple(points.shape)}"
        )
