"""The estimate's squared error, bias and definiteness, from dense matrices."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import Run
from curvlab.linalg import DenseOperator
from curvlab.optim import direction_estimate, expected_squared_error, stated_squared_error, unit_directions
from experiments.rank1.objectives import logistic_regression, rotated, spectrum

NUM_CHECKED = 200  # draws whose smallest eigenvalue is computed
BLOCK_ENTRIES = 500_000  # numbers in the matrices that are formed at once


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each (H, form, shift), and its main columns as `summary`.

    Args:
        run: seeds, store.
        cfg: `spectra`, `sizes` n, `delta`, `num_draws` in `num_batches`; logistic regression's `data` and `l2`.
    """
    settings = {"delta": cfg.delta, "draws": cfg.num_draws, "batches": cfg.num_batches}
    rows: list[dict[str, Any]] = []
    for name, matrix in run.progress(_hessians(run, cfg), "Hessians"):
        # The logistic Hessian depends on the examples and l2: its entries stand for both.
        config = {"name": name, "size": len(matrix), "entries": float(matrix.square().sum()), **settings}
        about = f"{name}, n = {len(matrix)}"
        errors = partial(_errors, run, name, matrix)
        stored = run.unit("rank1/estimate-error", config, errors, version=1, about=about)
        rows += [{"spectrum": name, "n": len(matrix), **row} for row in stored["rows"]]
    table = pd.DataFrame(rows)
    run.note(seeds=[cfg.seed])
    columns = ["spectrum", "n", "form", "delta", "measured", "stderr", "exact", "stated", "z"]
    return {"table": table, "summary": table[columns]}


def _errors(run: Run, name: str, matrix: Tensor) -> dict[str, Any]:
    cfg, generator = run.cfg, run.generator("draws", name, len(matrix))
    return {"rows": errors(matrix, cfg.delta, cfg.num_draws, cfg.num_batches, generator)}


def _hessians(run: Run, cfg: DictConfig) -> list[tuple[str, Tensor]]:
    """Return (name, H): one for each spectrum and size, and that of logistic regression."""
    found = [
        (name, rotated(spectrum(name, size), run.generator("basis", name, size)))
        for name in cfg.spectra
        for size in cfg.sizes
    ]
    splits = instantiate(cfg.data)
    run.record_data(splits.name, splits.checksum)
    objective = logistic_regression(splits, l2=cfg.l2)
    return [*found, (f"logistic {splits.name}", objective.hessian.to_dense())]


def errors(
    hessian: Tensor, delta: float, num_draws: int, num_batches: int, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Return one row for each form (S or D) and shift (0, delta), from dense matrices.

    `bias_ratio` is K‖mean - H‖² over its expectation without bias, K the draws of one batch, averaged over
    batches: 1 for an unbiased estimate.
    """
    size = len(hessian)
    operator = DenseOperator(hessian)
    settings = [(form, shift) for form in ("S", "D") for shift in (0.0, delta)]
    squares: dict[tuple[str, float], list[Tensor]] = {setting: [] for setting in settings}
    biases: dict[tuple[str, float], list[float]] = {setting: [] for setting in settings}
    asymmetric = 0
    identity = torch.eye(size, dtype=hessian.dtype)
    per_batch = num_draws // num_batches
    for _ in range(num_batches):
        directions = unit_directions(operator, per_batch, generator=generator).T
        totals = {setting: torch.zeros_like(hessian) for setting in settings}
        for block in directions.split(max(1, BLOCK_ENTRIES // size**2)):
            plain = size * (hessian @ block[:, :, None]) * block[:, None, :]
            asymmetric += int(((plain - plain.mT).abs().amax((1, 2)) > 1e-12).sum())
            forms = {"D": plain, "S": (plain + plain.mT) / 2}
            for form, shift in settings:
                error = forms[form] + shift * identity - hessian
                squares[form, shift].append(error.square().sum((1, 2)))
                totals[form, shift] += error.sum(0)
        for setting in settings:
            biases[setting].append(float((totals[setting] / per_batch).square().sum()))
    smallest = _smallest_eigenvalues(operator, generator)
    return [
        {
            "form": form,
            "delta": shift,
            **_row(hessian, (form, shift), torch.cat(squares[form, shift]), biases[form, shift], per_batch),
            "share_asymmetric": asymmetric / (per_batch * num_batches) if form == "D" else 0.0,
            "share_indefinite": sum(value < -1e-12 for value in smallest) / len(smallest),
        }
        for form, shift in settings
    ]


def _smallest_eigenvalues(operator: DenseOperator, generator: torch.Generator) -> list[float]:
    """Return the smallest eigenvalue of S for some draws; D has the same symmetric part."""
    return [
        direction_estimate(operator, unit_directions(operator, 1, generator=generator)).smallest_eigenvalue()
        for _ in range(NUM_CHECKED)
    ]


def _row(
    hessian: Tensor, setting: tuple[str, float], squares: Tensor, biases: list[float], per_batch: int
) -> dict[str, Any]:
    (form, shift), size = setting, len(hessian)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    spectral_norm, largest = float(eigenvalues.abs().max()), float(eigenvalues[-1])
    squared_norm, trace = float(hessian.square().sum()), float(hessian.trace())
    variance = expected_squared_error(size, squared_norm=squared_norm, trace=trace, symmetrize=form == "S")
    exact = variance + size * shift**2
    measured, stderr = float(squares.mean()), float(squares.std()) / math.sqrt(len(squares))
    certain = abs(measured - exact) <= 1e-9 * exact  # the error may be the same for every draw
    ratios = torch.tensor(biases, dtype=torch.float64) * per_batch / variance
    return {
        "measured": measured,
        "stderr": stderr,
        "exact": exact,
        "stated": stated_squared_error(size, spectral_norm=spectral_norm, delta=shift),
        "stated_with_largest": stated_squared_error(size, spectral_norm=largest, delta=shift),
        "z": 0.0 if certain else (measured - exact) / stderr,
        "mean_norm": float(squares.sqrt().mean()),
        "bias_ratio": float(ratios.mean()),
        "bias_ratio_stderr": float(ratios.std()) / math.sqrt(len(ratios)),
        "bias_norm": math.sqrt(max(float(ratios.mean()) - 1, 0.0) * variance / per_batch),
        "num_draws": len(squares),
    }
