"""Lemma 1: thresholds of every spectrum, and trials of LiSSA on both sides of them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import Run
from experiments.lissa.lemma1 import moments
from experiments.lissa.lemma1.thresholds import batch_sizes, condition_constant, recommended_step_size, thresholds
from experiments.lissa.lemma1.trials import homogeneous_errors, lissa_errors, typical_growth
from experiments.lissa.spectra import spectrum

Row = dict[str, Any]
STARTS = ("lissa", "growing")


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `thresholds` of |B|, and `growth` of typical trials.

    Columns of `table`, errors over steps: spectrum, size, damping, role of the batch size (see `batch_sizes`),
    batch_size, start ("lissa": u_0 = 0, the gradient of one example; "growing": g = 0, the start that grows
    fastest), step, and what `_errors` gives.

    Args:
        run: seeds and store.
        cfg: `cases` (spectrum, size, trials: whether trials are run), `dampings`, `trial_dampings`, `num_trials`,
            `num_steps`, `shown_steps`, `growth` (arguments of `typical_growth`).
    """
    limits, errors, growth = [], [], []
    for damping in cfg.dampings:
        for case in cfg.cases:
            eigenvalues = spectrum(case.spectrum, case.size)
            names = {"spectrum": case.spectrum, "size": case.size, "damping": float(damping)}
            constant = {"constant": condition_constant(eigenvalues)}
            limits.append(names | thresholds(eigenvalues, damping) | constant)
            if not case.trials or damping not in cfg.trial_dampings:
                continue
            for role, batch_size in batch_sizes(eigenvalues, damping).items():
                key, setting = names | {"batch_size": batch_size}, names | {"role": role, "batch_size": batch_size}
                sizes = {"num_trials": cfg.num_trials, "num_steps": cfg.num_steps, "shown": list(cfg.shown_steps)}
                measure = partial(_errors, run, eigenvalues, key, **sizes)
                about = f"{case.spectrum}, n = {case.size}, damping {damping:g}, |B| = {batch_size}"
                found = run.unit(
                    "lissa/lemma1_errors", key | sizes, measure, version=2, about=f"errors of {about}"
                )
                errors += [setting | row for row in found["rows"]]
                sizes = {str(name): value for name, value in cfg.growth.items()}
                measure = partial(_growth, run, eigenvalues, key, **sizes)
                found = run.unit(
                    "lissa/lemma1_growth", key | sizes, measure, version=1, about=f"growth of {about}"
                )
                growth.append(setting | found)
    run.note(seeds=[cfg.seed])
    tables = {"table": errors, "thresholds": limits, "growth": growth}
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def _lissa_settings(eigenvalues: Tensor, key: Row) -> Row:
    step_size = recommended_step_size(eigenvalues, key["damping"])
    return {"damping": key["damping"], "step_size": step_size, "batch_size": key["batch_size"]}


def _errors(
    run: Run, eigenvalues: Tensor, key: Row, *, num_trials: int, num_steps: int, shown: list[int]
) -> dict[str, Any]:
    """Return one row for each start and shown step: measured and exact, relative to the start's ‖u_0 - u*‖².

    second_moment: E‖u_t - u*‖², with _stderr over trials, _exact by the recursion and _printed, u_0ᵀ R^t u_0;
    z: (measured - exact) / stderr. mean: ⟨E u_t - u*, u_0 - u*⟩, with _stderr and _exact. mean_norm: ‖E u_t - u*‖,
    exact, relative to ‖u_0 - u*‖; mean_bound, (1 - ηλ)^t, bounds it.
    """
    settings, rows = _lissa_settings(eigenvalues, key), []
    zero, gradient = torch.zeros_like(eigenvalues), eigenvalues.sqrt()  # of one example, up to signs
    growing = moments.growing_start(eigenvalues, **settings)
    generator = run.generator("lemma1", *key.values())
    sizes: Row = {"num_steps": num_steps, "num_trials": num_trials, "generator": generator}
    trials = (
        lissa_errors(eigenvalues, **settings, gradient=gradient, **sizes),
        homogeneous_errors(eigenvalues, **settings, start=growing, **sizes),
    )
    for name, blocks, (g, start) in zip(STARTS, trials, ((gradient, zero), (zero, growing)), strict=True):
        first = start - g / (eigenvalues + settings["damping"])
        scale = float(first @ first)
        squares, projections = [], []
        for errors in blocks:
            squares.append(errors[shown].square().sum(1) / scale)
            projections.append((first[:, None] * errors[shown]).sum(1) / scale)
        square, projection = torch.cat(squares, dim=1), torch.cat(projections, dim=1)
        means, exact = moments.exact_errors(eigenvalues, **settings, gradient=g, start=start, num_steps=max(shown))
        printed = moments.printed_growth(eigenvalues, **settings, start=start, num_steps=max(shown))
        root = math.sqrt(num_trials)
        for index, step in enumerate(shown):
            measured, stderr = float(square[index].mean()), float(square[index].std()) / root
            expected = float(exact[step].sum()) / scale
            certain = abs(measured - expected) <= 1e-9 * expected  # e.g. the first step from 0 is the same in all
            rows.append(
                {
                    "start": name,
                    "step": step,
                    "second_moment": measured,
                    "second_moment_stderr": stderr,
                    "second_moment_exact": expected,
                    "second_moment_printed": float(printed[step]) / scale if name == "growing" else math.nan,
                    "z": 0.0 if certain else (measured - expected) / stderr,
                    "mean": float(projection[index].mean()),
                    "mean_stderr": float(projection[index].std()) / root,
                    "mean_exact": float(means[step] @ first) / scale,
                    "mean_norm": float(means[step].norm()) / math.sqrt(scale),
                    "mean_bound": (1 - settings["damping"] * settings["step_size"]) ** step,
                    "num_trials": num_trials,
                }
            )
    return {"rows": rows}


def _growth(run: Run, eigenvalues: Tensor, key: Row, **sizes: int) -> Row:
    """Return the growth rate of the typical trial beside that of the root of the second moment."""
    settings = _lissa_settings(eigenvalues, key)
    rates = typical_growth(eigenvalues, **settings, **sizes, generator=run.generator("growth", *key.values()))
    radius = moments.spectral_radius(eigenvalues, **settings)
    return {
        "radius": radius,
        "half_log_radius": math.log(radius) / 2,
        "growth": float(rates.mean()),
        "growth_stderr": float(rates.std()) / math.sqrt(len(rates)),
        "num_trials": len(rates),
    }
