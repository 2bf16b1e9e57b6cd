"""A preconditioner from the exact rows of the examples that hold most of the curvature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from curvlab.arguments import positive, whole
from curvlab.curvature import exact_traces, output_curvatures
from curvlab.curvature.examples import own_gauss_newton, with_examples
from curvlab.curvature.rows import DenseRows, OuterRows, numbers_of_row, principal_rows
from curvlab.linalg import DerivedOperator, LinearOperator, describe, generator_for
from curvlab.seeding import Seed
from curvlab.solvers.preconditioners.ekfac import layered_term

if TYPE_CHECKING:
    from curvlab.curvature import GaussNewtonOperator
    from curvlab.curvature.operator import MeanOverRanks

_POWER_STEPS = 30


class RowsInverse(DerivedOperator):
    """M = (λ I + RᵀR)⁻¹ = [I - Rᵀ (λ I + R Rᵀ)⁻¹ R] / λ (Woodbury), R (M, P) rows of G; `Rows` makes it.

    Where M would be worse conditioned than its dtype can tell, λ is raised.

    Args:
        parts: R, layer by layer, kept as an attribute.
        shift: λ, the damping.
        rank: leading eigenvectors of R Rᵀ that are kept; None: all of it.
        like: operator whose dtype, device and inner products to use.

    Attributes:
        num_example_rows: M. (`num_rows` of an operator is the part of a vector that a process holds.)
        num_kept: numbers in memory: activations and signals, and the factor of R Rᵀ.
    """

    def __init__(
        self, parts: Sequence[OuterRows | DenseRows], shift: float, rank: int | None, *, like: LinearOperator
    ) -> None:
        super().__init__(like)
        self.parts = tuple(parts)
        gram = self.parts[0].gram()
        for part in self.parts[1:]:
            gram += part.gram()
        self.num_example_rows = len(gram)
        # No better conditioned than the dtype can tell: else rounding makes M indefinite.
        self.shift = max(shift, 30 * torch.finfo(like.dtype).eps * _largest_eigenvalue(gram))
        self._triangular = rank is None or rank >= self.num_example_rows
        if self._triangular:
            gram.diagonal().add_(self.shift)
            self._factor = torch.linalg.cholesky(gram)
        else:
            values, vectors = torch.linalg.eigh(gram)
            self._factor = vectors[:, -rank:] / (values[-rank:].clamp(min=0) + self.shift).sqrt()  # type: ignore[operator]
        self.num_kept = self._factor.numel() + sum(part.num_kept for part in self.parts)

    def __str__(self) -> str:
        """Return how many rows there are."""
        return f"{self.num_example_rows:,} rows of examples"

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return M V. Cost: 4 E P K operations for E examples in R and 4 M P K for dense rows; none with G."""
        projected = self.parts[0].project(vectors).double()
        for part in self.parts[1:]:
            projected += part.project(vectors)
        if self._triangular:
            solved = torch.cholesky_solve(projected, self._factor)
        else:
            solved = self._factor @ (self._factor.T @ projected)
        lifted = torch.empty_like(vectors)
        for part in self.parts:
            part.lift(solved.to(vectors), lifted)
        return (vectors - lifted) / self.shift

    @property
    def is_psd(self) -> bool:
        """True: it is the inverse of a positive definite matrix."""
        return True


@dataclass(frozen=True)
class Rows:
    """Recipe for a `RowsInverse`: (λ I + RᵀR)⁻¹ with R the largest rows of the examples with the most curvature.

    G = 1/n Σ_i J_iᵀ S_i J_i = Σ rᵀr over the rows r of S_i^½ J_i / sqrt(n), for any square root. Each example's
    rows are rotated into its principal directions (the eigenvectors of its C x C kernel), and the M longest of the
    M examples with the largest score are kept exactly. In a fitted network few examples hold most of tr(G), so
    that RᵀR is nearly G; no product with G is needed to find them. RᵀR ⪯ G: it never exceeds what it approximates.
    In an early-stopped network all examples hold alike, and few rows are worth little.

    Kept are activations and output signals of each linear layer, M (I + O) numbers; rows of convolutions are kept
    as (O I), and as P numbers where other parameters are trained. Outputs must be (N, C): a token is no example.
    Where examples are spread over processes (DataParallelOperator), each process keeps all of R.

    Args:
        num_rows: M, at most N times the outputs; None: as many as `memory_budget` allows.
        rank: compress R to so many leading directions of its kernel R Rᵀ; None: no compression, which is
            faster to set up (a Cholesky factor in place of eigenvectors).
        score: "outputs" for tr(S_i), one forward pass; "traces" for tr(G_i), exact where layers allow it.
        memory_budget: bytes, for rows and the four (M, M) matrices in fp64 that the set-up takes; one remains.

    Cost of the set-up, counted as products of 5F: one forward for the scores ("traces": 1 + C), (1 + C) F for each
    example in R; M² (I + O) operations for the kernel and M³ / 3 for its factor, 9 M³ with a rank.
    """

    num_rows: int | None = None
    rank: int | None = None
    score: Literal["outputs", "traces"] = "outputs"
    memory_budget: int = 2**28

    def __post_init__(self) -> None:
        for name in ("num_rows", "rank"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        if self.score not in ("outputs", "traces"):
            raise ValueError(f"score must be 'outputs' or 'traces', got {self.score!r}")
        positive("memory_budget", self.memory_budget, "it is in bytes")

    @torch.inference_mode(False)
    def build(self, operator: LinearOperator, *, generator: Seed = None) -> tuple[RowsInverse, int]:
        """Return M for `operator` = G + damping I, whose own `damping` is used, and what it cost in products."""
        generator = generator_for(operator, generator)
        source, damping = _source(operator), operator.damping
        if damping <= 0:
            raise ValueError(f"the rows need positive damping, got {damping:g}: op + damping * identity")
        scores = (exact_traces if self.score == "traces" else output_curvatures)(source)
        num_rows = self.num_rows if self.num_rows is not None else self.affordable(source)
        if num_rows < 1:
            raise ValueError(
                f"memory_budget = {self.memory_budget} bytes does not hold one row of {_bytes_of_row(source)} "
                "bytes: raise it, or use Nystrom(rank)"
            )
        order = scores.argsort(descending=True, stable=True)
        chosen = order[: min(num_rows, max(1, int((scores > 0).sum())))]
        parts, num_outputs = principal_rows(source, chosen, num_rows)
        forwards = (1 + num_outputs) * len(chosen) / len(scores)
        forwards += 1 + (num_outputs if self.score == "traces" else 0)
        return RowsInverse(parts, damping, self.rank, like=operator), math.ceil(forwards / 5)

    def affordable(self, source: GaussNewtonOperator | MeanOverRanks) -> int:
        """Return how many rows of G the budget holds: the largest M with 32 M² + (bytes of a row) M <= it."""
        linear = _bytes_of_row(source)
        return int((math.sqrt(linear**2 + 128 * self.memory_budget) - linear) / 64)


def _source(operator: LinearOperator) -> GaussNewtonOperator | MeanOverRanks:
    source = with_examples(operator)
    if source is None:
        # What reads rows says what is wrong with a matrix that knows its layers; others are refused here.
        why = "rows of examples are those of GaussNewtonOperator(...) + damping * identity,"
        own_gauss_newton(layered_term(operator, why=why))  # type: ignore[arg-type]
        raise TypeError(f"{why} got {describe(operator)}. Nystrom(rank) needs products only.")
    return source


def _bytes_of_row(source: GaussNewtonOperator | MeanOverRanks) -> int:
    return torch.finfo(source.dtype).bits // 8 * numbers_of_row(source)


def _largest_eigenvalue(gram: Tensor) -> float:
    """Return about λmax of a Gram matrix, by the power method."""
    vector = gram.diagonal().sqrt()
    for _ in range(_POWER_STEPS):
        image = gram @ vector
        norm = image.norm()
        if float(norm) == 0:
            return 0.0
        vector = image / norm
    return float(norm)
