"""Influence scores of training points that are spread over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from curvlab.curvature import Data, GaussNewtonOperator, output_loss
from curvlab.curvature.known_losses import of_mean_weight_one
from curvlab.distributed import sharded
from curvlab.distributed.data_parallel import DataParallelOperator
from curvlab.distributed.ranks import Ranks
from curvlab.influence import Influence
from curvlab.influence.example_derivatives import Measurement, directional_derivatives, per_example_gradients
from curvlab.linalg import LinearOperator, identity
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
    prepared = _of_sharded if sharded.is_sharded(model) else _of_whole
    matrix, sides, derivatives = prepared(
        model, loss, share, test, measurement=measurement, batch_size=batch_size, weights=weights, ranks=ranks
    )
    solver = default_solver(matrix.shape[0], sides.shape[1], rtol=rtol) if solver is None else solver
    generator = torch.Generator(matrix.device).manual_seed(0) if generator is None else generator
    solution = solver.solve(matrix + damping * identity, sides, generator=generator)
    own = -derivatives(solution.x)
    scores = torch.cat([part.to(own) for part in ranks.gather(own.cpu())]).T
    return Influence(scores=scores, solution=solution, solved_for="test")


# G; the tests' gradients, (P, num_test); and derivatives of own examples' losses, (P, K) -> (N_r, K).
_Prepared = tuple[LinearOperator, Tensor, Callable[[Tensor], Tensor]]


def _of_whole(
    model: nn.Module,
    loss: nn.Module,
    share: Data,
    test: Data,
    *,
    measurement: Measurement | None,
    batch_size: int | None,
    weights: Tensor | None,
    ranks: Ranks,
) -> _Prepared:
    size = batch_size or _BATCH_SIZE
    own = GaussNewtonOperator(model, loss, share, batch_size=size)
    operator = DataParallelOperator(own, ranks)
    matrix = operator if weights is None else operator.weighted(weights, batch_size=size)
    unit = of_mean_weight_one(loss, _of_all(ranks, (targets for _, targets in own.batches)))
    # From rank 0, so that all solve for the same vectors to the last bit.
    sides = ranks.from_first(per_example_gradients(model, unit, test, measurement=measurement))
    return matrix, sides.T, lambda x: directional_derivatives(model, unit, share, x, batch_size=size)


def _of_sharded(
    model: nn.Module,
    loss: nn.Module,
    share: Data,
    test: Data,
    *,
    measurement: Measurement | None,
    batch_size: int | None,
    weights: Tensor | None,
    ranks: Ranks,
) -> _Prepared:
    operator = sharded.ShardedGaussNewtonOperator(
        model, loss, share, batch_size=batch_size or _SHARDED_BATCH_SIZE, ranks=ranks
    )
    matrix = operator if weights is None else operator.weighted(weights)
    own_loss = output_loss(of_mean_weight_one(loss, _of_all(ranks, operator.own_targets()))).own_loss
    sides = sharded.per_example_gradients(operator, test, measurement or own_loss)
    return matrix, sides.T, lambda x: sharded.directional_derivatives(operator, x, own_loss)


def _of_all(ranks: Ranks, targets: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the targets of all ranks; exchanged when the first is asked for."""
    for part in ranks.gather([own.cpu() for own in targets]):
        yield from part
