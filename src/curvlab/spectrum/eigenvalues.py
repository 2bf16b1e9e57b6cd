"""Largest eigenvalues by block Lanczos with full reorthogonalisation, restarted where memory asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import not_negative, whole
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, bordered, checked_product, generator_for, orthonormalise
from curvlab.problem.memory import Memory, share_of_free
from curvlab.seeding import Seed
from curvlab.shown import Shown, Summary, counted, first_values

_BESIDE = 6  # blocks that a step holds beside the basis: two of a product, the pending one, orthogonalisation
_ROWS_OF_A_RESTART = 2**20  # of the basis, replaced at a time


@dataclass(frozen=True, repr=False)
class Eigenvalues(Shown):
    """The k largest eigenvalues, in descending order.

    Attributes:
        values: (k,), fp64 on the CPU. Never above the true ones, up to rounding.
        vectors: (P, k), orthonormal, in the operator's dtype.
        error_bounds: (k,), ‖A v - value v‖: an eigenvalue lies within this distance of the value. That it is
            the largest one is not certain, only overwhelmingly likely from a random start.
        num_matvecs: products paid for, counted per vector.
        converged: whether every error bound is at most rtol |value|.
    """

    values: Tensor
    vectors: Tensor
    error_bounds: Tensor
    num_matvecs: int
    converged: bool

    def summary(self) -> Summary:
        """Return the first values, the largest error bound and the cost."""
        problems = () if self.converged else ("not converged: allow more products (max_matvecs)",)
        return Summary(
            "largest eigenvalues" if len(self.values) > 1 else "largest eigenvalue",
            first_values(self.values),
            f"each within {float(self.error_bounds.max()):.2g} of an eigenvalue",
            (counted(self.num_matvecs, "product"), f"vectors {tuple(self.vectors.shape)}"),
            problems,
        )


def top_eigenvalues(
    operator: LinearOperator,
    k: int = 1,
    *,
    rtol: float = 1e-3,
    max_matvecs: int = 300,
    memory_budget: float | None = None,
    progress: bool = True,
    callback: Callable[[EigenvaluesState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
) -> Eigenvalues:
    """Return the k algebraically largest eigenvalues of a symmetric A (for the smallest, pass -A).

    Blocks of k columns, so that an eigenvalue of multiplicity up to k is found as often as it occurs; plain
    Lanczos for k = 1. Fully reorthogonalised, because in finite precision Lanczos otherwise finds ghosts.

    Args:
        operator: A, (P, P).
        k: how many.
        rtol: stop when every residual bound ‖B s_last‖ (Parlett 1998, Sec. 13.2) is at most rtol |value|.
        max_matvecs: the most products; `converged` is False when they do not suffice.
        memory_budget: bytes for vectors; by default 80 % of what is free. Where the basis of `max_matvecs`
            vectors does not fit, it is cut down to the better half of its Ritz vectors whenever it is full (thick
            restart, Wu & Simon 2000): the same limit, and bounds that hold, from more products. 3 k at least.
        progress: show a bar.
        callback: called with the state after each step, a block of k products.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`; it holds the basis.
        generator: draws the starting block; required with `checkpoint`.

    Cost: k products in each step; memory of all products' vectors, (P, num_matvecs), three times over; restarted,
    of `memory_budget`.

    >>> from curvlab.linalg import DenseOperator
    >>> matrix = DenseOperator(torch.diag(torch.arange(6.0, dtype=torch.float64)))
    >>> top_eigenvalues(matrix, 2, generator=torch.Generator().manual_seed(0)).values
    tensor([5.0000, 4.0000], dtype=torch.float64)
    """
    generator = generator_for(operator, generator)
    not_negative("rtol", rtol)
    if not 1 <= whole("k", k, least=0) <= operator.shape[0]:
        raise ValueError(f"k must be between 1 and the size of the operator, {operator.shape[0]}, got {k}")
    whole("max_matvecs", max_matvecs, least=k, why="as many as k")
    most = max(3 * k, vectors_that_fit(operator, memory_budget) - _BESIDE * k)
    work = _Lanczos(operator, k, rtol, max_matvecs, most, generator)
    return iterate(
        work,
        name=f"eigenvalues, at most {max_matvecs} products",
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
    )


@dataclass
class EigenvaluesState:
    """How far Lanczos is.

    Attributes:
        lanczos: the basis.
        generator: what draws new directions.
        values: (k,), the largest Ritz values, descending; empty before the first step.
        error_bounds: (k,), of them.
        num_steps: blocks of products.
        done: whether they are good enough, or no more products are allowed.
    """

    lanczos: BlockLanczos
    generator: torch.Generator | None
    values: Tensor
    error_bounds: Tensor
    num_steps: int = 0
    done: bool = False

    @property
    def status(self) -> str:
        """The largest values and their errors."""
        return f"{first_values(self.values, 2)} within {float(self.error_bounds.max()):.1g}"


@dataclass(frozen=True)
class _Lanczos:
    operator: LinearOperator
    k: int
    rtol: float
    max_matvecs: int
    max_columns: int
    generator: torch.Generator | None

    def depends_on(self) -> Mapping[str, Any]:
        settings = (self.k, self.rtol, self.max_matvecs)
        return {"operator": self.operator, "generator": self.generator, "settings": settings}

    def init(self) -> EigenvaluesState:
        lanczos = BlockLanczos(
            self.operator, block_size=self.k, max_columns=self.max_columns, generator=self.generator
        )
        nothing = torch.zeros(0, dtype=torch.float64)
        return EigenvaluesState(lanczos, self.generator, nothing, nothing)

    def step(self, state: EigenvaluesState) -> EigenvaluesState:
        state.lanczos.step()
        state.num_steps += 1
        values, _, bounds = state.lanczos.ritz_pairs()
        state.values, state.error_bounds = values[-self.k :].flip(-1), bounds[-self.k :].flip(-1)
        end = state.lanczos.exhausted or state.lanczos.num_matvecs + self.k > self.max_matvecs
        state.done = end or self._converged(state)
        return state

    def expected_steps(self, state: EigenvaluesState) -> float:
        """Return the most steps: nobody knows how soon Lanczos converges."""
        return min(self.max_matvecs, self.operator.shape[0]) / self.k

    def _converged(self, state: EigenvaluesState) -> bool:
        return bool((state.error_bounds <= self.rtol * state.values.abs()).all())

    def result(self, state: EigenvaluesState) -> Eigenvalues:
        lanczos = state.lanczos
        coefficients = lanczos.ritz_pairs()[1][:, -self.k :].flip(-1)
        vectors = lanczos.basis @ coefficients.to(lanczos.basis)
        return Eigenvalues(state.values, vectors, state.error_bounds, lanczos.num_matvecs, self._converged(state))


class BlockLanczos:
    """Orthonormal basis Q of a block Krylov space and T = QᵀAQ, grown one block a `step`.

    A Q = Q T + Q_next B E_lastᵀ, with B upper triangular. Where a new direction vanishes (an invariant
    subspace is complete) a random one takes its place with a zero in B, so the search goes on elsewhere.

    With `max_columns`, a basis above a fifth of that is grown in one place of the other four fifths, without a
    copy. Where that is full, the basis becomes its leading Ritz vectors, half as many, and T their values; B then
    couples to all of them.

    Attributes:
        basis: Q, (P, m).
        projected: T, (m, m), fp64 on the CPU.
        num_matvecs: products so far.
        exhausted: whether Q spans the whole space, so that T's eigenvalues are all of A's.
    """

    def __init__(
        self,
        operator: LinearOperator,
        *,
        block_size: int,
        max_columns: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.operator = operator
        self.generator = generator
        self.num_matvecs = 0
        self.exhausted = False
        start = operator.randn(block_size, generator)
        self.max_columns = max_columns
        self._place: Tensor | None = None
        self.basis = start[:, :0]
        self.projected = torch.zeros(0, 0, dtype=torch.float64)
        self._rounding = torch.finfo(operator.dtype).eps
        self._block, _ = orthonormalise(operator, start, fill=True, generator=generator)  # bfloat16 may drop one
        self._coupling = torch.zeros(block_size, 0, dtype=torch.float64)

    def step(self) -> None:
        """Add the pending block to the basis, multiply by it, and find the next block."""
        self._make_room()
        block = self._block
        products = checked_product(self.operator, block)
        self.num_matvecs += block.shape[1]
        self._append(block)
        self.projected = bordered(self.projected, self._coupling, self.operator.gram(block, products))
        scale = float(torch.linalg.matrix_norm(self.projected, ord=2))
        self._block, self._coupling = orthonormalise(
            self.operator,
            products,
            against=self.basis,
            scale=scale,
            fill=True,
            apart=self._place is not None,
            generator=self.generator,
        )
        self.exhausted = self._block.shape[1] == 0

    def _make_room(self) -> None:
        """Move a basis that grows large to one place, or restart where that is full."""
        size, width = self.basis.shape[1], self._block.shape[1]
        if self.max_columns is None or 5 * (size + width) <= self.max_columns:
            return
        if self._place is None:
            self._block = self._block.clone()  # a view of all that it was orthogonalised against
            most = max(self.max_columns - self.max_columns // 5, size + width, 3 * width)
            self._place = self.basis.new_empty(most, len(self.basis))  # a vector a row
            self._place[:size] = self.basis.T
            self.basis = self._place[:size].T
        if size + width > len(self._place):
            self._restart(self._place, len(self._place) // 2)

    def _append(self, block: Tensor) -> None:
        if self._place is None:
            self.basis = torch.cat([self.basis, block], dim=1)
            return
        size = self.basis.shape[1] + block.shape[1]
        self._place[self.basis.shape[1] : size] = block.T
        self.basis = self._place[:size].T

    def _restart(self, place: Tensor, num_kept: int) -> None:
        """Make Q its leading Ritz vectors, in place: A Q = Q diag(values) + Q_next (B E_lastᵀ coefficients)."""
        values, coefficients = torch.linalg.eigh(self.projected)
        kept = coefficients[:, -num_kept:]
        self._coupling = self._coupling @ kept[len(kept) - self._coupling.shape[1] :]
        self.projected = torch.diag(values[-num_kept:])
        for rows in place[: len(kept)].split(_ROWS_OF_A_RESTART, dim=1):
            rows[:num_kept] = kept.T.to(rows) @ rows
        self.basis = place[:num_kept].T

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on here; the generator's state is kept by others."""
        return {k: v for k, v in vars(self).items() if k not in ("operator", "generator", "max_columns", "_place")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another one stood."""
        vars(self).update(state)
        self._place = None

    def ritz_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return T's eigenvalues (m,) ascending, its eigenvectors (m, m), and the residual bounds (m,)."""
        values, coefficients = torch.linalg.eigh(self.projected)
        last = coefficients[coefficients.shape[0] - self._coupling.shape[1] :]
        residuals = torch.linalg.vector_norm(self._coupling @ last, dim=0)
        # What B cannot see: the rounding of the products and of the orthogonalisation.
        return values, coefficients, residuals + 8 * self._rounding * values.abs().max()


def vectors_that_fit(operator: LinearOperator, memory_budget: float | None) -> int:
    """Return how many vectors, of the rows that this process holds, fill the budget; 0 where not one fits.

    Args:
        operator: whose vectors.
        memory_budget: in bytes; None: 80 % of what is free now.
    """
    Memory(budget=memory_budget)  # or an error that says what it must be
    budget = share_of_free(operator.device) if memory_budget is None else memory_budget
    ranks = operator.ranks
    if ranks is not None and memory_budget is None and operator.device.type == "cpu":
        budget /= ranks.size  # processes of one machine share its memory
    number = int(min(budget / (max(1, operator.num_rows) * operator.dtype.itemsize), 2**62))
    # Ranks go in step: with fewer vectors on one of them, it would ask for products that the others do not join.
    return number if ranks is None else min(ranks.gather(number))
