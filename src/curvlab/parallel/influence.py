"""Influence scores of training points that are spread over processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import Influence
from curvlab.influence.example_derivatives import Measurement, directional_derivatives, per_example_gradients
from curvlab.linalg import LinearOperator, identity
from curvlab.parallel import sharded
from curvlab.parallel.data_parallel import DataParallelOperator
from curvlab.problem import Data, output_loss
from curvlab.problem.known_losses import of_mean_weight_one
from curvlab.ranks import Ranks
from curvlab.solvers import Solver, default_solver

_BATCH_SIZE, _SHARDED_BATCH_SIZE = 512, 8


def influence(
    model: nn.Module,
    loss: nn.Module,
    share: Data,
    test: Data,
    *,
    damping: float,
    solver: Solver | None = None,
    rtol: float = 1e-2,
    measurement: Measurement | None = None,
    batch_size: int | None = None,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
    ranks: Ranks | None = None,
) -> Influence:
    """Return -∇m(test)ᵀ (G + damping I)⁻¹ ∇l(z) for every test example and every training example z of all ranks.

    As `curvlab.influence.influence`, with G the mean over all ranks' examples. One system is solved for each test
    example, together by all ranks; each rank then scores its own examples. Check `solution.converged`.

    Args:
        model: the same on every rank, or cut up over them (`shard_parameters`), in eval mode.
        loss: see GaussNewtonOperator.
        share: this rank's own training examples.
        test: examples that are measured, the same on every rank.
        damping: added to G once; positive.
        solver: any of curvlab.solvers, with the same settings on every rank; None: `default_solver`.
        rtol: residual of the default solver.
        measurement: (outputs, targets) -> (N,), one number for each test example; None: the loss.
        batch_size: examples at a time; None: 512, and 8 of a sharded model.
        weights: w of this rank's own training examples, (N_r,), not negative, where the training loss was
            1/N Σ_i w_i l_i over all ranks; on every rank or on none. Scores stay per unit of weight added to l(z).
        generator: of the solver's random numbers, seeded alike on every rank; by default with 0.
        ranks: the process group's by default.

    Returns:
        Scores (num_test, N), the same on every rank, columns in the order of the ranks. Of a sharded model
        `solution.x` is what this rank holds of the solutions, (P_r, num_test).

    Cost for each test example: its gradient (3F of one example; of a sharded model 4F on every rank, which go
    through it together), the solver's products, and 2F of the share. Memory: vectors of the solver, and of a
    sharded model 1/R of them.
    """
    if not damping > 0:
        raise ValueError(
            f"damping must be positive, got {damping}: the Gauss-Newton matrix of a network is singular."
        )
    ranks = Ranks.current() if ranks is None else ranks
    ranks.agree(
        torch.tensor(weights is None), "whether they have weights: pass each rank those of its own examples"
    )
    matrix: LinearOperator  # G
    if sharded.is_sharded(model):
        cut = sharded.ShardedGaussNewtonOperator(
            model, loss, share, batch_size=batch_size or _SHARDED_BATCH_SIZE, ranks=ranks
        )
        own_loss = output_loss(of_mean_weight_one(loss, _of_all(ranks, cut.own_targets()))).own_loss
        matrix = cut if weights is None else cut.weighted(weights)
        sides = sharded.per_example_gradients(cut, test, measurement or own_loss).T
        derivatives = partial(sharded.directional_derivatives, cut, measurement=own_loss)
    else:
        size = batch_size or _BATCH_SIZE
        own = GaussNewtonOperator(model, loss, share, batch_size=size)
        spread = DataParallelOperator(own, ranks)
        unit = of_mean_weight_one(loss, _of_all(ranks, (targets for _, targets in own.batches)))
        matrix = spread if weights is None else spread.weighted(weights)
        # From rank 0, so that all solve for the same vectors to the last bit.
        sides = ranks.from_first(per_example_gradients(model, unit, test, measurement=measurement)).T
        derivatives = partial(directional_derivatives, model, unit, share, batch_size=size)
    damped = matrix + damping * identity
    if solver is None:
        solver = default_solver(matrix.shape[0], sides.shape[1], rtol=rtol, operator=damped)
    generator = torch.Generator(matrix.device).manual_seed(0) if generator is None else generator
    solution = solver.solve(damped, sides, generator=generator)
    own_scores = -derivatives(directions=solution.x)
    scores = torch.cat([part.to(own_scores) for part in ranks.gather(own_scores.cpu())]).T
    return Influence(scores=scores, solution=solution, solved_for="test")


def _of_all(ranks: Ranks, targets: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the targets of all ranks; exchanged when the first is asked for."""
    for part in ranks.gather([own.cpu() for own in targets]):
        yield from part
