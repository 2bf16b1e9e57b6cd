"""Fig. 1, tables: one row for each (point, test point); from them one for each panel, and one for each task."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch

from curvlab.influence.agreement import agreement, median_rms
from experiments.lissa.fig1.scores import Scores
from experiments.shared.trained_task import TrainedTask

# x, y of each comparison, and what it isolates.
COMPARISONS = {
    "lissa_pbrf": ("lissa", "pbrf"),  # the paper's figure
    "cg_exact": ("cg", "exact"),  # linearisation error
    "lissa_cg": ("cg", "lissa"),  # LiSSA's solver error
    "pbrf_exact": ("exact", "pbrf"),  # SGD's error on the PBRF
    "auto_cg": ("cg", "lissa_auto"),  # LiSSA's solver error once C is measured
}


def score_table(scores: Scores) -> pd.DataFrame:
    """Return all scores of one task, one row for each (point, test point).

    Columns point, test, lissa_0.., pbrf_0.., cg, exact, lissa_auto; nan where a score was not computed.
    """
    num_seeds, num_test, num_points = scores.lissa.shape
    columns: dict[str, object] = {
        "point": scores.point_indices.repeat_interleave(num_test).numpy(),
        "test": scores.test_indices.repeat(num_points).numpy(),
    }
    for method in ("lissa", "pbrf"):
        for seed in range(num_seeds):
            columns[f"{method}_{seed}"] = getattr(scores, method)[seed].T.reshape(-1).numpy()
    for method in ("cg", "exact", "lissa_auto"):
        found = getattr(scores, method)
        missing = torch.full((num_test, num_points - found.shape[1]), torch.nan, dtype=torch.float64)
        columns[method] = torch.cat([found, missing], 1).T.reshape(-1).numpy()
    return pd.DataFrame(columns)


def rounded(table: pd.DataFrame, digits: int = 4) -> pd.DataFrame:
    """Return the table with so many significant digits: all that figures need, and small files."""
    return table.map(lambda value: float(f"{value:.{digits}g}") if isinstance(value, float) else value)


def panel_table(task: str, table: pd.DataFrame, lengths: torch.Tensor) -> pd.DataFrame:
    """Return Pearson, slope and case of every comparison for each point and seed of a task, in the table's order.

    Stochastic methods are compared seed by seed (LiSSA's and SGD's batches are independent); one that has no
    repetitions stands under seed 0 only.

    Args:
        task: its label.
        table: as `score_table` gives it.
        lengths: (seeds, K) ‖x‖ damping / ‖g‖ of LiSSA's results, which become the column lissa_length.
    """
    rows, scale = [], _typical_size(table)
    for position, (point, panel) in enumerate(table.groupby("point", sort=False)):
        for seed in range(len(lengths)):
            # Overflow is what happens to one LiSSA result of the paper's Fig. 6.
            row: dict[str, object] = {"task": task, "position": position, "point": point, "seed": seed}
            row |= {"lissa_length": float(lengths[seed, position]), "lissa_pbrf_case": "overflow"}
            for name, (x, y) in COMPARISONS.items():
                values = panel[[_column(method, seed) for method in (x, y)]]
                repeats_seed_0 = seed > 0 and not {x, y} & {"lissa", "pbrf"}
                if repeats_seed_0 or not np.isfinite(values).all(axis=None):
                    continue
                found = agreement(*(torch.tensor(values[column].to_numpy()) for column in values), scale=scale)
                row |= {
                    f"{name}_pearson": found.pearson,
                    f"{name}_slope": found.slope,
                    f"{name}_case": found.case,
                    f"{name}_error": found.relative_error,
                }
            rows.append(row)
    return pd.DataFrame(rows)


def summary_row(task: TrainedTask, scores: Scores, panels: pd.DataFrame) -> dict[str, object]:
    """Return size, spectrum and settings of a task, and how well the methods agree (median over points)."""
    row: dict[str, object] = {
        "task": task.label,
        "P": task.num_parameters,
        "N": task.num_train,
        "train loss": task.train_loss,
        "test accuracy": task.test_accuracy,
        "points": len(scores.point_indices),
        "test points": len(scores.test_indices),
        "seeds": scores.lissa.shape[0],
        "tr(G)": scores.spectrum["trace"],
        "tr(G) s.e.": scores.spectrum["trace_stderr"],
        "lambda_max": scores.spectrum["largest_eigenvalue"],
        "damping": scores.damping,
        "step size": scores.settings.step_size,
        "batch size": scores.settings.batch_size,
        "steps": scores.settings.num_steps,
    }
    for name, (x, y) in COMPARISONS.items():
        for quantity in ("pearson", "slope"):
            values = point_means(panels, f"{name}_{quantity}")
            row[f"{quantity} {x}-{y}"] = float(np.median(values)) if len(values) else math.nan
    counts = panels.lissa_pbrf_case.value_counts()
    for case in ("agree", "both near zero", "apart", "overflow"):
        row[case] = counts.get(case, 0) / max(len(panels), 1)
    return row | {
        "LiSSA longer than any solution": float((panels.lissa_length > 1).mean()),
        "C measured": scores.constant,
        "CG residual": scores.residuals["cg"],
        "PBRF gradient norm": scores.residuals["newton"],
    }


def point_means(panels: pd.DataFrame, column: str) -> np.ndarray:
    """Return the mean over seeds of a panel quantity for each point that has it, (K,)."""
    if column not in panels:
        return np.zeros(0)
    return panels.groupby("position")[column].mean().dropna().to_numpy()


def _typical_size(table: pd.DataFrame) -> float:
    """Return the median root mean square of the points' exact scores.

    Zero where nothing is solved exactly: scores that may have diverged do not tell what is near zero, so that no
    panel is called so.
    """
    solved = table[table.cg.notna()]
    return 0.0 if solved.empty else median_rms(_matrix(solved, "cg"))


def _column(method: str, seed: int) -> str:
    return f"{method}_{seed}" if method in ("lissa", "pbrf") else method


def _matrix(table: pd.DataFrame, column: str) -> torch.Tensor:
    num_points = table.point.nunique()
    return torch.tensor(table[column].to_numpy()).reshape(num_points, -1).T
