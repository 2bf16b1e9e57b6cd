"""The derivative of a training run with its curvature held constant in each of a few segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from curvlab.arguments import whole
from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.derivatives import Measurement, directional_derivatives
from curvlab.influence.unrolled import Reduction, checked_gap, measured_gradients
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import Data, Problem
from curvlab.progress import can_be_silent, progress_bar
from curvlab.shown import Shown, Summary, counted
from curvlab.solvers import TrainingFilter
from curvlab.training import Replay, TrainingHistory, TrainingRun
from curvlab.training.own_batches import TrainingData
from curvlab.training.steps import Loss


@dataclass(frozen=True, repr=False)
class SegmentResponse(Shown):
    """Approximate derivatives through a training run.

    Attributes:
        scores: (num_measurements, N), N dm/dw_i, as in `UnrolledResponse`.
        residual: (num_segments, num_measurements), of the filter in each segment, first segment first.
        num_matvecs: products with a segment's matrix, counted per vector.
        gap: as in `UnrolledResponse`.
    """

    scores: Tensor
    residual: Tensor
    num_matvecs: int
    gap: float

    def summary(self) -> Summary:
        """Return the range of the scores, the residual, and how well the training was replayed."""
        return Summary(
            "segment response",
            f"from {float(self.scores.min()):.3g} to {float(self.scores.max()):.3g}",
            f"{self.scores.shape[0]:,} x {self.scores.shape[1]:,} scores; the replay ends {self.gap:.2g} away",
            (counted(len(self.residual), "segment"), f"residual {float(self.residual.max()):.2g} at most"),
        )


@can_be_silent
def segment_response(
    model: nn.Module,
    loss: Loss,
    train_data: TrainingData,
    test: Data,
    *,
    run: TrainingRun | TrainingHistory,
    num_segments: int = 3,
    checkpoints_per_segment: int = 2,
    measurement: Measurement | None = None,
    reduction: Reduction = "none",
    rtol: float = 1e-2,
    batch_size: int = 512,
    progress: bool = True,
) -> SegmentResponse:
    """Return SOURCE's approximation of `unrolled_response` (Bae et al. 2024), for SGD.

    The steps are split into segments of equal length, each with the mean Gauss-Newton matrix G_s and the mean
    gradients of some of its checkpoints, and the sum τ_s of its effective rates (`RunLength`). Going back from
    u = ∇m(θ_T), a segment adds -uᵀ (1 - e^{-τ_s G_s}) G_s⁻¹ ∇l_i to example i's score, and turns u into
    e^{-τ_s G_s} u. Bae et al. put EK-FAC in the place of G_s; here it is the matrix itself, through
    `TrainingFilter`.

    Args:
        model: as trained by `run`; refused where the replay does not end at its parameters.
        loss: as `train` had it: with a closed form, or any mean over examples of the user's own.
        train_data: as `train` had it.
        test: examples that are measured.
        run: of SGD, with weight 1 for all examples.
        num_segments: one for a run whose curvature hardly changes.
        checkpoints_per_segment: evenly spaced; more average more.
        measurement: (outputs, targets) -> (M,), one number for each test example; default: its loss.
        reduction: "mean" for the mean measurement alone.
        rtol: residual of the filter.
        batch_size: examples at a time.
        progress: show bars.

    Cost: a training to find the checkpoints again; for each segment the filter's products, and a directional
    derivative of all examples at each checkpoint.
    """
    run = TrainingRun.of(run)
    whole("num_segments", num_segments)
    if num_segments * whole("checkpoints_per_segment", checkpoints_per_segment) > run.num_steps:
        raise ValueError(
            f"{num_segments} segments of {checkpoints_per_segment} checkpoints do not fit a run of "
            f"{run.num_steps} steps: at least one of each, and no more checkpoints than steps"
        )
    if run.example_weights is not None:
        raise ValueError("a segment's matrix is the mean over all examples: only unrolled_response takes weights")
    replay, length = Replay(model, loss, train_data, run), run.length()
    problem = Problem.of(model, loss, train_data, batch_size=batch_size)
    bounds = [index * run.num_steps // num_segments for index in range(num_segments + 1)]
    segments = [slice(*pair) for pair in pairwise(bounds)]
    positions, gap = _positions(replay, model, [_places(s, checkpoints_per_segment) for s in segments])
    cotangents = measured_gradients(model, loss, test, measurement=measurement, reduction=reduction).T
    scores = cotangents.new_zeros(cotangents.shape[1], replay.num_examples)
    residuals: list[Tensor] = []
    num_matvecs = 0
    for segment, places in zip(reversed(segments), reversed(positions), strict=True):
        checkpoints = [problem.copied(parameters=position) for position in places]
        matrix = _mean([GaussNewtonOperator(each) for each in checkpoints]) + length.weight_decay * identity
        time = sum(length.effective_rates[segment])
        solution = TrainingFilter(time, rtol=rtol).solve(matrix, cotangents)
        for each in checkpoints:
            along = directional_derivatives(each, directions=solution.x, batch_size=batch_size)
            scores -= along.T / len(checkpoints)
        cotangents = cotangents - matrix @ solution.x  # e^{-τμ} = 1 - μ f(μ)
        residuals.insert(0, solution.residual)
        num_matvecs += solution.num_matvecs + cotangents.shape[1]
    return SegmentResponse(scores, torch.stack(residuals), num_matvecs, gap)


def _places(segment: slice, count: int) -> list[int]:
    """Return the steps before which a segment's checkpoints lie: the middles of `count` equal parts."""
    size = segment.stop - segment.start
    return [segment.start + (2 * index + 1) * size // (2 * count) for index in range(count)]


def _positions(
    replay: Replay, model: nn.Module, places: Sequence[Sequence[int]]
) -> tuple[list[list[Tensor]], float]:
    """Return the parameters at those steps, and the gap between the run's end and the model."""
    wanted = {place for of_segment in places for place in of_segment}
    state = replay.first_state()
    found = {0: state[0]}
    steps = progress_bar("along the run", replay.forwards(), total=replay.run.num_steps)
    for number, state in enumerate(steps, start=1):
        if number in wanted:
            found[number] = state[0]
    return [[found[place] for place in of_segment] for of_segment in places], checked_gap(replay, model, state)


def _mean(matrices: Sequence[LinearOperator]) -> LinearOperator:
    total = matrices[0]
    for matrix in matrices[1:]:
        total = total + matrix
    return (1 / len(matrices)) * total
