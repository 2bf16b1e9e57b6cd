"""Fig. 1, tables: one row for each (point, test point); from them one for each panel, task and cell."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch

from curvlab.influence import agreement, median_rms
from experiments.lissa.fig1.paired import parting_steps
from experiments.lissa.fig1.records import Pairs, Scores
from experiments.shared.task import TrainedTask

# x, y of each comparison, and what it isolates. `lissa` and `pbrf` have a run for each seed, on the same batches.
COMPARISONS = {
    "lissa_pbrf": ("lissa", "pbrf"),  # the paper's figure: SGD on batches of its own, those of the next seed
    "same_batches": ("lissa", "pbrf"),  # SGD on LiSSA's batches: what is left is where they part
    "lissa_cg": ("cg", "lissa"),  # LiSSA's solver error
    "pbrf_exact": ("exact", "pbrf"),  # SGD's error on the PBRF
    "cg_exact": ("cg", "exact"),  # linearisation error
}
SOLVED = ("cg", "exact")  # not for every point
# Prefix of the columns, and the column of the 2 x 2; the third is ours and stands beside it.
CHOICES = {"": "C = 2", "measured_": "C measured", "importance_": "C = 2, by importance"}
EARLY_LOSS = 0.5  # training loss from which a network counts as stopped early: the paper's ResNet-18 is near 1


def choices(scores: Scores) -> dict[str, Pairs | None]:
    """Return the runs of each choice by the prefix of its columns."""
    return {"": scores.assumed, "measured_": scores.measured, "importance_": scores.importance}


def score_table(scores: Scores) -> pd.DataFrame:
    """Return all scores of one task, one row for each (point, test point).

    Columns point, test, lissa_0.., pbrf_0.., the same with measured_ and importance_ in front, cg, exact; nan
    where there is no score.
    """
    num_test, num_points = len(scores.test_indices), len(scores.point_indices)
    columns: dict[str, object] = {
        "point": scores.point_indices.repeat_interleave(num_test).numpy(),
        "test": scores.test_indices.repeat(num_points).numpy(),
    }
    found = {}
    for prefix, pairs in choices(scores).items():
        for method in ("lissa", "pbrf") if pairs is not None else ():
            for seed, own in enumerate(getattr(pairs, method)):
                found[f"{prefix}{method}_{seed}"] = own
    for name, own in (found | {"cg": scores.cg, "exact": scores.exact}).items():
        missing = torch.full((num_test, num_points - own.shape[1]), torch.nan, dtype=torch.float64)
        columns[name] = torch.cat([own, missing], 1).T.reshape(-1).numpy()
    return pd.DataFrame(columns)


def rounded(table: pd.DataFrame, digits: int = 4) -> pd.DataFrame:
    """Return the table with so many significant digits: all that figures need, and small files."""
    return table.map(lambda value: float(f"{value:.{digits}g}") if isinstance(value, float) else value)


def panel_table(task: str, table: pd.DataFrame, scores: Scores) -> pd.DataFrame:
    """Return every comparison for each choice of C, point and seed of a task, in the table's order.

    Columns task, constant (of `CHOICES`), position, point, seed. Of each comparison Pearson, slope, case, error.
    `lissa_overflow` and `pbrf_overflow`: not finite, each for itself. Of LiSSA: `lissa_length`, ‖x‖ damping / ‖g‖.
    Of the SGD that lissa_pbrf compares (the next seed's): `parted_step`, where it leaves LiSSA on its batches (0:
    never), and `length_at_parting`, ‖x_t‖ damping / ‖g‖ of that LiSSA there. `cg_exact` stands under seed 0 alone.
    """
    rows, scale = [], _typical_size(table)
    for prefix, pairs in choices(scores).items():
        if pairs is None:
            continue
        num_seeds, _, num_points = pairs.lissa.shape
        parted = [parting_steps(pairs.lissa_lengths[seed], pairs.distances[seed]) for seed in range(num_seeds)]
        for position, (point, panel) in enumerate(table.groupby("point", sort=False)):
            if position >= num_points:
                break
            for seed in range(num_seeds):
                other = (seed + 1) % num_seeds
                step = int(parted[other][position])
                row: dict[str, object] = {
                    "task": task,
                    "constant": CHOICES[prefix],
                    "position": position,
                    "point": point,
                    "seed": seed,
                    "lissa_length": float(pairs.lissa_lengths[seed, -1, position]),
                    "lissa_overflow": not np.isfinite(panel[f"{prefix}lissa_{seed}"]).all(),
                    "pbrf_overflow": not np.isfinite(panel[f"{prefix}pbrf_{seed}"]).all(),
                    "parted_step": step,
                    "length_at_parting": float(pairs.lissa_lengths[other, step - 1, position])
                    if step
                    else math.nan,
                }
                columns = {"lissa": f"{prefix}lissa_{seed}", "cg": "cg", "exact": "exact"}
                for name, (x, y) in COMPARISONS.items():
                    if name == "cg_exact" and (prefix or seed):
                        continue
                    columns["pbrf"] = f"{prefix}pbrf_{other if name == 'lissa_pbrf' else seed}"
                    row |= _compared(panel[[columns[x], columns[y]]], name, scale)
                rows.append(row)
    return pd.DataFrame(rows)


def _compared(values: pd.DataFrame, name: str, scale: float) -> dict[str, object]:
    """Return Pearson, slope, case and error of one comparison; case "overflow" where either is not finite.

    Nothing where a solution is missing; a run may overflow to NaN everywhere.
    """
    if values[values.columns.intersection(list(SOLVED))].isna().all().any():
        return {}
    if not np.isfinite(values).all(axis=None):
        return {f"{name}_case": "overflow"}
    found = agreement(*(torch.tensor(values.iloc[:, side].to_numpy()) for side in (0, 1)), scale=scale)
    return {
        f"{name}_pearson": found.pearson,
        f"{name}_slope": found.slope,
        f"{name}_case": found.case,
        f"{name}_error": found.relative_error,
    }


def summary_row(task: TrainedTask, scores: Scores, panels: pd.DataFrame) -> dict[str, object]:
    """Return size, spectrum and settings of a task, and how well the methods agree (median over points)."""
    row: dict[str, object] = {
        "task": task.label,
        "P": task.num_parameters,
        "N": task.num_train,
        "train loss": task.train_loss,
        "regime": regime(task.train_loss),
        "test accuracy": task.test_accuracy,
        "points": len(scores.point_indices),
        "test points": len(scores.test_indices),
        "seeds": scores.assumed.lissa.shape[0],
        "tr(G)": scores.spectrum["trace"],
        "tr(G) s.e.": scores.spectrum["trace_stderr"],
        "lambda_max": scores.spectrum["largest_eigenvalue"],
        "damping": scores.damping,
        "step size": scores.assumed.settings.step_size,
        "batch size": scores.assumed.settings.batch_size,
        "steps": scores.assumed.settings.num_steps,
        "C measured, twice": scores.measured.constant if scores.measured else math.nan,
        "batch size with it": scores.measured.settings.batch_size if scores.measured else math.nan,
    }
    for constant in CHOICES.values():
        own = panels[panels.constant == constant]
        for name, label in (
            ("lissa_pbrf", "lissa-pbrf"),
            ("same_batches", "lissa-pbrf, same batches"),
            ("lissa_cg", "cg-lissa"),
            ("pbrf_exact", "exact-pbrf"),
        ):
            row[f"pearson {label}, {constant}"] = median(point_means(own, f"{name}_pearson"))
        row |= {f"{case}, {constant}": share for case, share in case_shares(own).items()}
    first = panels[panels.constant == CHOICES[""]]
    return row | {
        "slope lissa-pbrf, C = 2": median(point_means(first, "lissa_pbrf_slope")),
        "pearson cg-exact": median(point_means(first, "cg_exact_pearson")),
        "CG residual": scores.residuals["cg"],
        "PBRF gradient norm": scores.residuals["newton"],
    }


def cell_table(panels: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    """Return the 2 x 2, fitted or early and C = 2 or measured, a third column: rows where there are networks.

    Pearson is the least over the cell's networks of the median over points, an overflow counted as -1, the least
    that a correlation can be; shares are of all its panels.
    """
    regimes = panels.task.map(summary.set_index("task").regime)
    rows = []
    for name in ("early", "fitted"):
        for constant in CHOICES.values():
            own = panels[(regimes == name) & (panels.constant == constant)]
            if own.empty:
                continue
            row: dict[str, object] = {
                "regime": name,
                "constant": constant,
                "networks": " ".join(own.task.unique()),
                "panels": len(own),
            }
            for comparison, label in (("lissa_pbrf", "other batches"), ("same_batches", "same batches")):
                row[f"pearson, {label}"] = min(
                    median(counted_point_means(one, comparison)) for _, one in own.groupby("task")
                )
            rows.append(row | case_shares(own))
    return pd.DataFrame(rows)


def case_shares(own: pd.DataFrame) -> dict[str, float]:
    """Return the shares of the paper's cases among panels, of overflows, each for itself, and of non-solutions."""
    cases = own.get("lissa_pbrf_case", pd.Series(dtype=object))
    shares = {case: float((cases == case).mean()) for case in ("agree", "both near zero", "apart")}
    return shares | {
        "LiSSA overflow": float(own.lissa_overflow.mean()) if len(own) else math.nan,
        "PBRF overflow": float(own.pbrf_overflow.mean()) if len(own) else math.nan,
        "LiSSA longer than any solution": float((~(own.lissa_length <= 1)).mean()) if len(own) else math.nan,
    }


def regime(train_loss: float) -> str:
    """Return whether a network of this training loss counts as stopped early, or as fitted."""
    return "early" if train_loss >= EARLY_LOSS else "fitted"


def median(values: np.ndarray) -> float:
    """Return the median, nan of nothing."""
    return float(np.median(values)) if len(values) else math.nan


def point_means(panels: pd.DataFrame, column: str) -> np.ndarray:
    """Return the mean over seeds of a panel quantity for each point that has it, (K,)."""
    if column not in panels:
        return np.zeros(0)
    return panels.groupby("position")[column].mean().dropna().to_numpy()


def counted_point_means(panels: pd.DataFrame, comparison: str) -> np.ndarray:
    """Return the mean over seeds of the Pearson correlation for each point, an overflow counted as -1, (K,)."""
    return point_means(counted_pearson(panels, comparison), "counted")


def counted_pearson(panels: pd.DataFrame, comparison: str) -> pd.DataFrame:
    """Return the panels with the column `counted`, the Pearson correlation, an overflow as -1."""
    pearson = panels.get(f"{comparison}_pearson", pd.Series(math.nan, panels.index))
    return panels.assign(counted=pearson.where(panels[f"{comparison}_case"] != "overflow", -1.0))


def coinciding(summary: pd.DataFrame) -> list[str]:
    """Return the tasks whose |B| with C measured is that of C = 2, C being below 1: the same runs twice."""
    sizes = ("batch size", "batch size with it")
    if not set(sizes) <= set(summary.columns):
        return []
    return summary.task[summary[sizes[0]] == summary[sizes[1]]].tolist()


def _typical_size(table: pd.DataFrame) -> float:
    """Return the median root mean square of the points' exact scores.

    Zero where nothing is solved exactly: scores that may have diverged do not tell what is near zero, so that no
    panel is called so.
    """
    solved = table[table.cg.notna()]
    return 0.0 if solved.empty else median_rms(_matrix(solved, "cg"))


def _matrix(table: pd.DataFrame, column: str) -> torch.Tensor:
    num_points = table.point.nunique()
    return torch.tensor(table[column].to_numpy()).reshape(num_points, -1).T
