"""The paper's exact statements, each computed on streams of gradients: what holds, what is misprinted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlab.optim import Ginger
from experiments.ginger.cost import matrices
from experiments.ginger.cost.stream import coordinates

NEGLIGIBLE = 1e-9  # of the largest singular value: counts as no rank


def moving_average_error(vectors: Tensor, direction: Tensor, *, decay: float, damping: float) -> list[float]:
    """Return, after each update, how far Ginger with room for all of them is from G_t and from (γI + G_t)⁻¹g.

    The larger of the two relative errors; G_t is the undamped moving average from 0.
    """
    ginger = matrices.ginger_of(vectors.shape[1], rank=len(vectors), decay=decay, damping=damping)
    errors = []
    for d, average in zip(vectors, matrices.moving_averages(vectors, decay), strict=True):
        matrices.update(ginger, d)
        matrix = float((matrices.low_rank_part(ginger) - average).norm() / average.norm())
        exact = torch.linalg.solve(damping * _identity(average) + average, direction)
        errors.append(max(matrix, float((ginger.inverse_product(direction) - exact).norm() / exact.norm())))
    return errors


def truncation_error(vectors: Tensor, *, decay: float, damping: float, rank: int) -> list[tuple[float, float]]:
    """Return for each update the error of the inverse and the least that its rank allows, both times γ.

    The error is ‖G̃⁻¹ - found‖₂, with G̃⁻¹ of Eq. 17 from the state before the update; the least is the (τ + 1)-th
    eigenvalue of γ⁻¹I - G̃⁻¹ (Eckart and Young).
    """
    size = vectors.shape[1]
    ginger = matrices.ginger_of(size, rank=rank, decay=decay, damping=damping)
    before, found = vectors.new_zeros(size, size), []
    for d in vectors:
        matrices.update(ginger, d)
        full = decay * before + (1 - decay) * torch.outer(d, d)
        # Eq. 16 is monotone in σ: the eigenvalues of γ⁻¹I - G̃⁻¹ are κ of those of the matrix in it.
        sigma, basis = torch.linalg.eigh(full)
        exact = (basis / (damping + sigma)) @ basis.T
        least = sigma[-rank - 1] / (damping + sigma[-rank - 1]) if rank < size else sigma.new_zeros(())
        found.append(
            (matrices.spectral_norm(exact - matrices.inverse_of(ginger)) * damping, float(least.clamp_min(0)))
        )
        before = matrices.low_rank_part(ginger)
    return found


def qng_error(vectors: Tensor, *, decay: float) -> list[float]:
    """Return, after each update, ‖A Aᵀ - G_t‖ / ‖G_t‖ of QNG with room for all, G_t of Eq. 7 from G_0 = I."""
    qng, errors = matrices.qng_of(vectors.shape[1], rank=len(vectors), decay=decay), []
    for step, (d, average) in enumerate(zip(vectors, matrices.moving_averages(vectors, decay), strict=True), 1):
        matrices.update(qng, d)
        found, exact = matrices.product_of(qng, step), average + decay**step * _identity(average)
        own = found.matrix + found.shift * _identity(average)
        errors.append(float((own - exact).norm() / exact.norm()))
    return errors


def qng_rank(vectors: Tensor, *, decay: float, rank: int) -> int:
    """Return the rank of A Aᵀ - α^min(τ, t) I after all updates, up to rounding."""
    qng = matrices.qng_of(vectors.shape[1], rank=rank, decay=decay)
    for d in vectors:
        matrices.update(qng, d)
    sizes = torch.linalg.eigvalsh(matrices.product_of(qng, len(vectors)).matrix).abs()
    return int((sizes > NEGLIGIBLE * sizes.max()).sum())


def printed_algorithm_error(vectors: Tensor, *, decay: float, damping: float) -> list[float]:
    """Return, after each update, ‖found - (γI + G_t)⁻¹‖₂ γ for Algorithm 1 letter by letter, with room for all."""
    pairs = zip(
        algorithm_1(vectors, decay=decay, damping=damping, rank=len(vectors)),
        matrices.moving_averages(vectors, decay),
        strict=True,
    )
    return [
        damping * matrices.spectral_norm(found - torch.linalg.inv(damping * _identity(average) + average))
        for found, average in pairs
    ]


def printed_beta_error(q: Tensor, *, decay: float) -> dict[str, float]:
    """Return ‖K Kᵀ - (αI + (1-α)q qᵀ)‖₂ / ‖αI + (1-α)q qᵀ‖₂ for β as printed, and as it must be."""
    needed = decay * _identity(torch.outer(q, q)) + (1 - decay) * torch.outer(q, q)
    squared, root = float(q @ q), decay**0.5
    betas = {
        "printed": (root + (1 - decay) * squared - root) / squared,  # = 1 - α
        "mended": ((decay + (1 - decay) * squared) ** 0.5 - root) / squared,
    }
    errors = {}
    for name, beta in betas.items():
        factor = root * _identity(needed) + beta * torch.outer(q, q)
        errors[name] = matrices.spectral_norm(factor @ factor.T - needed) / matrices.spectral_norm(needed)
    return errors


def precision_errors(
    vectors: Tensor, gradient: Tensor, *, decay: float, damping: float, rank: int
) -> dict[str, float]:
    """Return errors of the direction in single precision: of the optimizer, and of keeping the inverse itself.

    Relative to `gradient`'s direction in double precision, after all updates; inf where the recursion of the
    inverse broke down before.
    """
    exact = _single_or_double(vectors, gradient, decay=decay, damping=damping, rank=rank, dtype=torch.float64)
    single = _single_or_double(vectors, gradient, decay=decay, damping=damping, rank=rank, dtype=torch.float32)
    errors = {"matrix": float((single - exact).norm() / exact.norm()), "inverse": float("inf")}
    small = vectors.float()
    kept = list(kept_inverse(small, decay=decay, damping=damping, rank=rank))
    if len(kept) == len(vectors):
        basis, kappa = kept[-1]
        g = gradient.float()
        own = (g / damping - basis @ (kappa * (basis.T @ g))).double()
        if bool(own.isfinite().all()):
            errors["inverse"] = float((own - exact).norm() / exact.norm())
    return errors


def _single_or_double(
    vectors: Tensor, gradient: Tensor, *, decay: float, damping: float, rank: int, dtype: torch.dtype
) -> Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(vectors[0], dtype=dtype))
    ginger = Ginger([parameter], 1.0, rank=rank, decay=decay, damping=damping)
    for d in vectors:
        matrices.update(ginger, d)
    return ginger.inverse_product(gradient.to(dtype)).double()


def _identity(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=like.dtype)


def exact_statements(
    vectors: Tensor, gradient: Tensor, *, decay: float, dampings: Sequence[float], ranks: Sequence[int], num: int
) -> list[dict[str, Any]]:
    """Return rows of statement, decay, damping, rank, updates and value.

    value: of `qng-rank` the rank over min(τ, t), of the others an error (see the functions above), the largest one
    and the number of updates at which it was met; of `algorithm-1` after every update. `truncation-loses` is the
    least error that the rank allows, which is not to be zero.

    Args:
        vectors: d_t, (T, n).
        gradient: of the loss, (n,).
        decay: α.
        dampings: γ.
        ranks: τ, of the truncation and of QNG's rank.
        num: updates of those that have room for all.
    """
    rows: list[dict[str, Any]] = []

    def add(statement: str, value: float, updates: int, **at: float) -> None:
        rows.append({"statement": statement, "decay": decay, **at, "updates": updates, "value": value})

    def add_largest(statement: str, values: Sequence[float], **at: float) -> None:
        place = max(range(len(values)), key=values.__getitem__)
        add(statement, values[place], place + 1, **at)

    # Of few vectors the span is small, and with it the matrices.
    small = coordinates(torch.stack([*vectors[:num], gradient]))
    few, direction = small[:-1], small[-1]
    for damping in dampings:
        room = {"damping": damping, "rank": num}
        add_largest("moving-average", moving_average_error(few, direction, decay=decay, damping=damping), **room)
        for step, error in enumerate(printed_algorithm_error(few, decay=decay, damping=damping), 1):
            add("algorithm-1", error, step, **room)
        for rank in (rank for rank in ranks if rank < num):
            pairs = truncation_error(few, decay=decay, damping=damping, rank=rank)
            at = {"damping": damping, "rank": rank}
            add_largest("truncation", [abs(error - least) for error, least in pairs], **at)
            add_largest("truncation-loses", [least for _, least in pairs], **at)
    add_largest("qng-moving-average", qng_error(few, decay=decay), rank=num)
    for rank in ranks:
        for count in sorted({max(1, rank // 2), rank, len(vectors)}):
            found = qng_rank(vectors[:count], decay=decay, rank=rank)
            add("qng-rank", found / min(rank, count), count, rank=rank)
    for name, error in printed_beta_error(few[0], decay=decay).items():
        add(f"{name}-beta", error, 1)
    return rows


# ---------------------------------------------------- the paper's recursions, which the optimizer does not use
def algorithm_1(vectors: Iterable[Tensor], *, decay: float, damping: float, rank: int) -> Iterator[Tensor]:
    """Yield G⁻¹ = γ⁻¹I - U K Uᵀ after each update, (n, n), by Algorithm 1 letter by letter.

    Its `h` is that of ασ, but its K that of σ with γ/α, and without the α⁻¹ of Eq. 17; its β is
    (α⁻¹ - 1)/(α + (1 - α)hᵀd).
    """
    basis, sigma = torch.zeros(0), torch.zeros(0)
    for d in vectors:
        if not len(basis):
            basis, sigma = d.new_zeros(len(d), 0), d.new_zeros(0)
        h = d / damping - basis @ (_kappa(decay * sigma, damping) * (basis.T @ d))
        beta = (1 / decay - 1) / (decay + (1 - decay) * h @ d)
        matrix = (basis * _kappa(sigma, damping / decay)) @ basis.T + beta * torch.outer(h, h)
        values, vectors_of = torch.linalg.eigh(matrix)
        kappa, basis = values.flip(0)[:rank], vectors_of.flip(1)[:, :rank]
        remainder = 1 - damping * kappa
        sigma = torch.where(remainder == 0, 0.0, damping**2 * kappa / remainder)  # the printed pseudo-inverse
        yield torch.eye(len(d), dtype=d.dtype) / damping - (basis * kappa) @ basis.T


def kept_inverse(
    vectors: Iterable[Tensor], *, decay: float, damping: float, rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield U (n, k) and κ (k,) of the inverse γ⁻¹I - U diag(κ) Uᵀ after each update, as long as it is finite.

    What Sec. 2.3 says, with α-factors that fit each other, in the precision of the vectors: the inverse is updated
    (Eq. 17, in Brand's basis) and cut, and σ comes from it by Eq. 18.
    """
    basis, sigma = torch.zeros(0), torch.zeros(0)
    for d in vectors:
        if not len(basis):
            basis, sigma = d.new_zeros(len(d), 0), d.new_zeros(0)
        kappa = _kappa(decay * sigma, damping)
        h = d / damping - basis @ (kappa * (basis.T @ d))
        beta = (1 - decay) / (1 + (1 - decay) * h @ d)
        inside = basis.T @ h
        outside = h - basis @ inside
        outside = outside - basis @ (basis.T @ outside)
        length = outside.norm()
        column = torch.cat([inside, length[None]])
        core = torch.diag(torch.cat([kappa, kappa.new_zeros(1)])) + beta * torch.outer(column, column)
        if not bool(core.isfinite().all()):
            return
        values, rotation = torch.linalg.eigh(core)
        kappa = values.flip(0)[:rank]
        basis = torch.cat([basis, (outside / length)[:, None]], 1) @ rotation.flip(1)[:, :rank]
        sigma = damping**2 * kappa / (1 - damping * kappa)
        yield basis, kappa


def _kappa(sigma: Tensor, damping: float) -> Tensor:
    """Return the diagonal of K_γ, Eq. 16."""
    return sigma / (damping * (damping + sigma))
