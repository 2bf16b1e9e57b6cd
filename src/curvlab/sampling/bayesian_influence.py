"""Influence without a matrix: how losses vary together over the draws of Langevin chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from curvlab.arguments import whole
from curvlab.influence.results import Origin, PointScores
from curvlab.influence.retraining.responses import of_copies
from curvlab.iterate import Checkpoint, iterate
from curvlab.problem import Data, Loss, Problem
from curvlab.problem.batch import Inputs
from curvlab.sampling.settings import SGLDSettings, chosen_sampler
from curvlab.sampling.sgld import SGLD, SGLDState
from curvlab.seeding import generator_of
from curvlab.shown import Summary, counted
from curvlab.training import EnsembleLosses


@dataclass(frozen=True, eq=False, repr=False)
class BayesianInfluence(PointScores):
    """Scores with their errors.

    Attributes:
        scores: (num_test, num_points), the change of a test example's expected loss per unit of weight that is
            added to a point's loss, as of `curvlab.influence.influence`: helpful points score negative.
        stderr: of each, standard deviation between chains over sqrt(C); nan with one chain.
        damping: localization/nbeta, that of the damped influence that it tends to.
        num_chains: C.
        num_draws: of each.
        num_gradients: gradients of single examples, all chains; forwards of the data at the draws are beside them.
        per_chain: (C, num_test, num_points), whose mean over the chains is `scores`.
        points: None: the columns are all training examples.
        origin: model, loss, data and settings that they are of.

    `top`, `table`, `plot`, `save` and `load` are as of `curvlab.influence.Influence`.
    """

    scores: Tensor
    stderr: Tensor
    damping: float
    num_chains: int
    num_draws: int
    num_gradients: int
    per_chain: Tensor
    points: Tensor | None = None
    origin: Origin | None = None

    parts: ClassVar[Mapping[str, type]] = {"origin": Origin}

    def _beside(self) -> dict[str, Tensor]:
        return {"stderr": self.stderr}

    @property
    def signal(self) -> float:
        """Root mean square of the scores over that of their standard errors: below about 2 they are noise."""
        return float(self.scores.square().mean().sqrt() / self.stderr.square().mean().sqrt())

    def summary(self) -> Summary:
        """Return the range, the errors and the cost."""
        tests, points = self.scores.shape
        noisy = ("the errors are half as large as the scores or more: take more chains or draws",)
        low, high = float(self.scores.min()), float(self.scores.max())
        return Summary(
            "Bayesian influence",
            f"from {low:.3g} to {high:.3g} ({self.sign_and_unit})",
            f"{counted(tests, 'test example')} x {counted(points, 'point')}; {self.signal:.2g} standard errors",
            (
                f"{self.num_chains} chains x {self.num_draws} draws",
                f"{self.num_gradients:,} example gradients",
                f"damping {self.damping:.3g}",
            ),
            () if self.signal > 2 else noisy,
        )


def bayesian_influence(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train: Data | None = None,
    test: Data | None = None,
    *,
    num_chains: int,
    num_draws: int,
    num_burnin_steps: int,
    batch_size: int,
    steps_per_draw: int = 10,
    step_size: float | None = None,
    nbeta: float | None = None,
    localization: float | None = None,
    friction: float | None = None,
    settings: SGLDSettings | None = None,
    progress: bool = True,
    checkpoint: str | Path | Checkpoint | None = None,
    callback: Callable[[_State], object] | None = None,
    generator: torch.Generator | int,
) -> BayesianInfluence:
    """Return -nbeta cov(l(test), l(z)) over the draws w of Langevin chains around the model (Kreer et al. 2025).

    The chains sample p(w) ∝ exp(-nbeta L(w) - localization/2 |w - w0|²). A weight ε that is added to z's loss in
    the mean L turns p into one with nbeta (L + ε l(z)), and the derivative of E l(test) by ε is exactly
    -nbeta cov(l(test), l(z)), for every loss surface, with no Hessian. On a quadratic L with Hessian H the
    covariance of w is (nbeta H + localization)⁻¹, so that losses linear in w give

        -∇l(test)ᵀ (H + localization/nbeta I)⁻¹ ∇l(z),

    influence with the damping localization/nbeta; curvature of the single losses, A_t and A_z, adds
    -nbeta/2 tr(A_t Σ A_z Σ) with Σ the covariance, of order 1/nbeta.

    Each chain's covariance is taken around the mean of its own draws, with its draws less one in the denominator;
    draws that follow one another closely make it too small by about their autocorrelation time over their number.

    Args:
        model: any module, in eval mode; or a `Problem` in the place of model, loss and train.
        loss: mean over examples.
        train: training data, whose examples are the points.
        test: examples that are measured.
        num_chains: C; 4 or more for errors.
        num_draws: of each chain, `steps_per_draw` apart.
        num_burnin_steps: steps before.
        batch_size: of a chain's step, drawn with replacement; from N on, all the data at each step.
        steps_per_draw: between draws; each draw costs a forward of both sets.
        step_size: as for `estimate_llc`, whose `settings` these are, too.
        nbeta: inverse temperature times N; None: N / ln N.
        localization: γ; choose it as nbeta times the damping that one wants (1/(ηT) of the training).
        friction: of `UnderdampedLangevin`; None: SGLD.
        settings: of `choose_sgld_settings`, in place of the four before.
        progress: show a bar.
        checkpoint: file in which the chains are kept.
        callback: called with the state after each step.
        generator: of the chains, or a seed.

    Cost: a gradient of a batch for each step and chain; a forward of both sets for each draw.

    Raises:
        ValueError: fewer than two draws, no chains, or no step size.
    """
    whole("num_chains", num_chains)
    whole("num_draws", num_draws, least=2, why="a covariance needs two")
    whole("num_burnin_steps", num_burnin_steps, least=0)
    whole("steps_per_draw", steps_per_draw)
    if test is None:
        raise TypeError("pass test=..., the examples that are measured")
    problem = Problem.of(model, loss, train)
    losses = EnsembleLosses(problem)
    sampler = chosen_sampler(
        losses,
        settings,
        step_size=step_size,
        nbeta=nbeta,
        localization=localization,
        friction=friction,
        batch_size=batch_size,
    )
    source = generator_of(generator)
    seeds = [int(torch.randint(2**62, (1,), generator=source)) for _ in range(num_chains)]
    points = replace(problem, weights=None)
    chains = _Chains(sampler, points, problem.with_data(test), seeds, num_draws, num_burnin_steps, steps_per_draw)
    of_tests, of_points = iterate(
        chains,
        name="Bayesian influence",
        total=chains.num_steps,
        progress=progress,
        checkpoint=checkpoint,
        callback=callback,
    )
    per_chain = -sampler.nbeta * _covariances(of_tests, of_points)
    spread = per_chain.std(0) if num_chains > 1 else torch.full_like(per_chain[0], math.nan)
    return BayesianInfluence(
        per_chain.mean(0),
        spread / math.sqrt(num_chains),
        sampler.localization / sampler.nbeta,
        num_chains,
        num_draws,
        num_chains * chains.num_steps * min(batch_size, losses.num_examples),
        per_chain,
        origin=Origin.of(
            problem, nbeta=sampler.nbeta, localization=sampler.localization, step_size=sampler.step_size
        ),
    )


def _covariances(tests: Tensor, points: Tensor) -> Tensor:
    """Return each chain's covariance, (C, D, M) and (C, D, N) -> (C, M, N)."""
    tests, points = (values - values.mean(1, keepdim=True) for values in (tests, points))
    return tests.transpose(1, 2) @ points / (tests.shape[1] - 1)


@dataclass(frozen=True)
class _State:
    """Where the chains stand.

    Attributes:
        sampled: positions and generators.
        tests: (C, D, M), losses at the draws so far, fp64.
        points: (C, D, N), likewise.
        total: steps in all.
    """

    sampled: SGLDState
    tests: Tensor
    points: Tensor
    total: int

    @property
    def num_steps(self) -> int:
        """Steps taken by each chain."""
        return self.sampled.num_steps

    @property
    def done(self) -> bool:
        """Whether all are taken."""
        return self.num_steps >= self.total


@dataclass(frozen=True)
class _Chains:
    """The chains, for `iterate`."""

    sampler: SGLD
    train: Problem
    test: Problem
    seeds: Sequence[int]
    num_draws: int
    num_burnin_steps: int
    steps_per_draw: int

    @property
    def num_steps(self) -> int:
        """Steps of each chain."""
        return self.num_burnin_steps + self.num_draws * self.steps_per_draw

    def depends_on(self) -> Mapping[str, Any]:
        counts = (self.num_draws, self.num_burnin_steps, self.steps_per_draw)
        return {**self.sampler.depends_on(), "test": self.test.data, "seeds": list(self.seeds), "counts": counts}

    def init(self) -> _State:
        device = self.sampler.losses.start.device
        sampled = self.sampler.init([torch.Generator(device).manual_seed(seed) for seed in self.seeds])
        sizes = (problem.num_examples for problem in (self.test, self.train))
        shape = (len(self.seeds), self.num_draws)
        tests, points = (torch.zeros(*shape, size, dtype=torch.float64, device=device) for size in sizes)
        return _State(sampled, tests, points, self.num_steps)

    def step(self, state: _State) -> _State:
        sampled, _ = self.sampler.step(state.sampled)
        since = sampled.num_steps - self.num_burnin_steps
        if since > 0 and since % self.steps_per_draw == 0:
            draw = since // self.steps_per_draw - 1
            state.tests[:, draw] = _losses(self.test, sampled.positions)
            state.points[:, draw] = _losses(self.train, sampled.positions)
        return replace(state, sampled=sampled)

    def result(self, state: _State) -> tuple[Tensor, Tensor]:
        return state.tests, state.points


def _losses(problem: Problem, positions: Tensor) -> Tensor:
    """Return the loss of each example at the chains' positions, (C, P) -> (C, N), fp64."""

    def of_batch(inputs: Inputs, targets: Tensor, _: Tensor | None) -> Tensor:
        return of_copies(problem, positions.T, inputs, targets, problem.loss.own_loss).double()

    return torch.cat(list(problem.map(of_batch)), dim=1)
