"""Exact moments of LiSSA in the counter-example of App. B.4, spectra on which it is tried, and thresholds of |B|.

The task: x_i = ±sqrt(λ_i) with independent signs, curvature H_t = mean of x xᵀ over |B| draws, H = diag(λ_1, ...).
For a matrix M, with all products coordinatewise but λ λᵀ,

    E (H_t - H) M (H_t - H) has the diagonal (λ λᵀ - diag(λ²)) diag(M) / |B|,

whatever stands off the diagonal of M. So the coordinates' second moments r = E (u_t - u*)² close among themselves:

    r <- A r + K (2 E(u_t - u*) u* + u*²),   K = step_size² / |B| (λ λᵀ - diag(λ²)),
                                             A = diag((1 - step_size (λ + damping))²) + K.

They diverge when A, symmetric and non-negative, has spectral radius above 1. The proof of Lemma 1 has a product of
matrices R in place of A^t: it takes E H_t R H_t for (E H_t²) R, true for R = I only (and drops 1 / |B| of
tr(H R) H on the way). R is diagonal and holds the row sums of A, so by Perron and Frobenius A's spectral radius is
at most R's largest eigenvalue: R below 1 suffices for convergence, which is Theorem 1, but R above 1 does not
suffice for divergence, as the proof has it. They are equal for flat spectra.

Lemma 1 says that one task exists, and it does: x of uniform direction, ‖x‖² = P ± sqrt(P) with equal probability.
Then H = I, E‖x‖² x xᵀ = H² + tr(H) H, which is C.1 with equality, and R is a multiple of I, so that each step
multiplies E‖u_t‖² by R's eigenvalue, g = 0. `isotropic_noise` is its K. Where the eigenvalue is 1, E‖u_t‖² stays;
with another g, E‖u_t - u*‖² grows by the same amount in every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def spectrum(name: str, size: int) -> Tensor:
    """Return (size,) eigenvalues, the largest of which is 1, in float64.

    flat; power, 1/k; root, 1/sqrt(k); exponential, from 1 to 1e-3; spike, one of 1 and the rest together 20.
    """
    k = torch.arange(1, size + 1, dtype=torch.float64)
    found = {
        "flat": torch.ones_like(k),
        "power": 1 / k,
        "root": k**-0.5,
        "exponential": 10 ** (-3 * (k - 1) / max(size - 1, 1)),
        "spike": torch.where(k == 1, 1.0, 20 / max(size - 1, 1)).double(),
    }
    if name not in found:
        raise ValueError(f"unknown spectrum {name!r}: choose {', '.join(found)}")
    if float(found[name].max()) > 1:
        raise ValueError(f"spectrum {name!r} needs more than {size} eigenvalues: at least 21")
    return found[name]


def noise_matrix(eigenvalues: Tensor, *, step_size: float, batch_size: float) -> Tensor:
    """Return K, (P, P): what sampling adds to the second moments."""
    outer = torch.outer(eigenvalues, eigenvalues)
    return step_size**2 / batch_size * (outer - torch.diag(eigenvalues**2))


def isotropic_noise(size: int, *, step_size: float, batch_size: float) -> Tensor:
    """Return K of the isotropic task, (P, P): E x_i² x_j² is (P + 1) / (P + 2), three times that for i = j."""
    ones, eye = torch.ones(size, size, dtype=torch.float64), torch.eye(size, dtype=torch.float64)
    return step_size**2 / batch_size * ((size + 1) / (size + 2) * (ones + 2 * eye) - eye)


def second_moment_matrix(eigenvalues: Tensor, damping: float, *, step_size: float, batch_size: float) -> Tensor:
    """Return A, (P, P), symmetric with non-negative entries."""
    contraction = (1 - step_size * (eigenvalues + damping)) ** 2
    return torch.diag(contraction) + noise_matrix(eigenvalues, step_size=step_size, batch_size=batch_size)


def printed_matrix(eigenvalues: Tensor, damping: float, *, step_size: float, batch_size: float) -> Tensor:
    """Return the diagonal of R = E(I - step_size (H_t + damping))², (P,): that of (9) and of the proof."""
    contraction = (1 - step_size * (eigenvalues + damping)) ** 2
    gap = (eigenvalues.sum() - eigenvalues) * eigenvalues / batch_size
    return contraction + step_size**2 * gap


def spectral_radius(eigenvalues: Tensor, damping: float, *, step_size: float, batch_size: float) -> float:
    """Return the spectral radius of A; above 1 the second moment diverges, below it converges. Cost: P³."""
    matrix = second_moment_matrix(eigenvalues, damping, step_size=step_size, batch_size=batch_size)
    return float(torch.linalg.eigvalsh(matrix)[-1])


def growing_start(eigenvalues: Tensor, damping: float, *, step_size: float, batch_size: float) -> Tensor:
    """Return the u_0 of norm 1 whose second moments grow by the spectral radius in every step, (P,)."""
    matrix = second_moment_matrix(eigenvalues, damping, step_size=step_size, batch_size=batch_size)
    moments = torch.linalg.eigh(matrix).eigenvectors[:, -1].abs()
    return (moments / moments.sum()).sqrt()


def exact_errors(
    eigenvalues: Tensor,
    damping: float,
    *,
    step_size: float,
    batch_size: float,
    gradient: Tensor,
    start: Tensor,
    num_steps: int,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean and the second moments of u_t - u* by coordinate, (num_steps + 1, P) each.

    u* = gradient / (λ + damping); noise: K, of the signed task unless given. Cost: P² a step.
    """
    if noise is None:
        noise = noise_matrix(eigenvalues, step_size=step_size, batch_size=batch_size)
    matrix = torch.diag((1 - step_size * (eigenvalues + damping)) ** 2) + noise
    solution = gradient / (eigenvalues + damping)
    mean = start - solution
    means, moments = [mean], [mean**2]
    for _ in range(num_steps):
        moments.append(matrix @ moments[-1] + noise @ (2 * means[-1] * solution + solution**2))
        means.append((1 - step_size * (eigenvalues + damping)) * means[-1])
    return torch.stack(means), torch.stack(moments)


def printed_growth(
    eigenvalues: Tensor, damping: float, *, step_size: float, batch_size: float, start: Tensor, num_steps: int
) -> Tensor:
    """Return u_0ᵀ R^t u_0 for t = 0, ..., num_steps: E‖u_t‖² for g = 0 according to the proof of Lemma 1."""
    factors = printed_matrix(eigenvalues, damping, step_size=step_size, batch_size=batch_size)
    powers = torch.arange(num_steps + 1, dtype=eigenvalues.dtype)
    return (factors[None] ** powers[:, None]) @ start**2


def printed_threshold(eigenvalues: Tensor, damping: float) -> float:
    """Return (λmax / (λmax + damping))² tr / λmax: at and below it Lemma 1 has a diverging step size."""
    largest = float(eigenvalues.max())
    return (largest / (largest + damping)) ** 2 * float(eigenvalues.sum()) / largest


def sufficient_threshold(eigenvalues: Tensor, damping: float, *, step_size: float) -> float:
    """Return the |B| at which R has the eigenvalue 1: above it condition (9) holds with some δ > 0."""
    x = step_size * (eigenvalues + damping)
    gap = step_size**2 * eigenvalues * (eigenvalues.sum() - eigenvalues)
    return float((gap / (x * (2 - x))).max())


def exact_threshold(eigenvalues: Tensor, damping: float, *, step_size: float) -> float:
    """Return the |B| at which A has the spectral radius 1: below it the second moment diverges, above it not.

    I - A = D - |B| K / |B| with D = diag(x (2 - x)), x = step_size (λ + damping): singular where |B| is the
    largest eigenvalue of D^(-1/2) |B| K D^(-1/2). The radius is convex in step_size and 1 at 0, so a diverging
    step_size of at most 1 / λmax exists if and only if 1 / λmax is one. Cost: P³.
    """
    x = step_size * (eigenvalues + damping)
    if not bool(((x > 0) & (x < 2)).all()):
        raise ValueError("the mean must converge: 0 < step_size (eigenvalue + damping) < 2")
    scale = (x * (2 - x)).rsqrt()
    noise = noise_matrix(eigenvalues, step_size=step_size, batch_size=1.0)
    return float(torch.linalg.eigvalsh(scale[:, None] * noise * scale)[-1])


def recommended_step_size(eigenvalues: Tensor, damping: float) -> float:
    """Return 1 / (λmax + damping) of Corollary 1; the step sizes of the lemma go up to 1 / λmax."""
    return 1 / (float(eigenvalues.max()) + damping)


def thresholds(eigenvalues: Tensor, damping: float) -> dict[str, float]:
    """Return the |B| below which the second moment diverges: as printed, by R, exactly; and radii at R's.

    At 1 / (λmax + damping), and (`_largest`) at 1 / λmax, the largest step size that the lemma admits.
    """
    found = {"printed": printed_threshold(eigenvalues, damping)}
    for suffix, step_size in (
        ("", recommended_step_size(eigenvalues, damping)),
        ("_largest", 1 / float(eigenvalues.max())),
    ):
        sufficient = sufficient_threshold(eigenvalues, damping, step_size=step_size)
        found["sufficient" + suffix] = sufficient
        found["exact" + suffix] = exact_threshold(eigenvalues, damping, step_size=step_size)
        batch_size = max(math.floor(sufficient), 1)  # the largest for which R has an eigenvalue of at least 1
        settings = {"step_size": step_size, "batch_size": batch_size}
        found["batch_size" + suffix] = batch_size
        found["printed_radius" + suffix] = float(printed_matrix(eigenvalues, damping, **settings).max())
        found["radius" + suffix] = spectral_radius(eigenvalues, damping, **settings)
    return found


def batch_sizes(eigenvalues: Tensor, damping: float) -> dict[str, int]:
    """Return whole |B| by role: half, below, between the exact threshold and R's, double the paper's."""
    limits = thresholds(eigenvalues, damping)
    exact, sufficient = limits["exact"], limits["sufficient"]
    found = {"half": max(math.floor(exact / 2), 1), "below": max(math.floor(exact), 1)}
    if (between := math.floor(exact) + 1) <= sufficient:
        found["between"] = between
    found["double"] = math.ceil(2 * limits["printed"])
    return {role: size for role, size in found.items() if role != "half" or size != found["below"]}


def isotropic_limits(size: int, damping: float) -> dict[str, float]:
    """Return what Lemma 1 says of the isotropic task at 1 / (λmax + damping) and the largest |B| that it admits.

    constant: C of its C.1, an equality; eigenvalue: of R; radius: by which E‖u_t‖² grows in a step, exactly.
    """
    eigenvalues = spectrum("flat", size)
    printed = printed_threshold(eigenvalues, damping)
    batch_size, step_size = math.floor(printed), recommended_step_size(eigenvalues, damping)
    noise = isotropic_noise(size, step_size=step_size, batch_size=batch_size)
    matrix = torch.diag((1 - step_size * (eigenvalues + damping)) ** 2) + noise
    return {
        "printed": printed,
        "batch_size": batch_size,
        "constant": float(noise.sum(1).mean()) * batch_size / step_size**2 / size,
        "eigenvalue": float(matrix.sum(1).max()),
        "radius": float(torch.linalg.eigvalsh(matrix)[-1]),
    }
