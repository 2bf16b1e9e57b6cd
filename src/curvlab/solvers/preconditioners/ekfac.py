"""Kronecker-factored preconditioners: K-FAC and EK-FAC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from curvlab.arguments import whole
from curvlab.curvature.layers import Layer
from curvlab.linalg import DerivedOperator, LinearOperator, SumOperator, generator_for
from curvlab.ranks import Ranks
from curvlab.seeding import Seed


@runtime_checkable
class LayeredOperator(Protocol):
    """What a Kronecker-factored preconditioner asks of G: its network's layers, as every DataOperator has them."""

    dtype: torch.dtype
    device: torch.device
    ranks: Ranks  # `layer_factors` yields the batches of one rank: sums over all examples are sums over the ranks

    @property
    def parameter_slices(self) -> tuple[slice, ...]:
        """Each parameter's place in the flat vector."""
        ...

    def layers(self, *, max_size: int) -> list[Layer]:
        """Return the layers that can be factored."""
        ...

    def layer_factors(
        self, layers: list[Layer], *, generator: torch.Generator | None = None
    ) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield for each batch every layer's activations and scaled signals."""
        ...

    def randn(self, num_columns: int, generator: torch.Generator | None = None) -> Tensor:
        """Return random vectors."""
        ...

    def __matmul__(self, vectors: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Block:
    """A layer's (U_B ⊗ U_A) diag(inverse) (U_B ⊗ U_A)ᵀ, and 1 / damping on what the bases leave out.

    They leave out eigenvectors of eigenvalue 0 alone: i columns of I where only i places have inputs, o of O.
    """

    layer: Layer
    input_basis: Tensor  # U_A, (I, i)
    output_basis: Tensor  # U_B, (O, o)
    inverse: Tensor  # (o, i), 1 / (eigenvalue + damping)
    outside: float  # 1 / damping

    def multiply(self, vectors: Tensor, result: Tensor) -> None:
        matrices = self.layer.matrix(vectors)
        rotated = self.output_basis.T @ matrices @ self.input_basis
        if self.inverse.shape == self.layer.shape:
            found = self.output_basis @ (self.inverse * rotated) @ self.input_basis.T
        else:
            inside = self.output_basis @ ((self.inverse - self.outside) * rotated) @ self.input_basis.T
            found = self.outside * matrices + inside
        self.layer.write(found, result)


class KroneckerInverse(DerivedOperator):
    """Block-diagonal approximation of (G + damping I)⁻¹: one Kronecker-factored block for each layer.

    Parameters outside of the blocks have a diagonal of their own. `Ekfac` makes it.

    Args:
        blocks: of the factored layers.
        rest: (P,), the diagonal used outside of the blocks.
        like: operator whose dtype, device and inner products to use.
    """

    def __init__(self, blocks: list[_Block], rest: Tensor, *, like: LinearOperator) -> None:
        super().__init__(like)
        self.blocks, self.rest = blocks, rest

    def __str__(self) -> str:
        """Return how many layers are factored."""
        return f"Kronecker factors of {len(self.blocks)} layers"

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return M V. Cost: 4 P (I + O) operations a column for layers (O, I), no product with G.

        With n places in a layer, fewer than its sides: 8 P n.
        """
        result = self.rest[:, None] * vectors
        for block in self.blocks:
            block.multiply(vectors, result)
        return result

    @property
    def is_psd(self) -> bool:
        """True: all blocks are positive."""
        return True


@dataclass(frozen=True)
class Ekfac:
    """Recipe for a `KroneckerInverse` of linear (GPT-2's, too) and nn.Conv2d layers (George et al. 2018).

    A layer's block of G is E[(g ⊗ a)(g ⊗ a)ᵀ], a its inputs and g the gradients by its outputs for labels drawn
    from the model. K-FAC (Martens & Grosse 2015): E[g gᵀ] ⊗ E[a aᵀ]. EK-FAC: the eigenvectors of that, with the
    block's own second moments along them as eigenvalues. Other parameters get one number a tensor, its mean
    diagonal of G.

    It leaves out everything between layers: as the whole inverse it may be far off, and as a preconditioner it
    may take more steps than none (overfitted networks), but it never changes the solution:
    `influence(..., solver=ConjugateGradient(preconditioner=Ekfac()))`. Of several queries block CG alone
    takes fewer products a system, set-up counted, than CG with it.

    Args:
        eigenvalues: "corrected" for EK-FAC, "kronecker" for K-FAC.
        max_size: layers with a side above it are treated as other parameters; a side takes O(size³) once, of fewer
            places n with inputs O(size n²).

    Cost: two passes of 3F each (K-FAC one) and one product for other parameters: 4 (3) products in all.
    Memory: two vectors, and the per-example gradients of one layer and batch where it has several places.
    """

    eigenvalues: Literal["corrected", "kronecker"] = "corrected"
    max_size: int = 2048

    def __post_init__(self) -> None:
        if self.eigenvalues not in ("corrected", "kronecker"):
            raise ValueError(f"eigenvalues must be 'corrected' or 'kronecker', got {self.eigenvalues!r}")
        whole("max_size", self.max_size)

    def build(self, operator: LinearOperator, *, generator: Seed = None) -> tuple[KroneckerInverse, int]:
        """Return M for `operator` = G + damping I, whose own `damping` is used, and what it cost in products."""
        generator = generator_for(operator, generator)
        why = (
            "a Kronecker-factored preconditioner reads a model's layers, so it needs GaussNewtonOperator(...) + "
            "damping * identity;"
        )
        source, damping = layered_term(operator, why=why), operator.damping
        if damping <= 0:
            raise ValueError(f"Kronecker factors need positive damping, got {damping:g}: op + damping * identity")
        layers = source.layers(max_size=self.max_size)
        if not layers:
            raise ValueError(
                "the model has no nn.Linear or nn.Conv2d layer to factor with sides of at most "
                f"max_size={self.max_size}: raise it, or use Nystrom(rank)"
            )
        bases, kronecker = _factors(source, layers, generator=generator)
        num_matvecs = 2
        eigenvalues = kronecker
        if self.eigenvalues == "corrected":
            eigenvalues = _corrected(source, layers, bases, generator=generator)
            num_matvecs += 1
        covered = torch.zeros(operator.shape[0], dtype=torch.bool, device=operator.device)
        for layer in layers:
            covered[layer.weight] = True
            if layer.bias is not None:
                covered[layer.bias] = True
        rest = torch.full((operator.shape[0],), 1 / damping, dtype=operator.dtype, device=operator.device)
        if not bool(covered.all()):
            rest = 1 / (_tensor_means(source, generator=generator) + damping)
            num_matvecs += 1
        blocks = [
            _Block(layer, *pair, 1 / (values.clamp(min=0) + damping), 1 / damping)
            for layer, pair, values in zip(layers, bases, eigenvalues, strict=True)
        ]
        return KroneckerInverse(blocks, rest, like=operator), num_matvecs


def layered_term(operator: LinearOperator, *, why: str) -> LayeredOperator:
    """Return the term that knows its layers: the operator itself, or one term of its sum with damping.

    Args:
        operator: GaussNewtonOperator(...) + damping * identity, for example.
        why: beginning of the message: what is needed, and for what.

    Raises:
        TypeError: there is no such term, or more than one.
    """
    terms = operator.terms if isinstance(operator, SumOperator) else (operator,)
    found = [term for term in terms if isinstance(term, LayeredOperator)]
    if len(found) != 1:
        names = ", ".join(type(term).__name__ for term in terms)
        raise TypeError(f"{why} got {names}. Nystrom(rank) needs products only.")
    return found[0]


def _factors(
    source: LayeredOperator, layers: list[Layer], *, generator: torch.Generator | None
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Return each layer's eigenvectors (U_A, U_B), as many as the factors can have rank, and K-FAC eigenvalues."""
    inputs = [_SecondMoments(layer.shape[1]) for layer in layers]
    outputs = [_SecondMoments(layer.shape[0]) for layer in layers]
    for batch in source.layer_factors(layers, generator=generator):
        for index, (a, g) in enumerate(batch):
            inputs[index].add(a.flatten(0, 1))
            outputs[index].add(g.flatten(0, 1))
    bases, eigenvalues = [], []
    for a_moments, g_moments in zip(inputs, outputs, strict=True):
        # Mean over places for a, sum over places and mean over examples for g (Grosse & Martens 2016).
        (a_values, a_vectors, count), (g_values, g_vectors, _) = (
            moments.eigen(source) for moments in (a_moments, g_moments)
        )
        bases.append((a_vectors, g_vectors))
        eigenvalues.append(g_values.clamp(min=0)[:, None] * (a_values / count).clamp(min=0))
    return bases, eigenvalues


class _SecondMoments:
    """The sum of r rᵀ over rows r: of fewer rows than their length the rows themselves, else the matrix."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0
        self.rows: list[Tensor] = []
        self.matrix: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add (m, size)."""
        self.count += len(rows)
        self.rows.append(rows)
        if self.count >= self.size:
            self._sum_up()

    def eigen(self, source: LayeredOperator) -> tuple[Tensor, Tensor, int]:
        """Return the eigenvalues, as many as can be above 0, their vectors, and how many rows there were."""
        if self.matrix is None and source.ranks.size == 1:
            basis, triangle = torch.linalg.qr(torch.cat(self.rows).T)
            values, vectors = torch.linalg.eigh(triangle @ triangle.T)
            return values, basis @ vectors, self.count
        self._sum_up()
        if self.matrix is None:  # this process has no example
            self.matrix = torch.zeros(self.size, self.size, dtype=source.dtype, device=source.device)
        (matrix,), (count,) = (_over_processes(source, [each]) for each in (self.matrix, torch.tensor(self.count)))
        values, vectors = torch.linalg.eigh(matrix)
        return values[-int(count) :], vectors[:, -int(count) :], int(count)

    def _sum_up(self) -> None:
        for rows in self.rows:
            product = rows.T @ rows
            self.matrix = product if self.matrix is None else self.matrix.add_(product)
        self.rows = []


def _corrected(
    source: LayeredOperator,
    layers: list[Layer],
    bases: list[tuple[Tensor, Tensor]],
    *,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """Return each block's second moments along the Kronecker basis, (o, i)."""
    shapes = [(u_b.shape[1], u_a.shape[1]) for u_a, u_b in bases]
    moments = [torch.zeros(shape, dtype=source.dtype, device=source.device) for shape in shapes]
    for batch in source.layer_factors(layers, generator=generator):
        for index, (a, g) in enumerate(batch):
            a_basis, g_basis = bases[index]
            a, g = a @ a_basis, g @ g_basis  # noqa: PLW2901
            if a.shape[1] == 1:
                moments[index] += g[:, 0].square().T @ a[:, 0].square()
            else:
                for some_a, some_g in zip(a.split(16), g.split(16), strict=True):
                    moments[index] += (some_g.transpose(1, 2) @ some_a).square().sum(0)
    return _over_processes(source, moments)


def _over_processes(source: LayeredOperator, sums: list[Tensor]) -> list[Tensor]:
    """Return sums over all examples, where each process has summed over its own."""
    return [source.ranks.sum(each) for each in sums]


def _tensor_means(source: LayeredOperator, *, generator: torch.Generator | None) -> Tensor:
    """Return each tensor's mean diagonal of G, spread over its entries, from one random product, (P,)."""
    signs = source.randn(1, generator)[:, 0].sign()
    diagonal = signs * (source @ signs)
    for place in source.parameter_slices:
        diagonal[place] = diagonal[place].mean().clamp(min=0)
    return diagonal
