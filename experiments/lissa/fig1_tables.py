"""Fig. 1, tables: one row a (task, point, test point); from it alone, one row a panel and one a task."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import torch

from curvlab.influence.agreement import agreement, median_rms
from experiments.lissa.fig1_scores import Scores
from experiments.task import Task

# x, y of each comparison, and what it isolates.
COMPARISONS = {
    "lissa_pbrf": ("lissa", "pbrf"),  # the paper's figure
    "cg_exact": ("cg", "exact"),  # linearisation error
    "lissa_cg": ("cg", "lissa"),  # LiSSA's solver error
    "pbrf_exact": ("exact", "pbrf"),  # SGD's error on the PBRF
    "auto_cg": ("cg", "lissa_auto"),  # LiSSA's solver error once C is measured
}


def score_table(tasks: list[tuple[Task, Scores]]) -> pd.DataFrame:
    """Return all scores: columns task, point, test, lissa_0.., pbrf_0.., cg, exact, lissa_auto.

    Cells are empty where a score was not computed.
    """
    frames = []
    for task, scores in tasks:
        num_seeds, num_test, num_points = scores.lissa.shape
        columns: dict[str, object] = {
            "task": task.name,
            "point": scores.point_indices.repeat_interleave(num_test).numpy(),
            "test": scores.test_indices.repeat(num_points).numpy(),
        }
        for seed in range(num_seeds):
            columns[f"lissa_{seed}"] = scores.lissa[seed].T.reshape(-1).numpy()
        for seed in range(num_seeds):
            columns[f"pbrf_{seed}"] = scores.pbrf[seed].T.reshape(-1).numpy()
        for name in ("cg", "exact", "lissa_auto"):
            found = getattr(scores, name)
            missing = torch.full((num_test, num_points - found.shape[1]), torch.nan, dtype=torch.float64)
            columns[name] = torch.cat([found, missing], 1).T.reshape(-1).numpy()
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def panel_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return Pearson, slope and case of every comparison for each (task, point, seed), in the table's order.

    Stochastic methods are compared seed by seed (LiSSA's and SGD's batches are independent); one that has no
    repetitions stands under seed 0 only.
    """
    rows = []
    for task, of_task in table.groupby("task", sort=False):
        seeds = [str(name).removeprefix("lissa_") for name in of_task if re.fullmatch(r"lissa_\d+", str(name))]
        seeds = [seed for seed in seeds if of_task[f"pbrf_{seed}"].notna().any()]
        scale = _typical_size(of_task)
        for position, (point, panel) in enumerate(of_task.groupby("point", sort=False)):
            for seed in seeds:
                row: dict[str, object] = {"task": task, "position": position, "point": point, "seed": int(seed)}
                for name, (x, y) in COMPARISONS.items():
                    columns = [_column(method, seed) for method in (x, y)]
                    if not np.isfinite(panel[columns]).all(axis=None) or (
                        int(seed) > 0 and not {x, y} & {"lissa", "pbrf"}
                    ):
                        continue
                    found = agreement(*(torch.tensor(panel[c].to_numpy()) for c in columns), scale=scale)
                    row |= {
                        f"{name}_pearson": found.pearson,
                        f"{name}_slope": found.slope,
                        f"{name}_case": found.case,
                    }
                    row[f"{name}_error"] = found.relative_error
                # Overflow is what happens to one LiSSA result of the paper's Fig. 6.
                rows.append({"lissa_pbrf_case": "overflow"} | row)
    return pd.DataFrame(rows)


def summary_table(tasks: list[tuple[Task, Scores]], panels: pd.DataFrame) -> pd.DataFrame:
    """Return one row a task: size, spectrum, settings, and how well the methods agree (median over points)."""
    rows = []
    for task, scores in tasks:
        own = panels[panels.task == task.name]
        row: dict[str, object] = {
            "task": task.name,
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
                row[f"{quantity} {x}-{y}"] = median_over_points(own, f"{name}_{quantity}")
        counts = own.lissa_pbrf_case.value_counts()
        for case in ("agree", "both near zero", "apart", "overflow"):
            row[case] = counts.get(case, 0) / max(len(own), 1)
        row["LiSSA longer than any solution"] = float((scores.lengths > 1).double().mean())
        row["C measured"] = scores.constant
        row["CG residual"] = scores.residuals["cg"]
        row["PBRF gradient norm"] = scores.residuals["newton"]
        rows.append(row)
    return pd.DataFrame(rows)


def point_means(panels: pd.DataFrame, column: str) -> np.ndarray:
    """Return the mean over seeds of a panel quantity for each point that has it, (K,)."""
    if column not in panels:
        return np.zeros(0)
    return panels.groupby("position")[column].mean().dropna().to_numpy()


def median_over_points(panels: pd.DataFrame, column: str) -> float:
    """Return the median over points of the mean over seeds; nan without any."""
    values = point_means(panels, column)
    return float(np.median(values)) if len(values) else float("nan")


def _typical_size(table: pd.DataFrame) -> float:
    """Return the median root mean square of the points' exact scores.

    Zero where nothing is solved exactly: scores that may have diverged do not tell what is near zero, so that no
    panel is called so.
    """
    solved = table[table.cg.notna()]
    return 0.0 if solved.empty else median_rms(_matrix(solved, "cg"))


def _column(method: str, seed: str) -> str:
    return f"{method}_{seed}" if method in ("lissa", "pbrf") else method


def _matrix(table: pd.DataFrame, column: str) -> torch.Tensor:
    num_points = table.point.nunique()
    return torch.tensor(table[column].to_numpy()).reshape(num_points, -1).T
