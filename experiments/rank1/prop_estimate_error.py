"""The Proposition on E‖D - H‖²_F, and what the slides say of D beside it (Semenov 2025).

make rank1-prop PRESET=smoke|embedded|laptop|paper ARGS="num_draws=10000 data=mushrooms"

The Proposition is printed as an equality, E‖D - H‖²_F = λmax² n (n - 1) + n δ² for D = S + δI. It is an upper
bound, and an equality only for multiples of the identity (without symmetrisation, for all H with H² = λ² I). λmax
must be the spectral norm: with the largest eigenvalue it fails for indefinite H. The exact value is
curvlab.optim.expected_squared_error. Here D, S and their errors are formed as dense matrices, draw by draw,
without any of these formulas: for spectra with spectral norm 1 in random bases, and for the Hessian of logistic
regression at x = 0.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from curvlab import runs
from curvlab.linalg import DenseOperator
from curvlab.optim import direction_estimate, expected_squared_error, stated_squared_error, unit_directions
from curvlab.reporting import save_claims
from curvlab.runs import Run
from experiments.rank1.problems import logistic_regression, rotated, spectrum
from experiments.rank1.prop_claims import judge_claims
from experiments.rank1.prop_plot import draw

NUM_CHECKED = 200  # draws whose smallest eigenvalue is computed
BLOCK_ENTRIES = 500_000  # numbers in the matrices that are formed at once


@runs.main("rank1/prop_estimate_error")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="rank1", item="prop", title="E‖D - H‖²: the Proposition") as run:
        rows: list[dict[str, Any]] = []
        for name, matrix in run.progress(_hessians(run, cfg), "Hessians"):
            config = {"name": name, "size": len(matrix), "delta": cfg.delta, "draws": cfg.num_draws, "version": 2}
            config["entries"] = float(matrix.square().sum())  # the logistic one depends on rows and l2

            def compute(matrix: Tensor = matrix, name: str = name) -> dict[str, Any]:
                generator = run.generator("draws", name, len(matrix))
                return {"rows": errors(matrix, cfg.delta, cfg.num_draws, cfg.num_batches, generator)}

            stored = run.unit("rank1/prop", {**config, "batches": cfg.num_batches}, compute)["rows"]
            rows += [{"spectrum": name, "n": len(matrix), **row} for row in stored]
        table = pd.DataFrame(rows)
        run.save_table(table)
        columns = ["spectrum", "n", "form", "delta", "measured", "stderr", "exact", "stated", "z"]
        run.save_table(table[columns], "summary.csv")
        save_claims(run.folder, judge_claims(table))
        for file, figure in draw(table).items():
            run.save_figure(figure, file)
        run.note(
            scale={
                "spectra": {"ours": list(cfg.spectra), "paper": "any"},
                "n": {"ours": list(cfg.sizes), "paper": "any; 112 in its experiment"},
                "draws": {"ours": cfg.num_draws, "paper": "expectation"},
                "δ": {"ours": [0.0, cfg.delta], "paper": "any"},
            },
            seeds=[cfg.seed],
        )


def _hessians(run: Run, cfg: DictConfig) -> list[tuple[str, Tensor]]:
    """Return (name, H): one for each spectrum and size, and that of logistic regression."""
    found = [
        (name, rotated(spectrum(name, size), run.generator("basis", name, size)))
        for name in cfg.spectra
        for size in cfg.sizes
    ]
    splits = instantiate(cfg.data)
    run.record_data(splits.name, splits.checksum)
    problem = logistic_regression(splits, l2=cfg.l2)
    return [*found, (f"logistic {splits.name}", problem.hessian.to_dense())]


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


if __name__ == "__main__":
    main()
