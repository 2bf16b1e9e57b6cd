"""The trace with the large eigenvalues taken out first: Hutch++ and XTrace."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from curvlab.arguments import whole
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import LinearOperator, checked_product, draw_probes, generator_for, orthonormalise
from curvlab.seeding import Seed
from curvlab.spectrum.trace import Estimate

_CHUNK = 32  # columns of a product between two looks at the clock; operators on data take no more at once anyway


@dataclass
class ProductsState:
    """The products so far, in the order in which a method asked for them.

    Attributes:
        products: blocks of at most 32 columns.
        num_steps: how many.
    """

    products: list[Tensor] = field(default_factory=list)
    num_steps: int = 0
    done: bool = False


Asking: TypeAlias = Generator[Tensor, Tensor, Estimate]  # yields vectors V, receives A V


class _Products:
    """Multiplies what a method asks for; one that goes on asks again from the start, and is told what is known.

    Its random vectors are drawn again then, which is cheap: the generator is as it was, or the file is refused.
    """

    def __init__(
        self, method: Callable[[], Asking], operator: LinearOperator, settings: Any, generator: Any
    ) -> None:
        self.method, self.operator, self.settings, self.generator = method, operator, settings, generator
        self.asking: Generator[Tensor, Tensor, Estimate] | None = None

    def depends_on(self) -> Mapping[str, Any]:
        return {"operator": self.operator, "generator": self.generator, "settings": self.settings}

    def init(self) -> ProductsState:
        return ProductsState()

    def step(self, state: ProductsState) -> ProductsState:
        if self.asking is None:
            known, state.products = state.products, []
            self.asking = self._in_chunks(state.products)
            self.wanted = next(self.asking)
            for product in known:
                self.wanted = self.asking.send(product)
        try:
            self.wanted = self.asking.send(checked_product(self.operator, self.wanted))
        except StopIteration as end:
            state.done, self.found = True, end.value
        state.num_steps += 1
        return state

    def expected_steps(self, state: ProductsState) -> float:
        return self.settings / _CHUNK  # the number of products, for both methods

    def result(self, state: ProductsState) -> Estimate:
        return self.found

    def _in_chunks(self, known: list[Tensor]) -> Asking:
        """Ask for the products that the method asks for, some columns at a time; append them to `known`."""
        asking = self.method()
        vectors = next(asking)
        while True:
            chunks = vectors.split(_CHUNK, dim=1)
            if len(chunks) == 1:
                products = yield vectors
                known.append(products)
            else:
                products = torch.empty_like(vectors, memory_format=torch.contiguous_format)
                for chunk, place in zip(chunks, products.split(_CHUNK, dim=1), strict=True):
                    place.copy_((yield chunk))
                    known.append(place)
            try:
                vectors = asking.send(products)
            except StopIteration as end:
                return end.value


def hutchpp_trace(
    operator: LinearOperator,
    *,
    num_matvecs: int,
    progress: bool = True,
    callback: Callable[[ProductsState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
) -> Estimate:
    """Estimate tr(A) by Hutch++ (Meyer, Musco, Musco & Woodruff 2021, Algorithm 1); unbiased.

    tr(A) = tr(QᵀAQ) + tr((I - QQᵀ) A (I - QQᵀ)) with Q an orthonormal basis of A S for random signs S. The
    first part is exact, the second Hutchinson's estimate, whose variance no longer knows the eigenvalues that
    Q took out. The standard error is that of the second part, given Q. Worth it where few eigenvalues carry
    the trace; on a flat spectrum plain Hutchinson uses its products better.

    Args:
        operator: A, (P, P).
        num_matvecs: a third each for A S, A Q and the probes of the rest; at least 6.
        progress: show a bar.
        callback: called with the state after each step, a block of 32 products.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`; it holds all products.
        generator: the only source of randomness; required with `checkpoint`.

    Cost: num_matvecs products; memory of num_matvecs vectors.
    """
    generator = generator_for(operator, generator)
    whole("num_matvecs", num_matvecs, least=6, why="two for each of three parts")

    def method() -> Asking:
        width = min(num_matvecs // 3, operator.shape[0])
        sketch = yield draw_probes(operator, width, generator=generator)
        basis, _ = orthonormalise(operator, sketch)
        images = yield basis
        exact = float(operator.inner(basis, images).double().sum())
        num_probes = num_matvecs - width - basis.shape[1]
        probes = draw_probes(operator, num_probes, generator=generator)
        probes = probes - basis @ operator.gram(basis, probes)
        forms = operator.inner(probes, (yield probes))
        rest = Estimate.from_samples(forms, num_probes)
        return Estimate(exact + rest.value, rest.stderr, width + basis.shape[1] + num_probes)

    work = _Products(method, operator, num_matvecs, generator)
    return iterate(work, name="Hutch++", progress=progress, callback=callback, checkpoint=checkpoint)


def xtrace(
    operator: LinearOperator,
    *,
    num_matvecs: int,
    progress: bool = True,
    callback: Callable[[ProductsState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: Seed = None,
) -> Estimate:
    """Estimate tr(A) by XTrace (Epperly, Tropp & Webber 2024, Sec. 2.3 and 3), with normalised test vectors.

    The mean over i of tr(Q_iᵀAQ_i) + c_i r_iᵀAr_i, where Q_i is an orthonormal basis of A applied to all
    normal test vectors but the i-th, r_i = (I - Q_iQ_iᵀ) w_i, and c_i = (P - rank Q_i) / ‖r_i‖² makes r_i
    uniform on a sphere. Unbiased. The paper's standard error treats the terms as independent; as
    they share their bases, it is too small. The covariance of the terms is added here.

    Args:
        operator: A, (P, P).
        num_matvecs: half of it test vectors, half the columns of Q; at least 6.
        progress: show a bar.
        callback: called with the state after each step, a block of 32 products.
        checkpoint: file of unfinished work, see `curvlab.iterate.iterate`; it holds all products.
        generator: the only source of randomness; required with `checkpoint`.

    Cost: num_matvecs products; memory of 1.5 num_matvecs vectors.
    """
    generator = generator_for(operator, generator)
    whole("num_matvecs", num_matvecs, least=6, why="three test vectors and three of Q")

    def method() -> Asking:
        size = operator.shape[0]
        width = min(num_matvecs // 2, size)
        tests = operator.randn(width, generator)
        images = yield tests
        basis, factor = orthonormalise(operator, images)  # A W = Q R
        rank = basis.shape[1]
        basis_images = yield basis

        small = _Projected(
            size=size,
            inside=operator.gram(basis, basis_images).double().cpu(),
            overlaps=operator.gram(basis, tests).double().cpu(),
            image_overlaps=operator.gram(basis, images).double().cpu(),
            energies=operator.inner(tests, images).double().cpu(),
            squares=operator.inner(tests, tests).double().cpu(),
        )
        if rank < width or rank == size:  # Q spans A's range, whichever probe is left out
            value, stderr = float(small.inside.trace()), 0.0
            if rank < width and rank < size:
                rest = Estimate.from_samples(small.terms_with_full_basis() - value, width)
                value, stderr = value + rest.value, rest.stderr
        else:
            terms, without = small.terms_and_without(factor)
            value = float(terms.mean())
            # Var(mean) = E s²/k + Cov, Cov of two terms. Given all probes but i, term i has mean tr(A), with probe
            # j in its basis or without; hence Cov = E (change of term i without j) (change of term j without i).
            changes = (terms - without).fill_diagonal_(0)
            covariance = float((changes * changes.T).sum()) / (width * (width - 1))
            stderr = math.sqrt(float(terms.var()) / width + max(covariance, 0.0))
        return Estimate(value, stderr, width + rank)

    work = _Products(method, operator, num_matvecs, generator)
    return iterate(work, name="XTrace", progress=progress, callback=callback, checkpoint=checkpoint)


@dataclass(frozen=True)
class _Projected:
    """All that XTrace needs of A and of the k test vectors W, as matrices of size k, fp64 on the CPU."""

    size: int  # P
    inside: Tensor  # H = QᵀAQ
    overlaps: Tensor  # QᵀW
    image_overlaps: Tensor  # QᵀAW
    energies: Tensor  # diag WᵀAW
    squares: Tensor  # diag WᵀW

    def terms_with_full_basis(self) -> Tensor:
        """Return the k terms when no column of Q is left out."""
        kept = self.overlaps
        energies = self.energies - 2 * (kept * self.image_overlaps).sum(0) + (kept * (self.inside @ kept)).sum(0)
        squares = (self.squares - (kept * kept).sum(0)).clamp(min=torch.finfo(torch.float64).tiny)
        return self.inside.trace() + (self.size - len(self.inside)) * energies / squares

    def terms_and_without(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the k terms (k,), and in entry (i, j) of a (k, k) term j computed without probe i, i ≠ j.

        Q_iQ_iᵀ = Q (I - s_i s_iᵀ) Qᵀ, s_i a unit vector orthogonal to all columns of R but the i-th. Without
        probes i and j, s_i s_iᵀ becomes the projector on span(s_i, s_j) = span(s_j, u), u orthogonal to s_j.
        """
        inside, num = self.inside, len(self.inside)
        left_out = torch.linalg.solve(factor.T, torch.eye(num, dtype=torch.float64))
        left_out = left_out / torch.linalg.vector_norm(left_out, dim=0)
        along = (left_out * self.overlaps).sum(0)
        kept = self.overlaps - left_out * along  # coordinates of Q_iQ_iᵀw_i
        energies = self.energies - 2 * (kept * self.image_overlaps).sum(0) + (kept * (inside @ kept)).sum(0)
        squares = self.squares - (kept * kept).sum(0)
        own = (left_out * (inside @ left_out)).sum(0)
        terms = inside.trace() - own + (self.size - num + 1) * energies / squares

        # u = (s_i - c s_j) / sqrt(1 - c²), c = s_iᵀs_j.
        cosines = left_out.T @ left_out
        sines = (1 - cosines**2).clamp(min=1e-12).sqrt()

        def along_u(vectors: Tensor) -> Tensor:
            """Return uᵀ x_j for all (i, j)."""
            products = left_out.T @ vectors
            return (products - cosines * products.diagonal()) / sines

        crossed = left_out.T @ inside @ left_out
        within = (crossed.diagonal()[:, None] - 2 * cosines * crossed + cosines**2 * own) / sines**2  # uᵀHu
        moved = along_u(kept)
        new_energies = (
            energies
            + 2 * moved * along_u(self.image_overlaps)
            - 2 * moved * along_u(inside @ kept)
            + moved**2 * within
        )
        ratios = (self.size - num + 2) * new_energies / (squares + moved**2)
        return terms, inside.trace() - own - within + ratios
