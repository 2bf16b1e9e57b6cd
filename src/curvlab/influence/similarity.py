"""How alike examples are to a model: cosines of their gradients, plain and through the damped inverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.arguments import tensor, whole
from curvlab.influence.derivatives import directional_derivatives, in_order, per_example_gradients
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator
from curvlab.problem import Data, Loss, Problem
from curvlab.progress import can_be_silent
from curvlab.seeding import generator_of
from curvlab.shown import Shown, Summary, counted
from curvlab.solvers import Solver
from curvlab.solvers.solver import checked_solver


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
    model: nn.Module | Problem,
    loss: Loss | None = None,
    examples: Data | None = None,
    operator: LinearOperator | None = None,
    *,
    solver: Solver,
    columns: int | None = None,
    batch_size: int = 32,
    progress: bool | str = True,
    callback: Callable[[SimilarityState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int | None = None,
) -> Similarities:
    """Return how alike `examples` are by g_iᵀ g_j and by g_iᵀ A⁻¹ g_j, each over the root of both examples' own.

    Klochkov & Liu (2024), Sec. 5, "gradient similarity" and "influence similarity"; g_i is the gradient of example
    i's own loss, whose scale drops out. With A a multiple of the identity both are the same. Both are cosines, the
    second in the norm of A⁻¹, so they lie in [-1, 1] for exact solutions.

    Args:
        model: in eval mode; or a `Problem` in the place of model, loss and examples.
        loss: as for `per_example_gradients`.
        examples: the n examples.
        operator: A, damped: G + damping * identity, over the model's trainable parameters.
        solver: BlockConjugateGradient() solves all systems together.
        columns: how many gradients are held and systems solved at a time; None: all n. Memory: some columns · P.
        batch_size: examples at a time, for the products g_iᵀ x.
        progress: show bars; False silences the solver's, too.
        callback: called with the `SimilarityState` after each block of columns.
        checkpoint: file in which the blocks that are done are kept; the same call goes on there. The solver may
            have one of its own, for the block at work.
        generator: for stochastic solvers, or a seed.

    Cost: the solver's, and one backward and two forwards with a tangent an example.
    """
    if operator is None:
        raise TypeError("pass operator=..., the damped curvature A")
    problem = Problem.of(model, loss, examples)
    generator = None if generator is None else generator_of(generator, operator.device)
    batch_size, columns = whole("batch_size", batch_size), None if columns is None else whole("columns", columns)
    blocks = torch.arange(problem.num_examples).split(columns or problem.num_examples)
    return iterate(
        _Blocks(problem, operator, checked_solver(solver), blocks, batch_size, generator),
        name="similarities",
        total=len(blocks),
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
    )


@dataclass(frozen=True)
class SimilarityState:
    """What has been solved, a part for each block of columns.

    Attributes:
        products: g_iᵀ g_j, j of the block, (block, n) each.
        influences: g_iᵀ x_j, likewise.
        residual: of each system.
        converged: whether all were solved.
        num_matvecs: products, counted per vector.
        num_steps: blocks.
        generator: that was given, if any.
    """

    products: list[Tensor] = field(default_factory=list)
    influences: list[Tensor] = field(default_factory=list)
    residual: list[Tensor] = field(default_factory=list)
    converged: bool = True
    num_matvecs: int = 0
    num_steps: int = 0
    done: bool = False
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class _Blocks:
    """Some columns after others."""

    problem: Problem
    operator: LinearOperator
    solver: Solver
    blocks: Sequence[Tensor]
    batch_size: int
    generator: torch.Generator | None

    def depends_on(self) -> Mapping[str, Any]:
        problem, blocks = self.problem, [len(block) for block in self.blocks]
        parts = {"model": problem.model, "loss": problem.given_loss, "data": problem.data, "blocks": blocks}
        return {**parts, "operator": self.operator, "solver": self.solver, "seed": self.generator}

    def init(self) -> SimilarityState:
        return SimilarityState(generator=self.generator)

    def step(self, state: SimilarityState) -> SimilarityState:
        gradients = per_example_gradients(in_order(self.problem, self.blocks[state.num_steps])).T
        solution = self.solver.solve(self.operator, gradients, generator=self.generator)
        products, influences = (
            directional_derivatives(self.problem, directions=directions, batch_size=self.batch_size)
            for directions in (gradients, solution.x)
        )
        return SimilarityState(
            [*state.products, products.T.double().cpu()],
            [*state.influences, influences.T.double().cpu()],
            [*state.residual, solution.residual.cpu()],
            state.converged and bool(solution.converged),
            state.num_matvecs + solution.num_matvecs,
            state.num_steps + 1,
            state.num_steps + 1 == len(self.blocks),
            self.generator,
        )

    def result(self, state: SimilarityState) -> Similarities:
        influences = torch.cat(state.influences).T
        return Similarities(
            gradient=cosines(torch.cat(state.products)),
            influence=cosines(influences),
            influences=influences,
            asymmetry=float((influences - influences.T).norm() / influences.norm()),
            residual=torch.cat(state.residual),
            converged=state.converged,
            num_matvecs=state.num_matvecs,
        )


def cosines(products: Tensor) -> Tensor:
    """Return m_ij / sqrt(m_ii m_jj) of the symmetric part of pairwise inner products m, (n, n) -> (n, n)."""
    if tensor("products", products).ndim != 2 or products.shape[0] != products.shape[1]:
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
