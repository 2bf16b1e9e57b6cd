"""How much a quantity varies between settings, beyond what another seed changes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import optimize, stats

from curvlab.lab import Claim, ClaimResult, Interval, judge, out_of_reach

GRID = ["decay", "rank"]


def between_cells(table: pd.DataFrame, column: str, cell: list[str]) -> tuple[float, Interval]:
    """Return the standard deviation between the cells' expected values, with its 95 % interval.

    The range of k cells grows with k and with the noise of single runs. Here the noise is taken off: with M_c
    and M_e the mean squares between cells and of what neither cell nor seed explains (analysis of variance of k
    cells and S seeds, one run each), the value is sqrt((M_c - M_e) / S), 0 where that is negative. The interval
    is of the non-centrality of F = M_c / M_e, at the M_e found. Cells that lack a seed are left out.

    Args:
        table: one row for each cell and seed.
        column: the quantity.
        cell: columns that make a cell.

    Raises:
        ValueError: fewer than two cells or seeds.
    """
    values = table.pivot_table(index=cell, columns="seed", values=column, dropna=True).dropna().to_numpy()
    count, seeds = values.shape
    if min(values.shape) < 2:
        raise ValueError(f"need two cells and two seeds, got {count} and {seeds}")
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    freedom = (count - 1, (count - 1) * (seeds - 1))
    between, noise = seeds * values.mean(1).var(ddof=1), float((rest**2).sum()) / freedom[1]
    value = float(np.sqrt(max(0.0, between - noise) / seeds))
    kind = f"F 95 %, {count} settings, {seeds} seeds"
    if noise <= 1e-12 * between:
        return value, Interval(value, value, kind, seeds)
    ends = (
        np.sqrt(_noncentrality(between / noise, *freedom, p) * noise / seeds / freedom[0]) for p in (0.975, 0.025)
    )
    low, high = map(float, ends)
    return value, Interval(min(low, value), max(high, value), kind, seeds)


def judge_variation(claim: Claim, grid: pd.DataFrame, column: str, why: str) -> ClaimResult:
    """Judge the standard deviation between the cells of the grid of decay and rank."""
    value, interval = between_cells(grid, column, GRID)
    return judge(claim, value, interval, if_not_reproduced=why)


def judge_dampings(claim: Claim, table: pd.DataFrame, column: str, by_damping: str) -> ClaimResult:
    """Judge the standard deviation between dampings, never clipped, less that between the cells of the grid."""
    swept, grid = table[table.sweep == "damping"], table[table.sweep == "grid"]
    if swept.damping.nunique() < 2:
        return out_of_reach(claim, "Fewer than two dampings were tried without clipping.")
    (first, one), (second, other) = between_cells(swept, column, ["damping"]), between_cells(grid, column, GRID)
    interval = Interval(one.low - other.high, one.high - other.low, f"ends of both, {one.kind}", one.num_samples)
    diverged = swept[swept.diverged.astype(bool)].damping.unique()
    lost = f" Seeds diverged at {', '.join(f'{damping:g}' for damping in diverged)}." if len(diverged) else ""
    edges = swept[swept.at_edge.astype(bool)].damping.unique()
    cut = (
        f" The best rate lies at the edge of those tried at {', '.join(f'{d:g}' for d in edges)}."
        if len(edges)
        else ""
    )
    why = f"{by_damping} Between dampings {first:.3g}, between cells of the grid {second:.3g}.{lost}{cut}"
    return judge(claim, first - second, interval, if_not_reproduced=why)


def _noncentrality(ratio: float, between: int, within: int, probability: float) -> float:
    """Return the non-centrality at which F is at most `ratio` with this probability; 0 if there is none."""

    def excess(noncentrality: float) -> float:
        return float(stats.ncf.cdf(ratio, between, within, noncentrality)) - probability

    if stats.f.cdf(ratio, between, within) <= probability:
        return 0.0
    upper = 1.0 + between * ratio
    while excess(upper) > 0:
        upper *= 2
    return float(optimize.brentq(excess, 1e-9, upper))
