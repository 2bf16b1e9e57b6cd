"""Panels of lissa-fig1: one comparison of two scores for each choice of batches, point and seed; what they say.

All points of a run share its batches, so that points alone say nothing about the next run; and a panel compares
LiSSA of one run with SGD on the next one's batches, so that each run is in two panels. `over_runs` sees both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import t as student
from torch import Tensor

from curvlab.influence import agreement
from curvlab.lab import Interval, bootstrap_interval
from curvlab.lab.claims.intervals import MIN_SAMPLES
from experiments.lissa.constant_bounds import UNSATURATED_LOSS
from experiments.lissa.fig1.lissa_and_pbrf import Pairs
from experiments.shared.stats import jackknife_error
from experiments.shared.systems import Systems

# Prefix of the columns, and the name in tables.
CHOICES = {"": "C = 2", "measured_": "C measured", "importance_": "C = 2, by importance"}
COMPARISONS = (
    "lissa_pbrf",  # the paper's figure: SGD on batches of its own, those of the next seed
    "same_batches",  # SGD on LiSSA's batches: what is left is where they part
    "lissa_cg",  # LiSSA's solver error
    "pbrf_exact",  # SGD's error on the PBRF
    "cg_exact",  # linearisation error
)
ASSUMED, MEASURED, _ = CHOICES.values()
REGIMES = ("unsaturated", "saturated")
Statistic = Callable[[np.ndarray], float]


# ------------------------------------------------------------------------------------ tables
def panel_rows(
    task: str, constant: str, pairs: Pairs, points: Tensor, exact: dict[str, Tensor], *, scale: float
) -> list[dict[str, Any]]:
    """Return every comparison for each point and seed with one choice of batches.

    Columns task, constant (of `CHOICES`), position, point, seed. Of each comparison Pearson, slope, case, error.
    `lissa_overflow` and `pbrf_overflow`: not finite, each for itself. Of LiSSA: `lissa_length`, ‖x‖ damping / ‖g‖.
    Of the SGD that lissa_pbrf compares (the next seed's): `parted_step`, where it leaves LiSSA on its batches (0:
    never), and `length_at_parting`, ‖x_t‖ damping / ‖g‖ of that LiSSA there. `cg_exact` stands under seed 0 alone.

    Args:
        task: label.
        constant: the choice of batches, see `CHOICES`.
        pairs: both methods.
        points: (K,) places in the training set.
        exact: `cg` and `exact`, (M, K'') each, of the first K'' points; K'' may be 0.
        scale: what tells scores near zero, see `curvlab.influence.agreement`.
    """
    rows = []
    num_seeds, _, num_points = pairs.lissa.shape
    parted, lengths = pairs.parted, pairs.lissa_lengths
    for position in range(num_points):
        solved = {name: own[:, position] for name, own in exact.items() if position < own.shape[1]}
        for seed in range(num_seeds):
            other = (seed + 1) % num_seeds
            lissa, pbrf = pairs.lissa[seed, :, position], pairs.pbrf[seed, :, position]
            step = int(parted[other, position])
            row: dict[str, Any] = {
                "task": task,
                "constant": constant,
                "position": position,
                "point": int(points[position]),
                "seed": seed,
                "lissa_length": float(lengths[seed, -1, position]),
                "lissa_overflow": not bool(lissa.isfinite().all()),
                "pbrf_overflow": not bool(pbrf.isfinite().all()),
                "parted_step": step,
                "length_at_parting": float(lengths[other, step - 1, position]) if step else math.nan,
            }
            sides = {
                "lissa_pbrf": (lissa, pairs.pbrf[other, :, position]),
                "same_batches": (lissa, pbrf),
                "lissa_cg": (solved.get("cg"), lissa),
                "pbrf_exact": (solved.get("exact"), pbrf),
                "cg_exact": (solved.get("cg"), solved.get("exact")),
            }
            for name in COMPARISONS:
                if name != "cg_exact" or (constant == CHOICES[""] and seed == 0):
                    row |= _compared(name, *sides[name], scale=scale)
            rows.append(row)
    return rows


def _compared(name: str, x: Tensor | None, y: Tensor | None, *, scale: float) -> dict[str, Any]:
    """Return Pearson, slope, case, error; case "overflow" where one is not finite, nothing without a solution."""
    if x is None or y is None:
        return {}
    if not bool(x.isfinite().all() and y.isfinite().all()):
        return {f"{name}_case": "overflow"}
    found = agreement(x, y, scale=scale)
    measured = {"pearson": found.pearson, "slope": found.slope, "case": found.case, "error": found.relative_error}
    return {f"{name}_{quantity}": value for quantity, value in measured.items()}


def score_table(points: Tensor, test: Tensor, scores: dict[str, Tensor]) -> pd.DataFrame:
    """Return all scores of one task, one row for each (point, test point), to four digits: what figures need.

    Columns point, test, lissa_0, pbrf_1, the same with measured_ and importance_ in front, cg, exact; nan where
    there is no score.

    Args:
        points: (K,) places in the training set.
        test: (M,) places in the test set.
        scores: (M, K') each, of the first K' points.
    """
    columns: dict[str, Any] = {
        "point": points.repeat_interleave(len(test)).numpy(),
        "test": test.repeat(len(points)).numpy(),
    }
    for name, own in scores.items():
        missing = torch.full((len(test), len(points) - own.shape[1]), torch.nan, dtype=torch.float64)
        values = torch.cat([own, missing], 1).T.reshape(-1).tolist()
        columns[name] = [float(f"{value:.4g}") for value in values]
    return pd.DataFrame(columns)


def summary_row(
    systems: Systems, spectrum: dict[str, float], pairs: dict[str, Pairs], panels: pd.DataFrame
) -> dict[str, Any]:
    """Return size, spectrum and settings of a task, and how well the methods agree (median over points)."""
    task, settings, own = systems.task, pairs[""].settings, pairs.get("measured_")
    row: dict[str, Any] = {
        "task": task.label,
        "P": task.num_parameters,
        "N": task.num_train,
        "train loss": task.train_loss,
        "regime": regime(task.train_loss),
        "test accuracy": task.test_accuracy,
        "points": len(systems.sources[1]),
        "test points": len(systems.tests[1]),
        "seeds": len(pairs[""].lissa),
        "tr(G)": spectrum["trace"],
        "tr(G) s.e.": spectrum["trace_stderr"],
        "lambda_max": spectrum["largest_eigenvalue"],
        "damping": systems.damping,
        "step size": settings.step_size,
        "batch size": settings.batch_size,
        "steps": settings.num_steps,
        "C measured, twice": own.constant if own else math.nan,
        "batch size with it": own.settings.batch_size if own else math.nan,
    }
    labels = {
        "lissa_pbrf": "lissa-pbrf",
        "same_batches": "lissa-pbrf, same batches",
        "lissa_cg": "cg-lissa",
        "pbrf_exact": "exact-pbrf",
    }
    for constant in CHOICES.values():
        of_choice = panels[panels.constant == constant]
        for name, label in labels.items():
            row[f"pearson {label}, {constant}"] = median(point_means(of_choice, f"{name}_pearson"))
        row |= {f"{case}, {constant}": share for case, share in case_shares(of_choice).items()}
    first = panels[panels.constant == ASSUMED]
    return row | {
        "slope lissa-pbrf, C = 2": median(point_means(first, "lissa_pbrf_slope")),
        "pearson cg-exact": median(point_means(first, "cg_exact_pearson")),
    }


def regime(train_loss: float) -> str:
    """Return whether a network of this training loss is in the paper's regime, or has fitted most examples."""
    return REGIMES[train_loss < UNSATURATED_LOSS]


def cell_table(panels: pd.DataFrame, summary: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each regime of training loss and choice of batches where there are networks.

    Pearson is the least over the cell's networks of the median over points, an overflow counted as -1, the least
    that a correlation can be; shares are of all its panels.
    """
    regimes, rows = panels.task.map(summary.set_index("task")["train loss"].map(regime)), []
    for name, constant in itertools.product(REGIMES, CHOICES.values()):
        own = panels[(regimes == name) & (panels.constant == constant)]
        if own.empty:
            continue
        row: dict[str, Any] = {
            "regime": name,
            "constant": constant,
            "networks": " ".join(own.task.unique()),
            "panels": len(own),
        }
        for comparison, label in (("lissa_pbrf", "other batches"), ("same_batches", "same batches")):
            row[f"pearson, {label}"] = min(
                median(point_means(counted_pearson(one, comparison), "counted")) for _, one in own.groupby("task")
            )
        rows.append(row | case_shares(own))
    return pd.DataFrame(rows)


def case_shares(own: pd.DataFrame) -> dict[str, float]:
    """Return the shares of the paper's cases among panels, of overflows, each for itself, and of non-solutions."""
    cases = own.get("lissa_pbrf_case", pd.Series(dtype=object))
    shares = {case: float((cases == case).mean()) for case in ("agree", "both near zero", "apart")}
    return shares | {
        "LiSSA overflow": own.lissa_overflow.mean(),
        "PBRF overflow": own.pbrf_overflow.mean(),
        "LiSSA longer than any solution": (~(own.lissa_length <= 1)).mean(),
    }


# ------------------------------------------------------------------------------------ statistics
def median(values: np.ndarray, axis: int | None = None) -> float:
    """Return the median, nan of nothing; with `axis` those of many samples."""
    return np.median(values, axis=axis) if len(values) else math.nan


def mean(values: np.ndarray, axis: int | None = None) -> float:
    """Return the mean; with `axis` those of many samples."""
    return np.mean(values, axis=axis)


def point_means(panels: pd.DataFrame, column: str) -> np.ndarray:
    """Return the mean over seeds of a panel quantity for each point that has it, (K,)."""
    if column not in panels:
        return np.zeros(0)
    return panels.groupby("position")[column].mean().dropna().to_numpy()


def counted_pearson(panels: pd.DataFrame, comparison: str) -> pd.DataFrame:
    """Return the panels with the column `counted`, the Pearson correlation, an overflow as -1."""
    pearson = panels.get(f"{comparison}_pearson", pd.Series(math.nan, panels.index))
    return panels.assign(counted=pearson.where(panels[f"{comparison}_case"] != "overflow", -1.0))


def over_runs(
    own: pd.DataFrame,
    column: str,
    statistic: Statistic,
    *,
    paired: bool,
    generator: np.random.Generator,
    within: tuple[float, float] = (-1.0, 1.0),
) -> tuple[float, Interval]:
    """Return a statistic of the points' means over runs, (K,) -> number, and where it lies.

    The half-width is √[(t_{n-1} s_runs)² + (1.96 s_points)²], s_runs from leaving out one of n runs with all
    panels that it is in (jackknife; for n = 3 panels of neighbouring runs it is twice what independent ones would
    have), s_points from drawing points again. Fewer than three runs decide nothing; of more, the forecast is from
    the first two (s_points is that of all). Where there is one run since every batch is all the data, points alone
    are drawn.

    Args:
        own: panels of one network and one choice of C: `position`, `seed` and the column, one row for each.
        column: which; points of which no panel has a value are left out.
        statistic: median, mean.
        paired: whether the panel of a seed is with the next seed's batches too.
        generator: draws points.
        within: what the quantity cannot leave.
    """
    panels = own.pivot_table(index="position", columns="seed", values=column, aggfunc="first", dropna=False)
    panels = panels.dropna(how="all")
    points, count = panels.mean(axis=1).to_numpy(), panels.shape[1]
    value = statistic(points)
    of_points = bootstrap_interval(points, statistic, unit="points", generator=generator)
    if count == 1:
        return value, of_points
    error = jackknife_error([_left_out(panels, run, statistic, paired=paired) for run in range(count)])
    spread = (of_points.high - of_points.low) / 2 if len(points) > 1 else 0.0
    kind = f"t 95 % over {count} seeds and {len(points)} points of one network"
    quantile = float(student.ppf(0.975, count - 1))
    low, high = _around(value, math.hypot(quantile * error, spread), within)
    forecast = None
    if count >= MIN_SAMPLES:
        first = np.array([statistic(panels.iloc[:, run].dropna().to_numpy()) for run in (0, 1)])
        if np.isfinite(first).all():
            of_runs = quantile * float(first.std(ddof=1)) / math.sqrt(count)
            forecast = _around(float(first.mean()), math.hypot(of_runs, spread), within)
    return value, Interval(low, high, kind, count, forecast)


def _around(value: float, half: float, within: tuple[float, float]) -> tuple[float, float]:
    return max(value - half, within[0]), min(value + half, within[1])


def _left_out(panels: pd.DataFrame, run: int, statistic: Statistic, *, paired: bool) -> float:
    """Return the statistic without the panels that a run is in."""
    count = panels.shape[1]
    touched = {run, (run - 1) % count} if paired else {run}
    kept = panels.iloc[:, [seed for seed in range(count) if seed not in touched]]
    points = kept.mean(axis=1).dropna().to_numpy()
    return statistic(points) if len(points) else math.nan


def panels_error(values: pd.Series) -> float:
    """Return the standard error of the mean of one point's panels by seed; nan with fewer than three."""
    panels, count = values.to_frame().T, len(values)
    return (
        jackknife_error([_left_out(panels, run, mean, paired=True) for run in range(count)])
        if count > 2
        else math.nan
    )
