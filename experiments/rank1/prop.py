"""The Proposition on E‖D - H‖²_F, and what the slides say of D beside it (Semenov 2025).

make rank1-prop PRESET=smoke|embedded|laptop|paper ARGS="num_draws=10000 data=mushrooms"

The Proposition is printed as an equality, E‖D - H‖²_F = λmax² n (n - 1) + n δ² for D = S + δI. It is an upper
bound, and an equality only for multiples of the identity (without symmetrisation, for all H with H² = λ² I). λmax
must be the spectral norm: with the largest eigenvalue it fails for indefinite H. The exact value is
curvlab.optim.expected_squared_error. Here D, S and their errors are formed as dense matrices, draw by draw,
without any of these formulas: for spectra with spectral norm 1 in random bases, and for the Hessian of logistic
regression at x = 0. How far Monte Carlo is from the formulas, in standard errors, is z in summary.csv.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import Computed, Run, Target, panels, plots, unit
from curvlab.linalg import DenseOperator
from curvlab.optim import direction_estimate, expected_squared_error, stated_squared_error, unit_directions
from experiments.rank1.objectives import logistic_regression, rotated, spectrum

TARGET = Target(
    __name__,
    title="E‖D - H‖²: the Proposition",
    paper={"spectra": "any", "sizes": "any; 112 in its experiment", "num_draws": "expectation", "delta": "any"},
    digits={"table": 12},  # where the Proposition is an equality, six digits would put the ratio above 1
)
NUM_CHECKED = 200  # draws whose smallest eigenvalue is computed
BLOCK_ENTRIES = 500_000  # numbers in the matrices that are formed at once


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each (H, form, shift), and its main columns as `summary`.

    Reads `spectra`, `sizes` n, `delta`, `num_draws` in `num_batches`; logistic regression's `data` and `l2`.
    """
    settings = {"delta": cfg.delta, "draws": cfg.num_draws, "batches": cfg.num_batches}
    rows: list[dict[str, Any]] = []
    for name, matrix in run.progress(_hessians(run, cfg), "Hessians"):
        # The logistic Hessian depends on the examples and l2: its entries stand for both.
        what = {"name": name, "size": len(matrix), "entries": float(matrix.square().sum())}
        rows += [
            {"spectrum": name, "n": len(matrix), **row} for row in _errors(run, matrix, **what, **settings)["rows"]
        ]
    table = pd.DataFrame(rows)
    run.note(seeds=[cfg.seed])
    columns = ["spectrum", "n", "form", "delta", "measured", "stderr", "exact", "stated", "z"]
    return {"table": table, "summary": table[columns]}


@unit("rank1/estimate-error", version=1, about="{name}, n = {size}")
def _errors(run: Run, matrix: Tensor, /, **key: Any) -> dict[str, Any]:
    generator = run.generator("draws", key["name"], len(matrix))
    return {"rows": errors(matrix, key["delta"], key["draws"], key["batches"], generator)}


def _hessians(run: Run, cfg: DictConfig) -> list[tuple[str, Tensor]]:
    """Return (name, H): one for each spectrum and size, and that of logistic regression."""
    found = [
        (name, rotated(spectrum(name, size), run.generator("basis", name, size)))
        for name in cfg.spectra
        for size in cfg.sizes
    ]
    splits = instantiate(cfg.data)
    run.record_data(splits.name, splits.checksum)
    return [*found, (f"logistic {splits.name}", logistic_regression(splits, l2=cfg.l2).hessian.to_dense())]


def errors(
    hessian: Tensor, delta: float, num_draws: int, num_batches: int, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Return one row for each form (S or D) and shift (0, delta), from dense matrices.

    `bias_ratio` is K‖mean - H‖² over its expectation without bias, K the draws of one batch, averaged over
    batches: 1 for an unbiased estimate.
    """
    size, per_batch, asymmetric = len(hessian), num_draws // num_batches, 0
    operator, identity = DenseOperator(hessian), torch.eye(size, dtype=hessian.dtype)
    settings = [(form, shift) for form in ("S", "D") for shift in (0.0, delta)]
    squares: dict[tuple[str, float], list[Tensor]] = {setting: [] for setting in settings}
    biases: dict[tuple[str, float], list[float]] = {setting: [] for setting in settings}
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
    # The smallest eigenvalue of S for some draws; D has the same symmetric part.
    drawn = (unit_directions(operator, 1, generator=generator) for _ in range(NUM_CHECKED))
    indefinite = sum(direction_estimate(operator, u).smallest_eigenvalue() < -1e-12 for u in drawn)
    return [
        {
            "form": form,
            "delta": shift,
            **_row(hessian, (form, shift), torch.cat(squares[form, shift]), biases[form, shift], per_batch),
            "share_asymmetric": asymmetric / (per_batch * num_batches) if form == "D" else 0.0,
            "share_indefinite": indefinite / NUM_CHECKED,
        }
        for form, shift in settings
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


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures: measured over stated error against n, for S with both meanings of λmax, and for D."""
    table = computed["table"]
    table = table.assign(spectrum=table.spectrum.str.split(" ").str[0])  # "logistic" without its data
    plain = table[table.delta == 0]
    symmetrised = plain[plain.form == "S"]
    figure, axes = plots.figure(1, 2, panel_size=(3.95, 3.6))
    _ratios(axes[0, 0], symmetrised, "stated", title="symmetrised S, λ: spectral norm")
    _ratios(axes[0, 1], symmetrised, "stated_with_largest", title="symmetrised S, λ: largest eigenvalue")
    more, (right,) = plots.figure(panel_size=(3.95, 3.4))
    _ratios(right[0], plain[plain.form == "D"], "stated", title="unsymmetrised D, λ: spectral norm")
    note = "dashed: as printed; names: spectra of H (signed, mirrored: indefinite; logistic: a trained model's)"
    note += "\nline: exact; marks: Monte Carlo with 95 %"
    worst = f"{table.z.abs().max():.1f} s.e. off the exact value in {len(table)} settings"
    figure.supxlabel(f"{note}, at most {worst}", fontsize=8.5)
    more.supxlabel(note, fontsize=8.5)
    return {"figure.png": figure, "figure_more.png": more}


def _ratios(ax: Axes, table: pd.DataFrame, column: str, *, title: str) -> None:
    """Draw Monte Carlo as points, with 95 %, and the closed form as lines, each with its name at the right."""
    shown = table[table[column] > 0].sort_values("n", kind="stable")
    shown = shown.assign(formula=shown.exact / shown[column], found=shown.measured / shown[column])
    shown = shown.assign(error=shown.stderr / shown[column])
    styles = panels.styles_of(table.spectrum.unique())
    panels.rule(ax, y=1, color="black")
    for name, own in shown.groupby("spectrum", sort=False):
        ax.plot(own.n, own.formula, color=styles[name]["color"], linewidth=1)
    panels.lines(
        ax, shown, x="n", y="found", by="spectrum", stderr="error", bars=True, styles=styles, linestyle="none"
    )
    panels.frame(ax, x="n", y="E‖D - H‖² over the printed one", title=title, log="xy")
    ax.autoscale_view()
    ends = shown.drop_duplicates("spectrum", keep="last").sort_values("formula", kind="stable")
    heights = ax.transAxes.inverted().transform(ax.transData.transform(ends[["n", "formula"]]))[:, 1]
    place = -1.0
    for name, height in zip(ends.spectrum, heights, strict=True):
        place = max(place + 0.07, height)  # where the line ends, or just above the name below
        ax.text(1.02, place, name, transform=ax.transAxes, va="center", fontsize=8.5)
