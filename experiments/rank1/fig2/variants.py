"""The variants of the method on logistic regression: their optimizers, their names, how they compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch.optim import Optimizer

from curvlab.optim import CubicNewton, UniformDirection, stated_sigma
from experiments.rank1.objectives import Objective

# What a variant is when it does not say otherwise: the lemma as it stands. The rules for α_k, c = sigma_scale:
# given: sqrt(M ‖∇f‖ / 2) + c σ with the objective's global M and λ; measured: the same with both estimated along
# the path (c = 1); constant: c σ.
LEMMA: dict[str, Any] = {
    "rule": "given",
    "sigma_scale": 1.0,
    "delta_scale": 0.0,
    "num_directions": 1,
    "symmetrize": True,
    "safeguard": False,
}
REACHED = 0.1  # of the first gradient norm: the lemma's variant has converged for the purpose of its claim
SETTINGS = list(LEMMA)
COLUMNS = ["method", *SETTINGS, "lr_factor"]


def variants(cfg: DictConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (method, settings), each once."""
    seen: list[dict[str, Any]] = []
    for change in [
        *({"sigma_scale": scale} for scale in cfg.sigma_scales),
        {"rule": "measured"},
        *({"rule": "constant", "sigma_scale": scale} for scale in (1.0, *cfg.form_scales)),
        *({"sigma_scale": 0.0, "delta_scale": scale} for scale in cfg.delta_scales),
        *(
            {"sigma_scale": scale, "symmetrize": symmetrize, "safeguard": safeguard}
            for scale in cfg.form_scales
            for symmetrize in (True, False)
            for safeguard in (True, False)
        ),
        *(
            {"sigma_scale": scale, "num_directions": count, "safeguard": scale < 1}
            for scale in (1.0, cfg.directions_scale)
            for count in cfg.directions
        ),
    ]:
        settings = {**LEMMA, **change}
        if settings not in seen:
            seen.append(settings)
            yield "uniform direction", settings
    for factor in cfg.lr_factors:
        yield "gradient descent", {"lr_factor": float(factor)}
    yield "Newton", {}
    yield "cubic Newton", {}


def label(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that name a variant; empty where a setting does not apply."""
    return {"method": method, **{name: settings.get(name) for name in COLUMNS[1:]}}


def make_optimizer(
    objective: Objective, method: str, settings: dict[str, Any], generator: torch.Generator
) -> Optimizer:
    """Return the optimizer of a variant, with the objective's global constants unless its rule measures them."""
    spectral_norm, lipschitz = objective.spectral_norm, objective.hessian_lipschitz
    if spectral_norm is None or lipschitz is None:
        raise ValueError(f"{objective.name} has no known λ and M")
    if method == "gradient descent":
        return torch.optim.SGD(objective.parameters, lr=settings["lr_factor"] / spectral_norm)
    if method == "Newton":
        return CubicNewton(objective.parameters, objective.hessian)
    if method == "cubic Newton":
        return CubicNewton(objective.parameters, objective.hessian, hessian_lipschitz=lipschitz)
    delta, count, rule = settings["delta_scale"] * spectral_norm, settings["num_directions"], settings["rule"]
    sigma = settings["sigma_scale"] * stated_sigma(
        objective.size, spectral_norm=spectral_norm, delta=delta, num_directions=count
    )
    constants: dict[str, dict[str, float | None]] = {
        "given": {"sigma": sigma, "hessian_lipschitz": lipschitz},
        "measured": {},
        "constant": {"alpha": sigma},
    }
    return UniformDirection(
        objective.parameters,
        objective.hessian,
        delta=delta,
        num_directions=count,
        symmetrize=settings["symmetrize"],
        safeguard=settings["safeguard"],
        generator=generator,
        **constants[rule],  # type: ignore[arg-type]  # floats by name
    )


def last_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return the last row of each run."""
    return table.sort_values("step").groupby([*COLUMNS, "seed"], sort=False, dropna=False).tail(1)


def best_variant(table: pd.DataFrame) -> pd.DataFrame:
    """Return the last rows of the one-direction variant with the least mean log10 of f - f*, by seed."""
    last = last_rows(table)
    single = last[(last.method == "uniform direction") & (last.num_directions == 1)]
    groups = [own for _, own in single.groupby(SETTINGS, sort=False)]
    return min(groups, key=lambda own: float(log_gap(own).mean())).sort_values("seed")


def variant_name(rows: pd.DataFrame) -> str:
    """Return e.g. "D, c = 0.0001, safeguard"."""
    row = rows.iloc[0]
    rule = "" if row.rule == "given" else f", α {row.rule}"
    delta = f", δ = {row.delta_scale:g} λ" if row.delta_scale else ""
    safeguard = ", safeguard" if row.safeguard else ""
    return f"{'S' if row.symmetrize else 'D'}, c = {row.sigma_scale:g}{rule}{delta}{safeguard}"


def log_gap(rows: pd.DataFrame) -> pd.Series:
    """Return log10 of f - f*, not below rounding."""
    return rows.gap.astype(float).clip(lower=1e-16).apply(np.log10)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each variant: its end (median over seeds), its behaviour, and gradient descent beside it.

    `gradient_norm_by_descent` is its last gradient norm over that of gradient descent with step 1/λ;
    `log10_gap_by_descent` log10 of its last f - f* over that of the best step size of gradient descent, mean over
    seeds and its standard error. All after the same number of steps, unless a method ended before.
    """
    last = last_rows(table)
    descent = last[last.method == "gradient descent"]
    standard = float(descent[descent.lr_factor == 1].gradient_norm.iloc[0])
    last = last.assign(
        gradient_norm_by_descent=last.gradient_norm / standard,
        log10_gap_by_descent=log_gap(last) - float(log_gap(descent).min()),
        diverged=last.diverged.astype(int),  # a sum of booleans may be a boolean or a number
    )
    found = last.groupby(COLUMNS, sort=False, dropna=False).agg(
        seeds=("seed", "nunique"),
        steps=("step", "max"),
        products=("products", "median"),
        last_gradient_norm=("gradient_norm", "median"),
        last_gap=("gap", "median"),
        gradient_norm_by_descent=("gradient_norm_by_descent", "mean"),
        log10_gap_by_descent=("log10_gap_by_descent", "mean"),
        log10_gap_stderr=("log10_gap_by_descent", "sem"),
        share_rising=("share_rising", "mean"),
        share_uphill=("share_uphill", "mean"),
        share_indefinite=("share_indefinite", "mean"),
        share_singular=("share_singular", "mean"),
        spectral_norm=("spectral_norm", "mean"),
        hessian_lipschitz=("hessian_lipschitz", "mean"),
        diverged=("diverged", "sum"),
    )
    return found.reset_index().sort_values("last_gradient_norm")
