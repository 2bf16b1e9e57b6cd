"""Eq. 48 and 49 of App. G, as printed and as meant, in closed form for linear regression.

With H_i = x_i x_iᵀ of each example, H their mean and M = (1 - λ/σ) I - H/σ, a sum to infinity has a closed form in
the eigenvalues of H. Read literally, Eq. 49 sums powers of M_B, for a batch B of its own at every t: its mean is

    σ⁻¹ Σ_t E_B[M_B^t] v  =  E_B[(H_B + λ)⁻¹] v   (from t = 0),

the mean of the inverses, which is not the inverse of the mean; here over all batches of one and of two examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from experiments.pbrf.solvers import SCALES

INFINITE = float("inf")


def formula_rows(features: Tensor, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each formula and setting: relative error ‖found - (H + λ)⁻¹v‖ / ‖(H + λ)⁻¹v‖.

    formula: "from 1" and "from 0" (Eq. 48, `depth` terms), "powers of one batch" and "products" (Eq. 49, infinite
    R and T, starting at 0), "depth" (Eq. 48 from 0 at the paper's T and λ, for v where H is zero, for each σ).

    Args:
        features: (N, d), inputs of the regression; the first `num_examples` are taken.
        settings: `num_examples`, `damping`, `depths` (in units of σ / λ); `paper`: `damping`, `num_steps`.
    """
    x = features[: settings["num_examples"]].double().flatten(1)
    damping, hessian = float(settings["damping"]), x.T @ x / len(x)
    values, vectors = torch.linalg.eigh(hessian)
    sides = {"top eigenvector": vectors[:, -1], "sum of eigenvectors": vectors.sum(1)}
    scale = float(values[-1]) + damping
    rows: list[dict[str, Any]] = []
    for name, v in sides.items():
        exact = vectors @ ((vectors.T @ v) / (values + damping))
        for depth in settings["depths"]:
            num_terms = round(depth * scale / damping)
            for start in (0, 1):
                found = neumann_sum(hessian, v, scale=scale, damping=damping, num_terms=num_terms, start=start)
                rows.append(_row(f"from {start}", name, num_terms, found, exact))
        for size in (1, 2):
            found = mean_of_inverses(x, v, damping=damping, batch_size=size)
            rows.append(_row("powers of one batch", f"{name}, |B| = {size}", INFINITE, found, exact))
        rows.append(_row("products", name, INFINITE, mean_of_products(x, v, scale=scale, damping=damping), exact))
    paper = settings["paper"]
    for sigma in SCALES:
        left = (1 - paper["damping"] / sigma) ** paper["num_steps"]
        rows.append({"formula": "depth", "case": f"σ = {sigma}", "num_terms": paper["num_steps"], "error": left})
    return rows


def neumann_sum(hessian: Tensor, v: Tensor, *, scale: float, damping: float, num_terms: int, start: int) -> Tensor:
    """Return σ⁻¹ Σ_{t=start}^{num_terms} M^t v, by the geometric sum in each eigenvector."""
    values, vectors = torch.linalg.eigh(hessian)
    ratio = 1 - (values + damping) / scale
    sums = (ratio**start - ratio ** (num_terms + 1)) / (1 - ratio)
    return vectors @ (sums * (vectors.T @ v)) / scale


def mean_of_inverses(x: Tensor, v: Tensor, *, damping: float, batch_size: int) -> Tensor:
    """Return E_B[(H_B + damping)⁻¹] v over all batches of one or two of the examples, drawn with replacement."""
    eye = damping * torch.eye(x.shape[1], dtype=x.dtype)
    outer = x[:, :, None] * x[:, None, :]
    matrices = outer if batch_size == 1 else ((outer[:, None] + outer[None]) / 2).flatten(0, 1)
    return torch.linalg.solve(matrices + eye, v.expand(len(matrices), -1)).mean(0)


def mean_of_products(x: Tensor, v: Tensor, *, scale: float, damping: float) -> Tensor:
    """Return σ⁻¹ Σ_t E[M_{B_t} ... M_{B_1}] v of independent batches: powers of the mean of M_i, summed."""
    each = torch.eye(x.shape[1], dtype=x.dtype) * (1 - damping / scale) - x[:, :, None] * x[:, None, :] / scale
    mean = each.mean(0)
    return torch.linalg.solve(torch.eye(x.shape[1], dtype=x.dtype) - mean, v) / scale


def _row(formula: str, case: str, num_terms: float, found: Tensor, exact: Tensor) -> dict[str, Any]:
    error = float((found - exact).norm() / exact.norm())
    return {"formula": formula, "case": case, "num_terms": num_terms, "error": error}
