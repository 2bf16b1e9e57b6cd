"""The derivative of a training run with its curvature held constant in each of a few segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from curvlab.arguments import whole
from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.derivatives import Measurement, directional_derivatives
from curvlab.influence.preconditioned import Scaled
from curvlab.influence.results import Origin, PointScores
from curvlab.influence.unrolled import Reduction, checked_gap, measured_gradients
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import Data, Loss, Problem
from curvlab.progress import can_be_silent
from curvlab.shown import Summary, counted
from curvlab.solvers import Solution, TrainingFilter
from curvlab.training import Replay, TrainingHistory, TrainingRun
from curvlab.training.history import AdamRule, State


@dataclass(frozen=True, repr=False)
class SegmentResponse(PointScores):
    """Approximate derivatives through a training run.

    Attributes:
        scores: (num_measurements, N), N dm/dw_i, as in `UnrolledResponse`.
        residual: (num_segments, num_measurements), of the filter in each segment, first segment first.
        num_matvecs: products with a segment's matrix, counted per vector.
        gap: as in `UnrolledResponse`.
        points: None: the columns are all training examples.
        origin: model, loss, data and settings that they are of.

    `top`, `table`, `plot`, `save` and `load` are as of `Influence`.
    """

    scores: Tensor
    residual: Tensor
    num_matvecs: int
    gap: float
    points: Tensor | None = None
    origin: Origin | None = None

    parts: ClassVar[Mapping[str, type]] = {"origin": Origin}

    def _beside(self) -> dict[str, Tensor]:
        return {"residual": self.residual.max(0).values[:, None]}  # the largest of a row's segments

    def summary(self) -> Summary:
        """Return the range of the scores, the residual, and how well the training was replayed."""
        return Summary(
            "segment response",
            f"from {float(self.scores.min()):.3g} to {float(self.scores.max()):.3g} ({self.sign_and_unit})",
            f"{self.scores.shape[0]:,} x {self.scores.shape[1]:,} scores; the replay ends {self.gap:.2g} away",
            (counted(len(self.residual), "segment"), f"residual {float(self.residual.max()):.2g} at most"),
        )


@can_be_silent
def segment_response(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train_data: Data | None = None,
    test: Data | None = None,
    *,
    run: TrainingRun | TrainingHistory,
    num_segments: int = 3,
    checkpoints_per_segment: int = 2,
    measurement: Measurement | None = None,
    reduction: Reduction = "none",
    rtol: float = 1e-2,
    batch_size: int | None = None,
    progress: bool | str = True,
    callback: Callable[[SegmentState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
) -> SegmentResponse:
    """Return SOURCE's approximation of `unrolled_response` (Bae et al. 2024), for SGD and Adam.

    The steps are split into segments of equal length, each with the mean Gauss-Newton matrix G_s and the mean
    gradients of some of its checkpoints, and the sum τ_s of its effective rates (`RunLength`). Going back from
    u = ∇m(θ_T), a segment adds -uᵀ (1 - e^{-τ_s G_s}) G_s⁻¹ ∇l_i to example i's score, and turns u into
    e^{-τ_s G_s} u. Bae et al. put EK-FAC in the place of G_s; here it is the matrix itself, through
    `TrainingFilter`. After Adam or AdamW τ_s is a diagonal, of each parameter's Σ_t η_t / (sqrt(v̂_t) + eps) in the
    segment, as of `preconditioned_influence`: with S = τ_s^½ the segment adds -uᵀ S f(S G_s S) S ∇l_i, where
    f(a) = (1 - e^{-a}) / a. Left out: that a weight changes v̂, too, and how long a gradient takes to arrive.

    Args:
        model: as trained by `run`; refused where the replay does not end at its parameters. Or a `Problem` in the
            place of model, loss and train_data.
        loss: as `train` had it: with a closed form, or any mean over examples of the user's own.
        train_data: as `train` had it.
        test: examples that are measured.
        run: with weight 1 for all examples.
        num_segments: one for a run whose curvature hardly changes.
        checkpoints_per_segment: evenly spaced; more average more.
        measurement: (outputs, targets) -> (M,), one number for each test example; default: its loss.
        reduction: "mean" for the mean measurement alone.
        rtol: residual of the filter.
        batch_size: examples at a time.
        progress: show bars.
        callback: called with the `SegmentState` after each step of the run, and after each segment.
        checkpoint: file in which it is kept; the same call goes on there.

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
    replay = Replay(Problem.of(model, loss, train_data, batch_size=batch_size), run=run)
    gradients = measured_gradients(replay.problem, test, measurement=measurement, reduction=reduction)
    return iterate(
        _Segments(replay, gradients.T, num_segments, checkpoints_per_segment, rtol, measurement is not None),
        name="segments of the run",
        total=run.num_steps + num_segments,
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
    )


@dataclass(frozen=True)
class SegmentState:
    """How far it is.

    Attributes:
        at: the run's state, on the way to its end.
        found: parameters at the checkpoints, in the order of the run.
        times: τ_s of Adam, (P,) of each segment; of SGD none.
        cotangents: (P, M), the measurements' gradients carried back.
        scores: (M, N), so far.
        residual: of each segment that is done, the last one of the run first.
        num_matvecs: so far.
        num_steps: of the run, then segments.
    """

    at: State
    found: list[Tensor]
    cotangents: Tensor
    scores: Tensor
    residual: list[Tensor] = field(default_factory=list)
    times: list[Tensor] = field(default_factory=list)
    num_matvecs: int = 0
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class _Segments:
    """Along the run for the checkpoints, then back from segment to segment."""

    replay: Replay
    gradients: Tensor
    num_segments: int
    per_segment: int
    rtol: float
    measured: bool

    def depends_on(self) -> Mapping[str, Any]:
        sizes = (self.num_segments, self.per_segment, self.rtol)
        return {**self.replay.depends_on(), "gradients": self.gradients, "segments": sizes}

    @property
    def segments(self) -> list[slice]:
        """The steps of each."""
        bounds = [index * self.replay.run.num_steps // self.num_segments for index in range(self.num_segments + 1)]
        return [slice(*pair) for pair in pairwise(bounds)]

    @property
    def places(self) -> list[int]:
        """The steps before which the checkpoints lie."""
        return [place for segment in self.segments for place in _places(segment, self.per_segment)]

    def init(self) -> SegmentState:
        scores = self.gradients.new_zeros(self.gradients.shape[1], self.replay.num_examples)
        start, adam = self.replay.first_state(), isinstance(self.replay.run.rule, AdamRule)
        times = [torch.zeros_like(start[0]) for _ in range(self.num_segments * adam)]
        return SegmentState(start, [], self.gradients, scores, times=times)

    def step(self, state: SegmentState) -> SegmentState:
        number, run = state.num_steps, self.replay.run
        state = replace(state, num_steps=number + 1)
        if number < run.num_steps:
            found = [*state.found, *([state.at[0]] * self.places.count(number))]
            at, times = next(self.replay.forwards(state.at, first=number, stop=number + 1)), list(state.times)
            if isinstance(run.rule, AdamRule):
                index = next(i for i, segment in enumerate(self.segments) if number < segment.stop)
                rates = run.rule.rates(at, lr=run.learning_rates[number], step=number + 1)
                times[index] = times[index] + rates
            return replace(state, at=at, found=found, times=times)
        return self._back(state, self.num_segments - 1 - (number - run.num_steps))

    def _back(self, state: SegmentState, index: int) -> SegmentState:
        positions = state.found[index * self.per_segment : (index + 1) * self.per_segment]
        checkpoints = [self.replay.problem.copied(parameters=position) for position in positions]
        matrix = _mean([GaussNewtonOperator(each) for each in checkpoints])
        x, carried, solution = self._flow(index, matrix, state)
        scores, size = state.scores, self.replay.problem.data.batch_size
        for each in checkpoints:
            along = directional_derivatives(each, directions=x, batch_size=size)
            scores = scores - along.T / len(checkpoints)
        return replace(
            state,
            cotangents=carried,
            scores=scores,
            residual=[*state.residual, solution.residual],
            num_matvecs=state.num_matvecs + solution.num_matvecs + state.cotangents.shape[1],
            done=index == 0,
        )

    def _flow(self, index: int, matrix: LinearOperator, state: SegmentState) -> tuple[Tensor, Tensor, Solution]:
        """Return G_s⁻¹ (1 - e^{-τ_s G_s})ᵀ u with the weight decay in G_s, what u becomes, and the solution."""
        run, segment, u = self.replay.run, self.segments[index], state.cotangents
        if not isinstance(run.rule, AdamRule):
            length = run.length()
            matrix = matrix + length.weight_decay * identity
            solution = TrainingFilter(sum(length.effective_rates[segment]), rtol=self.rtol).solve(matrix, u)
            return solution.x, u - matrix @ solution.x, solution  # e^{-τμ} = 1 - μ f(μ)
        times, decay = state.times[index], run.rule.weight_decay
        decays = torch.full_like(times, decay * sum(run.learning_rates[segment]))
        decays = decays if run.rule.decoupled else decay * times
        scale = times.sqrt()[:, None]
        # A flow of S (G + decay) S for a time of 1. Where S is 0 nothing has moved.
        solution = TrainingFilter(1.0, rtol=self.rtol).solve(Scaled(matrix, times.sqrt(), decays), scale * u)
        x = scale * solution.x
        lost = torch.where(scale > 0, decays[:, None] / scale, 0.0) * solution.x
        return x, u - matrix @ x - lost, solution

    def result(self, state: SegmentState) -> SegmentResponse:
        gap = checked_gap(self.replay, state.at)
        settings = {"num_segments": self.num_segments, "checkpoints_per_segment": self.per_segment}
        origin = Origin.of(self.replay.problem, measured=self.measured, curvature="Gauss-Newton", **settings)
        return SegmentResponse(
            state.scores, torch.stack(state.residual[::-1]), state.num_matvecs, gap, origin=origin
        )


def _places(segment: slice, count: int) -> list[int]:
    """Return the steps before which a segment's checkpoints lie: the middles of `count` equal parts."""
    size = segment.stop - segment.start
    return [segment.start + (2 * index + 1) * size // (2 * count) for index in range(count)]


def _mean(matrices: Sequence[LinearOperator]) -> LinearOperator:
    total = matrices[0]
    for matrix in matrices[1:]:
        total = total + matrix
    return (1 / len(matrices)) * total
