"""Ginger over decay and rank, the other settings as tuned; and over damping, which the paper does not vary.

Computed once for tables 3 and 4, of which one shows the accuracy and the other the training loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from omegaconf import DictConfig
from scipy import optimize, stats

from curvlab.lab import Claim, ClaimResult, Interval, Run, judge, out_of_reach, panels, plots
from experiments.ginger.race import RaceTask, final_run, summarised
from experiments.ginger.tuning import Racer, load_racers
from experiments.shared.stats import geometric_mean

PAPER = {
    "tasks": ["ResNet-18 on CIFAR-100"],
    "num_epochs": 200,
    "batch_size": 128,
    "decays": [0.9, 0.99, 0.999],
    "grid_ranks": [2, 4, 8],
    "seeds": "not stated",
    "table.csv:damping": "not stated, not varied; 1e-5 in the published code",
}  # settings of Tables 3 and 4, beside ours
CELL = ("task", "sweep", "decay", "rank", "damping", "clip")
GRID = ["decay", "rank"]
GRIDS = {"published": "ginger_published", "grid": "ginger"}  # sweeps over decay and rank, and their racers
DAMPING_SWEEPS = {"damping": None, "damping, clipped": 1.0}  # and the bound on each entry of the direction


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each cell and seed, and `summary`, over seeds.

    The sweep `published` is Ginger with the published damping and clip, its learning rate tuned, `grid` has the
    settings that ginger-tab1 tunes, both at its rank and decay. Each damping tunes its learning rate, at this rank
    and decay, as a racer does: where the update is clipped among the rates of the race, elsewhere
    lr/γ among `rates_over_damping`, since that is the step outside the rows of U. A row says whether the rate lies
    `at_edge` of those tried.

    Reads what ginger-tab1 reads, and `decays`, `grid_ranks`, `published_seeds`, `dampings`, `clipped_dampings`,
    `rates_over_damping`.
    """
    rows = []
    for task in RaceTask.each(run, cfg):
        for sweep, racer, optimizer, edge in _cells(task):
            shown = {name: optimizer[name] for name in ("decay", "rank", "damping", "clip", "lr")}
            place = {"task": task.label, "sweep": sweep, **shown, "at_edge": edge}
            seeds = task.settings.published_seeds if sweep == "published" else task.settings.seeds
            rows += [place | final_run(task, racer, optimizer, seed=seed)[0] for seed in seeds]
    table = pd.DataFrame(rows)
    run.note(seeds=list(cfg.seeds))
    return {"table": table, "summary": summarised(table, by=CELL, constant=("lr", "at_edge"))}


def _cells(task: RaceTask) -> Iterator[tuple[str, Racer, Mapping[str, Any], bool]]:
    """Yield sweep, racer, the optimizer's settings, and whether its rate is at the edge of those tried."""
    settings = task.settings
    racers = load_racers(settings)
    for sweep, name in GRIDS.items():
        racer, tuned = racers[name], task.tune(racers[name])
        for decay in settings.decays:
            for rank in settings.grid_ranks:
                yield sweep, racer, racer.with_rank(rank, **tuned.chosen) | {"decay": decay}, tuned.at_edge
    ginger = racers["ginger"]
    for sweep, clip in DAMPING_SWEEPS.items():
        for damping in settings.dampings if clip is None else settings.clipped_dampings:
            racer = replace(ginger, candidates=({"damping": damping, "clip": clip},))
            tuned = task.tune(racer)
            yield sweep, racer, racer.with_rank(settings.tuned_rank, **tuned.chosen), tuned.at_edge


def without_diverged(table: pd.DataFrame) -> pd.DataFrame:
    """Return the cells at which no seed diverged."""
    return table[~table.groupby(list(CELL), dropna=False).diverged.transform("any").astype(bool)]


# ------------------------------------------------------------------------------------ judge
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
    means, noise, freedom, seeds = _analysed(table, column, cell)
    kind = f"F 95 %, {len(means)} settings, {seeds} seeds"
    return _beyond(means, noise / seeds, freedom, Interval(0, 0, kind, seeds))


def between_printed(
    printed: ArrayLike, table: pd.DataFrame, column: str, cell: list[str]
) -> tuple[float, Interval]:
    """Return the same of a paper's cells of single runs, with the noise M_e of a single run of ours taken off.

    The forecast is the interval of cells that noise alone parts.
    """
    _, noise, freedom, seeds = _analysed(table, column, cell)
    values = np.asarray(printed, dtype=float)
    kind = f"F 95 %, {len(values)} printed settings, noise of {seeds} seeds of ours"
    forecast = (0.0, _end(1.0, noise, (len(values) - 1, freedom), 0.025))
    return _beyond(values, noise, freedom, Interval(0, 0, kind, seeds, forecast))


def _analysed(table: pd.DataFrame, column: str, cell: list[str]) -> tuple[np.ndarray, float, int, int]:
    """Return the cells' means over seeds, M_e, its degrees of freedom, and the number of seeds."""
    values = table.pivot_table(index=cell, columns="seed", values=column, dropna=True).dropna().to_numpy()
    count, seeds = values.shape
    if min(values.shape) < 2:
        raise ValueError(f"need two cells and two seeds, got {count} and {seeds}")
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    freedom = (count - 1) * (seeds - 1)
    return values.mean(1), float((rest**2).sum()) / freedom, freedom, seeds


def _beyond(means: np.ndarray, noise: float, freedom: int, interval: Interval) -> tuple[float, Interval]:
    """Return the standard deviation of `means` beyond their `noise`, a variance, with its ends in `interval`."""
    found, own = float(means.var(ddof=1)), len(means) - 1
    value = float(np.sqrt(max(0.0, found - noise)))
    if noise <= 1e-12 * found:
        return value, replace(interval, low=value, high=value)
    low, high = (_end(found / noise, noise, (own, freedom), probability) for probability in (0.975, 0.025))
    return value, replace(interval, low=min(low, value), high=max(high, value))


def _end(ratio: float, noise: float, freedom: tuple[int, int], probability: float) -> float:
    """Return the standard deviation beyond the noise at which F is at most `ratio` with this probability."""
    return float(np.sqrt(_noncentrality(ratio, *freedom, probability) * noise / freedom[0]))


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


def judge_regime(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    """Judge the smallest loss of a batch, its log10 in `log`: geometric mean over the published grid and seeds."""
    grid = table[table.sweep == "published"]
    losses = 10 ** grid.groupby("seed").log.mean()
    why = "Above it, train for longer; far below the paper's losses float32's rounding sets what they read."
    return judge(claim, *geometric_mean(losses), if_not_reproduced=why)


def judge_grid(
    claim: Claim, table: pd.DataFrame, sweep: str, column: str, text: str, *, scale: float = 1
) -> ClaimResult:
    """Judge the standard deviation between the cells of a grid; `text` names its ends, times `scale`."""
    grid = table[table.sweep == sweep]
    means = scale * grid.groupby(GRID)[column].mean()
    ends = {"low": means.min(), "high": means.max()}
    cells = {"at_low": _named(means.idxmin()), "at_high": _named(means.idxmax())}
    return judge(claim, *between_cells(grid, column, GRID), if_not_reproduced=text.format(**ends, **cells))


def _named(cell: Any) -> str:
    return "decay {:g}, rank {:g}".format(*cell)


def judge_dampings(claim: Claim, table: pd.DataFrame, column: str, text: str, *, scale: float = 1) -> ClaimResult:
    """Judge the standard deviation between dampings, never clipped, less that between the cells of the grid.

    `text` is of one damping, its value times `scale`: "{value:.3g} at {damping:g}".
    """
    swept, grid = table[table.sweep == "damping"], table[table.sweep == "grid"]
    if swept.damping.nunique() < 2:
        return out_of_reach(claim, "Fewer than two dampings were tried without clipping.")
    (first, one), (second, other) = between_cells(swept, column, ["damping"]), between_cells(grid, column, GRID)
    interval = Interval(one.low - other.high, one.high - other.low, f"ends of both, {one.kind}", one.num_samples)
    means = (scale * swept.groupby("damping")[column].mean()).items()
    listed = ", ".join(text.format(damping=damping, value=value) for damping, value in means)
    why = f"Over dampings: {listed}. Between dampings {first:.3g}, between cells of the grid {second:.3g}."
    for flag, says in (("diverged", "Seeds diverged at"), ("at_edge", "The rate is at the edge at")):
        if len(at := swept[swept[flag].astype(bool)].damping.unique()):
            why += f" {says} {', '.join(f'{damping:g}' for damping in at)}."
    return judge(claim, first - second, interval, if_not_reproduced=why)


# ------------------------------------------------------------------------------------ draw


def draw_sensitivity(
    table: pd.DataFrame,
    printed: pd.DataFrame,
    *,
    label: str,
    label_of_dampings: str,
    width: float,
    note: str = "",
) -> dict[str, Figure]:
    """Return the figures: our grids of the first task beside the paper's, in colours of equal width; and dampings.

    Both tables have the quantity as `value`; of ours that of the dampings is `of_dampings`. The colours span
    `width` at least, so that noise does not look like an effect, and all tables' cells, so that none is off the
    scale. `note` is said below them.
    """
    grids, (axes,) = plots.figure(1, 3, panel_size=(3.2, 3.2))
    first = table[table.task == table.task.iloc[0]]
    shown = {
        f"ours, as published:\n{first.task.iloc[0]}": first[first.sweep == "published"],
        f"ours, tuned:\n{first.task.iloc[0]}": first[first.sweep == "grid"],
        "printed:\nResNet-18, CIFAR-100": printed,
    }
    ends = {title: cells.groupby(GRID).value.mean().agg(["min", "max"]) for title, cells in shown.items()}
    width = max(width, *(np.ceil(10 * np.ptp(own)) / 10 for own in ends.values()))
    for ax, (title, cells) in zip(axes, shown.items(), strict=True):
        limits = (ends[title].mean() - width / 2, ends[title].mean() + width / 2)
        panels.heat_map(ax, cells, x="rank", y="decay", value="value", text="{:.2f}", limits=limits)
        panels.frame(ax, x="rank τ", y="decay α", title=title)
    seeds = first[first.sweep.isin(GRIDS)].groupby("sweep").seed.nunique()
    spread = [own.groupby(GRID).value.mean().std() for own in shown.values()]
    said = f"{label}; ours: mean over {panels.seeds(seeds)}; printed: single runs; colours of all span {width:g}"
    said += f"\nstandard deviation of the cells, with the seeds' noise: as published {spread[0]:.2g}, tuned "
    said += f"{spread[1]:.2g}; printed {spread[2]:.2g}.{note}"
    panels.legend(grids, title=said, axes=[])
    swept, rows = panels.rows(table, by="task", columns=1, panel_size=(6.5, 3.4))
    for (ax,), task, own in rows:
        _draw_dampings(ax, own.assign(value=own.of_dampings), label_of_dampings)
        ax.set_title(task)
    panels.legend(
        swept, title=f"mean over {panels.seeds([first.seed.nunique()])}, band: 95 % t interval", columns=3
    )
    return {"figure.png": grids, "figure_more.png": swept}


def _draw_dampings(ax: Axes, table: pd.DataFrame, label: str) -> None:
    own = without_diverged(table[table.sweep.isin(DAMPING_SWEEPS)])
    own = own.assign(sweep=own.sweep.map({"damping": "never clipped", "damping, clipped": "clipped at 1"}))
    panels.lines(ax, own, x="damping", y="value", by="sweep")
    grid = table[table.sweep == "grid"].groupby(GRID).value.mean()
    ax.axhspan(grid.min(), grid.max(), color=panels.GREY, alpha=0.25, linewidth=0, label="range of the tuned grid")
    swept = table[table.sweep.isin(DAMPING_SWEEPS)]
    edge = swept[swept.at_edge.astype(bool)].groupby(["sweep", "damping"]).value.mean().dropna().reset_index()
    if len(edge):
        ring: dict[str, Any] = {"s": 90, "facecolors": "none", "edgecolors": "black", "linewidths": 0.8}
        ax.scatter(edge.damping, edge.value, label="rate at the edge of those tried", **ring)
    lost = swept[swept.diverged.astype(bool)]
    if len(lost):  # at the lower edge: where they ended would squeeze the others
        cross: dict[str, Any] = {"s": 40, "marker": "x", "color": "black", "clip_on": False}
        at_foot = ax.get_xaxis_transform()
        ax.scatter(lost.damping, np.full(len(lost), 0.02), transform=at_foot, label="a seed diverged", **cross)
    panels.frame(ax, x="damping γ, each with its own rate", y=label, log="x")
