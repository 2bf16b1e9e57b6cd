"""How alike examples are to a model: cosines of their gradients, plain and through the damped inverse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.influence.derivatives import directional_derivatives, in_order, per_example_gradients
from curvlab.linalg import LinearOperator
from curvlab.problem import Data, Loss, Problem
from curvlab.progress import can_be_silent
from curvlab.seeding import generator_of
from curvlab.shown import Shown, Summary, counted
from curvlab.solvers import Solver


@dataclass(frozen=True, repr=False)
class Similarities(Shown):
    """Similarities of n examples with what the solver behind them reached.

    Attributes:
        gradient: (n, n), cosines of the gradients, fp64 on the CPU.
        influence: (n, n), the same in the norm of A⁻¹; symmetric, ones on the diagonal.
        influences: (n, n), g_iᵀ x_j with A x_j ≈ g_j, neither symmetrised nor normalised.
        asymmetry: ‖M - Mᵀ‖ / ‖M‖ of `influences`: 0 for exact solutions.
        residual: (n,), ‖g - A x‖ / ‖g‖.
        converged: whether every system met the solver's tolerance.
        num_matvecs: products with A, counted per vector.
    """

    gradient: Tensor
    influence: Tensor
    influences: Tensor
    asymmetry: float
    residual: Tensor
    converged: bool
    num_matvecs: int

    def summary(self) -> Summary:
        """Return how many there are, what the solver left, and its cost."""
        size = len(self.gradient)
        missed = "not converged: allow more steps, or raise the damping"
        return Summary(
            "similarities",
            f"of {counted(size, 'example')}",
            f"residual {float(self.residual.max()):.2g} at most, asymmetry {self.asymmetry:.2g}",
            (counted(self.num_matvecs, "product"),),
            () if self.converged else (missed,),
        )


@can_be_silent
def similarities(
    model: nn.Module,
    loss: Loss,
    examples: Data,
    operator: LinearOperator,
    *,
    solver: Solver,
    columns: int | None = None,
    batch_size: int = 32,
    progress: bool = True,
    generator: torch.Generator | int | None = None,
) -> Similarities:
    """Return how alike `examples` are by g_iᵀ g_j and by g_iᵀ A⁻¹ g_j, each over the root of both examples' own.

    Klochkov & Liu (2024), Sec. 5, "gradient similarity" and "influence similarity"; g_i is the gradient of example
    i's own loss, whose scale drops out. With A a multiple of the identity both are the same. Both are cosines, the
    second in the norm of A⁻¹, so they lie in [-1, 1] for exact solutions.

    Args:
        model: in eval mode.
        loss: as for `per_example_gradients`.
        examples: the n examples.
        operator: A, damped: G + damping * identity, over the model's trainable parameters.
        solver: BlockConjugateGradient() solves all systems together.
        columns: how many gradients are held and systems solved at a time; None: all n. Memory: some columns · P.
        batch_size: examples at a time, for the products g_iᵀ x.
        progress: show bars; False silences the solver's, too.
        generator: for stochastic solvers, or a seed.

    Cost: the solver's, and one backward and two forwards with a tangent an example.
    """
    problem = Problem.of(model, loss, examples)
    if not hasattr(solver, "solve"):
        raise TypeError(f"solver must be one of curvlab.solvers, e.g. BlockConjugateGradient(), got {solver!r}")
    generator = None if generator is None else generator_of(generator, operator.device)
    rows: dict[str, list[Tensor]] = {"products": [], "influences": [], "residual": []}
    num_matvecs, converged = 0, True
    for chosen in torch.arange(problem.num_examples).split(columns or problem.num_examples):
        block = per_example_gradients(in_order(problem, chosen)).T
        solution = solver.solve(operator, block, generator=generator)
        for name, directions in (("products", block), ("influences", solution.x)):
            along = directional_derivatives(problem, directions=directions, batch_size=batch_size)
            rows[name].append(along.T.double().cpu())
        rows["residual"].append(solution.residual.cpu())
        num_matvecs += solution.num_matvecs
        converged &= solution.converged
    products, influences = torch.cat(rows["products"]), torch.cat(rows["influences"]).T
    return Similarities(
        gradient=cosines(products),
        influence=cosines(influences),
        influences=influences,
        asymmetry=float((influences - influences.T).norm() / influences.norm()),
        residual=torch.cat(rows["residual"]),
        converged=converged,
        num_matvecs=num_matvecs,
    )


def cosines(products: Tensor) -> Tensor:
    """Return m_ij / sqrt(m_ii m_jj) of the symmetric part of pairwise inner products m, (n, n) -> (n, n)."""
    if products.ndim != 2 or products.shape[0] != products.shape[1]:
        raise ValueError(f"pass all pairwise inner products, (n, n), got shape {tuple(products.shape)}")
    own = products.diagonal()
    if not bool((own > 0).all()):
        wrong = (~(own > 0)).nonzero().flatten().tolist()
        raise ValueError(
            f"examples {wrong[:5]} have no positive product with themselves: their gradients are zero, or the "
            "solver diverged or stopped too early. Leave them out, allow more steps, or raise the damping."
        )
    symmetric = (products + products.T) / 2
    return symmetric / own.sqrt()[:, None] / own.sqrt()[None]
