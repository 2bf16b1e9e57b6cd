"""Self-influence: what leaving out a training example does to its own loss, and to the mean training loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.curvature_probes import curvature_probes, divided_by, normal_like
from curvlab.influence.example_derivatives import directional_derivatives, per_example_gradients
from curvlab.linalg import LinearOperator, flatten, identity
from curvlab.problem import Batches, Loss, ModelFunction, output_loss
from curvlab.problem.data import Pairs, stack
from curvlab.problem.example_weights import checked_weights
from curvlab.problem.known_losses import of_mean_weight_one
from curvlab.problem.memory import with_halving
from curvlab.shown import Shown, Summary, counted
from curvlab.solvers import Solver, default_solver


@dataclass(frozen=True, repr=False)
class SelfInfluence(Shown):
    """First-order changes of losses when training examples are left out one by one, K of them.

    Attributes:
        own: (K,), of the example's own loss, 1/N ∇l_kᵀ (G + damping I)⁻¹ ∇l_k; never negative.
        total: (K,), of the mean training loss, 1/N ∇Jᵀ (G + damping I)⁻¹ ∇l_k with ∇J = 1/N sum_n ∇l_n.
            For reduction="sum", where G is a sum, both without the first 1/N.
        residual: largest relative residual of the systems behind them.
        converged: whether all systems reached the solver's tolerance.
        num_matvecs: curvature products, counted per vector.
    """

    own: Tensor
    total: Tensor
    residual: float
    converged: bool
    num_matvecs: int

    def summary(self) -> Summary:
        """Return the range of the scores, residual, cost, and whether a system was left unsolved."""
        missed = "not converged: allow more steps, or raise the damping"
        return Summary(
            "self-influence",
            f"from {float(self.own.min()):.3g} to {float(self.own.max()):.3g}",
            f"{counted(len(self.own), 'example')}; residual {self.residual:.2g} at most",
            (counted(self.num_matvecs, "product"),),
            () if self.converged else (missed,),
        )


def self_influence(
    model: nn.Module,
    loss: Loss,
    train: Pairs,
    *,
    points: Tensor | None = None,
    damping: float,
    columns: int = 100,
    solver: Solver | None = None,
    rtol: float = 1e-2,
    batch_size: int = 512,
    memory_budget: float | None = None,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> SelfInfluence:
    """Return self-influences (Koh & Liang 2017), one system for each point, `columns` of them at a time.

    Leaving out one of N examples is a weight of -1/N, and of -1 for reduction="sum"; a change is positive where
    the loss rises.

    Args:
        model: in eval mode.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss.
        train: data whose mean Gauss-Newton matrix is G.
        points: indices of the examples that are asked for, (K,); None: all.
        damping: added to G; positive.
        columns: right-hand sides solved together, which sets the memory: some 15 P numbers for each, for
            any number of points.
        solver: None: `default_solver`.
        rtol: residual of the default solver.
        batch_size: examples at a time; half as many whenever memory runs out, with a MemoryWarning.
        memory_budget: bytes for each product, see curvlab.curvature.DataOperator.
        weights: w of the training examples, (N,), not negative, where the training loss was 1/N Σ_i w_i l_i: G
            and ∇J are then weighted, and leaving example k out is a weight of -w_k/N, so that both changes have
            the factor w_k. `own` is of l_k itself, `total` of the weighted mean loss.
        generator: of the solver's random numbers; by default seeded with 0.

    A killed call starts again: pass `points` in parts where that would take long.

    Cost: K systems. `estimated_self_influence` needs far fewer where K is large.
    """
    loss = _of_mean_weight_one(model, loss, train, batch_size)
    operator = _damped(model, loss, train, damping, batch_size, weights, memory_budget=memory_budget)
    everything = _all_indices(train)
    chosen = everything if points is None else points
    weights = None if weights is None else checked_weights(weights, len(everything))
    mean_gradient = _mean_gradient(model, loss, train, batch_size, weights)
    own, total = [], []
    solved = _Solved()
    for indices in chosen.split(columns):
        gradients = per_example_gradients(model, loss, stack(train, indices)).T.contiguous()
        x = solved.solve(operator, gradients, solver, rtol, generator)
        own.append((gradients * x).sum(0))
        total.append(mean_gradient @ x)
    scale = _left_out(loss, len(everything), None if weights is None else weights[chosen.to(weights.device)])
    return SelfInfluence(
        scale(torch.cat(own)), scale(torch.cat(total)), solved.residual, solved.converged, solved.num_matvecs
    )


def estimated_self_influence(
    model: nn.Module,
    loss: Loss,
    train: Pairs,
    *,
    damping: float,
    num_probes: int,
    columns: int = 100,
    solver: Solver | None = None,
    rtol: float = 1e-2,
    batch_size: int = 512,
    memory_budget: float | None = None,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> SelfInfluence:
    """Return self-influences of all N examples from `num_probes` + 1 systems, each up to a factor 1 ± √(2/K).

    With M = G + damping I and Gaussian probes y of covariance M, x = M⁻¹ y has covariance M⁻¹: (∇l_nᵀ x)² has
    the mean ∇l_nᵀ M⁻¹ ∇l_n for every example at once, and K probes leave a relative standard error of √(2/K), the
    same for large and small scores. y = 1/√N sum_n J_nᵀ S_n^½ ξ_n + √damping ζ with normal ξ, ζ. This is how
    leverage scores are estimated (Spielman & Srivastava 2011); `own` are those of a ridge regression, up to the
    residuals. `total` is one system, and not estimated.

    Args:
        model: in eval mode, with outputs (N, C).
        loss: as for `self_influence`.
        train: likewise; all of its examples get a score.
        damping: added to G; positive.
        num_probes: K; 200 leave 10 %.
        columns: right-hand sides solved together.
        solver: None: `default_solver`.
        rtol: residual of the default solver.
        batch_size: examples at a time.
        memory_budget: bytes for each product, see curvlab.curvature.DataOperator.
        weights: as for `self_influence`.
        generator: of the probes and of the solver; by default seeded with 0.

    Cost: K + 1 systems, and for each of them a derivative of all losses along its solution.
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    loss = _of_mean_weight_one(model, loss, train, batch_size)
    operator = _damped(model, loss, train, damping, batch_size, weights, memory_budget=memory_budget)
    size = len(_all_indices(train))
    weights = None if weights is None else checked_weights(weights, size)
    generator = generator or torch.Generator(operator.device).manual_seed(0)
    squares = torch.zeros(size, dtype=operator.dtype, device=operator.device)
    solved = _Solved()
    for count in _chunks(num_probes, columns):
        probes = curvature_probes(model, loss, train, count, batch_size, generator, weights)
        probes += math.sqrt(damping) * normal_like(tuple(probes.shape), probes, generator)
        x = solved.solve(operator, probes, solver, rtol, generator)
        squares += directional_derivatives(model, loss, train, x, batch_size=batch_size).square().sum(1)
    mean_gradient = _mean_gradient(model, loss, train, batch_size, weights)
    x = solved.solve(operator, mean_gradient[:, None], solver, rtol, generator)
    total = directional_derivatives(model, loss, train, x, batch_size=batch_size)[:, 0]
    scale = _left_out(loss, size, weights)
    return SelfInfluence(
        scale(squares / num_probes), scale(total), solved.residual, solved.converged, solved.num_matvecs
    )


@dataclass
class _Solved:
    """Outcome of several solves."""

    residual: float = 0.0
    converged: bool = True
    num_matvecs: int = 0

    def solve(
        self,
        operator: LinearOperator,
        sides: Tensor,
        solver: Solver | None,
        rtol: float,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Return A⁻¹ B."""
        chosen = default_solver(operator.shape[0], sides.shape[1], rtol=rtol) if solver is None else solver
        generator = generator or torch.Generator(operator.device).manual_seed(0)
        solution = chosen.solve(operator, sides, generator=generator)
        self.residual = max(self.residual, float(solution.residual.max()))
        self.converged &= solution.converged
        self.num_matvecs += solution.num_matvecs
        return solution.x


def _damped(  # noqa: PLR0917
    model: nn.Module,
    loss: Loss,
    train: Pairs,
    damping: float,
    batch_size: int,
    weights: Tensor | None,
    *,
    memory_budget: float | None,
) -> LinearOperator:
    if not damping > 0:
        raise ValueError(f"damping must be positive, got {damping}: the Gauss-Newton matrix may be singular")
    op = GaussNewtonOperator(model, loss, train, batch_size=batch_size, memory_budget=memory_budget)
    matrix = op if weights is None else op.weighted(weights)
    return matrix + damping * identity


def _of_mean_weight_one(model: nn.Module, loss: Loss, train: Pairs, batch_size: int) -> Loss:
    function = ModelFunction(model)
    data = Batches.of(function, train, batch_size=batch_size)
    return of_mean_weight_one(loss, data.targets())


def _left_out(loss: Loss, size: int, weights: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return what makes a change per unit of weight one of leaving an example out."""
    divisor = divided_by(loss, size)

    def scale(changes: Tensor) -> Tensor:
        scaled = changes / divisor
        return scaled if weights is None else scaled * weights.to(scaled)

    return scale


def _all_indices(train: Pairs) -> Tensor:
    return torch.arange(len(train[1]) if isinstance(train, tuple) else len(train))  # type: ignore[arg-type]


def _chunks(total: int, largest: int) -> list[int]:
    return [min(largest, total - start) for start in range(0, total, largest)]


def _mean_gradient(model: nn.Module, loss: Loss, train: Pairs, batch_size: int, weights: Tensor | None) -> Tensor:
    """Return 1/N sum_n w_n ∇l_n, (P,), of each example's own loss, fewer at a time when memory runs out."""
    return with_halving(lambda size: _gradient_in_batches(model, loss, train, size, weights), batch_size)


def _gradient_in_batches(
    model: nn.Module, loss: Loss, train: Pairs, batch_size: int, weights: Tensor | None
) -> Tensor:
    function, own_loss = ModelFunction(model), output_loss(loss).own_loss
    gradient, size = None, 0
    for inputs, targets in Batches.of(function, train, batch_size=batch_size):
        leaves = [value.detach().requires_grad_() for value in function.parameters]
        with torch.enable_grad():
            losses = own_loss(function(leaves, inputs), targets)
            value = (losses if weights is None else losses * weights[size : size + len(targets)].to(losses)).sum()
            found = flatten(torch.autograd.grad(value, leaves, materialize_grads=True))
        gradient = found if gradient is None else gradient + found
        size += len(targets)
    if gradient is None:
        raise ValueError("the training set is empty")
    return gradient / size
