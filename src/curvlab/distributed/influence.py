"""Influence scores of training points that are spread over processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvlab.curvature import Data, GaussNewtonOperator
from curvlab.distributed.data_parallel import DataParallelOperator
from curvlab.distributed.ranks import Ranks
from curvlab.influence import Influence
from curvlab.influence.example_derivatives import Measurement, directional_derivatives, per_example_gradients
from curvlab.linalg import identity
from curvlab.solvers import Solver, default_solver


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
    batch_size: int = 512,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
    ranks: Ranks | None = None,
) -> Influence:
    """Return -∇m(test)ᵀ (G + damping I)⁻¹ ∇l(z) for every test example and every training example z of all ranks.

    As `curvlab.influence.influence`, with G the mean over all ranks' examples. One system is solved for each test
    example, together by all ranks; each rank then scores its own examples. Check `solution.converged`.

    Args:
        model: the same on every rank, in eval mode.
        loss: see GaussNewtonOperator.
        share: this rank's own training examples.
        test: examples that are measured, the same on every rank.
        damping: added to G once; positive.
        solver: any of curvlab.solvers, with the same settings on every rank; None: `default_solver`.
        rtol: residual of the default solver.
        measurement: (outputs, targets) -> (N,), one number for each test example; None: the loss.
        batch_size: examples at a time.
        weights: w of this rank's own training examples, (N_r,), not negative, where the training loss was
            1/N Σ_i w_i l_i over all ranks; on every rank or on none. Scores stay per unit of weight added to l(z).
        generator: of the solver's random numbers, seeded alike on every rank; by default with 0.
        ranks: the process group's by default.

    Returns:
        Scores (num_test, N), the same on every rank, columns in the order of the ranks.
    """
    if not damping > 0:
        raise ValueError(
            f"damping must be positive, got {damping}: the Gauss-Newton matrix of a network is singular."
        )
    ranks = Ranks.current() if ranks is None else ranks
    operator = DataParallelOperator(GaussNewtonOperator(model, loss, share, batch_size=batch_size), ranks)
    ranks.agree(
        torch.tensor(weights is None), "whether they have weights: pass each rank those of its own examples"
    )
    matrix = operator if weights is None else operator.weighted(weights, batch_size=batch_size)
    # From rank 0, so that all solve for the same vectors to the last bit.
    sides = ranks.from_first(per_example_gradients(model, loss, test, measurement=measurement))
    solver = default_solver(operator.shape[0], len(sides), rtol=rtol) if solver is None else solver
    generator = torch.Generator(operator.device).manual_seed(0) if generator is None else generator
    solution = solver.solve(matrix + damping * identity, sides.T, generator=generator)
    own: Tensor = -directional_derivatives(model, loss, share, solution.x, batch_size=batch_size)
    scores = torch.cat([part.to(own) for part in ranks.gather(own.cpu())]).T
    return Influence(scores=scores, solution=solution, solved_for="test")
