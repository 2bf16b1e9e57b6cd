"""Theorem 1, Corollary 1 (Klochkov & Liu 2024) and exact second moments; from u_0 = 0 unless said otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.lissa.thm1.factored_problems import FactoredProblem


@dataclass(frozen=True)
class Bounds:
    """What the theorem says for one problem, damping (λ), step_size (η) and |B|.

    Attributes:
        delta: largest δ of condition (9); at or below 0 the theorem says nothing.
        sampling_error: E‖(G - G_t) u*‖², the theorem's Δ.
        solution_norm: ‖u*‖².
        contraction: 1 - ηλ.
        printed_sampling: second term of (10), η² tr / |B| gᵀ(G + λ)⁻¹g.
        step_size: η.
    """

    delta: float
    sampling_error: float
    solution_norm: float
    contraction: float
    printed_sampling: float
    step_size: float

    def theorem(self, step: int, *, start_error: float | None = None) -> float:
        """Return (1 - δ)^t (2‖u_0 - u*‖² + ‖u*‖²) + δ⁻¹ η² Δ; nan where no δ exists."""
        if self.delta <= 0:
            return float("nan")
        first = self.solution_norm if start_error is None else start_error
        decay: float = (1 - self.delta) ** step
        return decay * (2 * first + self.solution_norm) + self.step_size**2 * self.sampling_error / self.delta

    def corrected(self, step: int, *, start_error: float | None = None) -> float:
        """Return 2 (1 - δ)^t ‖u_0 - u*‖² + 2 δ⁻¹ η² Δ, which holds for every u_0; nan where no δ exists.

        The error is that of g = 0 from u_0 - u*, plus that of the iteration from u*, whose mean is zero, so that
        no cross term is left: each is bounded by one of the two terms.
        """
        if self.delta <= 0:
            return float("nan")
        first = self.solution_norm if start_error is None else start_error
        decay: float = (1 - self.delta) ** step
        return 2 * decay * first + 2 * self.step_size**2 * self.sampling_error / self.delta

    def printed(self, step: int, *, first_constant: float = 1.0, second_constant: float = 1.0) -> float:
        """Return (10): (1 - λη)^2t (‖u_0‖² + ‖u*‖²) + η² tr / |B| gᵀ(G + λ)⁻¹g, with constants before both."""
        decay: float = self.contraction ** (2 * step)
        return first_constant * decay * self.solution_norm + second_constant * self.printed_sampling


def bounds(problem: FactoredProblem, damping: float, *, step_size: float, batch_size: int) -> Bounds:
    """Compute all that the bounds need from the dense matrices. Cost: P³."""
    solution = problem.solution(damping)
    return Bounds(
        delta=1 - condition_eigenvalue(problem, damping, step_size=step_size, batch_size=batch_size),
        sampling_error=float(solution @ problem.sampling_gap @ solution) / batch_size,
        solution_norm=float(solution @ solution),
        contraction=1 - step_size * damping,
        printed_sampling=step_size**2 * problem.trace / batch_size * float(problem.gradient @ solution),
        step_size=step_size,
    )


def mean_error(problem: FactoredProblem, damping: float, *, step_size: float, step: int) -> float:
    """Return ‖E u_t - u*‖ = ‖(I - η(G + λ))^t u*‖ over ‖u*‖, exact: batches are unbiased and independent."""
    values, vectors = problem.eigen
    solution = vectors.T @ problem.solution(damping)
    factors = (1 - step_size * (values + damping)) ** step
    return float((factors * solution).norm() / solution.norm())


def condition_eigenvalue(
    problem: FactoredProblem, damping: float, *, step_size: float, batch_size: float
) -> float:
    """Return the largest eigenvalue of (1 - η(G + λ))² + η² (E G_t² - G²): 1 - δ in condition (9)."""
    values, vectors = problem.eigen
    contraction = vectors @ ((1 - step_size * (values + damping)) ** 2 * vectors).T
    matrix = contraction + step_size**2 / batch_size * problem.sampling_gap
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])


def condition_constant(problem: FactoredProblem, *, cutoff: float = 1e-9) -> float:
    """Return the smallest C of condition C.1: E G_i² - G² ⪯ C tr(G) G, over G's range. Cost: P³.

    Eigenvalues of G below cutoff · λmax are left out: the ratio is at most max λmax(G_i) / tr(G), but not to
    rounding there.
    """
    values, vectors = problem.eigen
    kept = values > cutoff * values[-1]
    whitened = vectors[:, kept] * values[kept].rsqrt()
    matrix = whitened.T @ problem.sampling_gap @ whitened
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[-1]) / problem.trace


def sufficient_threshold(problem: FactoredProblem, damping: float, *, step_size: float) -> float:
    """Return the |B| above which condition (9) holds with some δ > 0. Cost: P³."""
    values, vectors = problem.eigen
    x = step_size * (values + damping)
    scaled = vectors * (x * (2 - x)).rsqrt()
    matrix = scaled.T @ problem.sampling_gap @ scaled
    return float(step_size**2 * torch.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])


class SecondMoments:
    """Exact M = E (u_t - u*)(u_t - u*)ᵀ:  M <- Q M Q + η²/|B| E (G_i - G) E[u_t u_tᵀ] (G_i - G).

    Q = 1 - η(G + λ). Cost: 2 P² N r for each step.
    """

    def __init__(self, problem: FactoredProblem, damping: float, *, step_size: float) -> None:
        self.problem, self.damping, self.step_size = problem, damping, step_size
        self.values, self.vectors = problem.eigen
        self.rates = 1 - step_size * (self.values + damping)
        self.solution = problem.solution(damping)

    def errors(self, batch_size: float, num_steps: int, *, start: Tensor | None = None) -> Tensor:
        """Return E‖u_t - u*‖² for t = 0, ..., num_steps, (num_steps + 1,)."""
        mean = -self.solution if start is None else start - self.solution
        moments = torch.outer(mean, mean)
        contraction = self.vectors @ (self.rates * self.vectors).T
        found = [moments.trace()]
        for _ in range(num_steps):
            cross = torch.outer(mean, self.solution)
            raw = moments + cross + cross.T + torch.outer(self.solution, self.solution)
            noise = self.step_size**2 / batch_size * self.problem.gap(raw)
            moments, mean = contraction @ moments @ contraction + noise, contraction @ mean
            found.append(moments.trace())
        return torch.stack(found)

    def stationary_error(self, batch_size: float, *, rtol: float = 1e-4, max_steps: int = 200) -> float:
        """Return the limit of E‖u_t - u*‖²; inf when max_steps do not show one.

        A sum of terms that end as a geometric series: its rest is added, so that few terms are needed close to the
        threshold as well.
        """
        outer = torch.outer(self.solution, self.solution)
        term, total, before, limit = outer, 0.0, 0.0, float("inf")
        for _ in range(max_steps):
            term = self._undo_contraction(self.step_size**2 / batch_size * self.problem.gap(term))
            size = float(term.trace())
            total += size
            ratio = size / before if before > 0 else 1.0
            guess = total + size * ratio / (1 - ratio) if ratio < 1 else float("inf")
            if abs(guess - limit) <= rtol * guess:
                return guess
            before, limit = size, guess
        return float("inf")

    def exact_threshold(self, *, rtol: float = 1e-3, max_steps: int = 200) -> float:
        """Return the |B| below which the second moment diverges, by power iteration.

        It is the spectral radius of M -> (1 - Q·Q)⁻¹ η² E (G_i - G) M (G_i - G), which keeps M positive.
        """
        moments = torch.eye(len(self.values), dtype=self.values.dtype) / len(self.values)
        radius = before = 0.0
        for _ in range(max_steps):
            moments = self._undo_contraction(self.step_size**2 * self.problem.gap(moments))
            radius = float(moments.trace())
            if abs(radius - before) <= rtol * radius:
                break
            before = radius
            moments = moments / radius
        return radius

    def _undo_contraction(self, matrix: Tensor) -> Tensor:
        """Return M with M - Q M Q = matrix."""
        inside = self.vectors.T @ matrix @ self.vectors
        return self.vectors @ (inside / (1 - torch.outer(self.rates, self.rates))) @ self.vectors.T


def requirements(
    problem: FactoredProblem, damping: float, *, step_size: float, batch_sizes: list[int], exact_limits: bool
) -> dict[str, Any]:
    """Return `settings`, the |B| that LiSSA needs, and `stationary`, a row for each |B| on the error that stays.

    With `exact_limits` thresholds and limits of the error are computed from the exact second moments; else nan.
    """
    moments = SecondMoments(problem, damping, step_size=step_size)
    constant = condition_constant(problem)
    corollary = constant * problem.trace / problem.largest
    threshold = moments.exact_threshold() if exact_limits else math.nan
    rows = []
    for batch_size in batch_sizes:
        own = bounds(problem, damping, step_size=step_size, batch_size=batch_size)
        limit = moments.stationary_error(batch_size) if exact_limits and batch_size > threshold else math.nan
        update = own.step_size**2 * own.sampling_error / own.solution_norm
        rows.append(
            {
                "batch_size": batch_size,
                "admitted": batch_size >= corollary,
                "delta": own.delta,
                "error": limit / own.solution_norm,
                "theorem": update / own.delta if own.delta > 0 else math.nan,
                "single_update": update,
                "printed": own.printed_sampling / own.solution_norm,
                "inverse_delta": 1 / (2 * step_size * damping),
                "constant": constant,
            }
        )
    alone = condition_eigenvalue(problem, damping, step_size=step_size, batch_size=1)
    settings = {
        "num_parameters": len(problem.gradient),
        "num_examples": len(problem.factors),
        "largest": problem.largest,
        "trace_ratio": problem.trace / problem.largest,
        "constant": constant,
        "exact": threshold,
        "sufficient": sufficient_threshold(problem, damping, step_size=step_size),
        "corollary": corollary,
        "recipe": math.ceil(2 * problem.trace / problem.largest),
        "single_example": alone / (1 - step_size * damping) ** 2,
    }
    return {"settings": settings, "stationary": rows}
