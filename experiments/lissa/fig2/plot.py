"""Fig. 2, plot: the paper's heat maps with curves, and the panel on recipes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

RECIPES = {"paper": "C = 2", "auto": "C measured", "importance": "C = 2, by importance"}
COLORS = dict(zip(RECIPES, (1, 0, 2), strict=True))


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures by file name; each where a task is in it."""
    figures, table, recipes = {}, computed["table"], computed["recipes"]
    if not table.empty:
        figures["figure.png"] = _heat_maps(table, computed["between_steps"])
    if not recipes.empty:
        figures["figure_recipes.png"] = _recipes(recipes)
    return figures


def _heat_maps(table: pd.DataFrame, between: pd.DataFrame) -> Figure:
    """Draw a row for each task: correlation between steps for each batch size, and with the exact solution."""
    tasks = table.task.unique().tolist()
    num_sizes = max(table[table.task == task].batch_size.nunique() for task in tasks)
    figure, axes = plots.figure(len(tasks), num_sizes + 1, panel_size=(2.9, 2.7))
    for row, task in zip(axes, tasks, strict=True):
        own, maps = table[table.task == task], between[between.task == task]
        lowest = max(-1.0, np.floor(10 * np.nanmin([maps.pearson.min(), 0.9])) / 10)
        for ax, size in zip(row, maps.batch_size.unique(), strict=False):
            matrix = maps[maps.batch_size == size]
            image = _heat_map(ax, matrix, lowest)
            ax.set_title(f"{task}\n{_size_label(int(size), int(matrix.num_runs.iloc[0]))}", fontsize=9)
        figure.colorbar(image, ax=list(row[:num_sizes]), label="correlation", shrink=0.8, pad=0.01)
        _curves(row[-1], own)
    # Batch sizes differ from row to row, their order does not: one legend by the places of the maps.
    shown = {
        label: handle for ax in axes[:, -1] for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        shown.values(), shown, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8,
        title="right: batch size of", title_fontsize=8,
    )  # fmt: skip
    return figure


def _heat_map(ax: Axes, matrix: pd.DataFrame, lowest: float) -> QuadMesh:
    steps = sorted(set(matrix.step) | set(matrix.other_step))
    places = {step: index for index, step in enumerate(steps)}
    values = np.full((len(steps), len(steps)), np.nan)
    for i, j, pearson in zip(matrix.step, matrix.other_step, matrix.pearson, strict=True):
        values[places[i], places[j]] = values[places[j], places[i]] = pearson
    edges = np.array([0, *steps], dtype=float)
    ax.set_facecolor("#d9d9d9")  # grey, where nothing is finite: no correlation has this color
    mesh = ax.pcolormesh(edges, edges, np.ma.masked_invalid(values), vmin=lowest, vmax=1, cmap="viridis")
    share = float(matrix[(matrix.step == steps[-1]) & (matrix.other_step == steps[-1])].overflow.iloc[0])
    ax.set_aspect("equal")
    ax.grid(visible=False)
    ax.set_xlabel(f"step ({share:.0%} overflow by the last)" if share > 0 else "step")
    ax.set_ylabel("step")
    return mesh


def _curves(ax: Axes, own: pd.DataFrame) -> None:
    """Draw how far the correlation is from 1, so that curves close to it stand apart."""
    for index, (_, curve) in enumerate(own.groupby("batch_size", sort=False)):
        color = plots.PALETTE[index]
        averaged = int(curve.num_runs.iloc[0]) > 1
        by_seed = 1 - curve.groupby(["step", "seed"]).pearson.mean().unstack()
        mean, error = by_seed.mean(axis=1), by_seed.std(axis=1).fillna(0) / np.sqrt(by_seed.shape[1])
        label = f"map {index + 1}" + (", mean of its runs" if averaged else "")
        ax.plot(mean.index, mean, color=color, label=label)  # over what is still finite
        low = np.maximum(mean - error, mean / 10)  # a band on a logarithmic axis
        ax.fill_between(mean.index, low, mean + error, color=color, alpha=0.2, linewidth=0)
        if averaged:
            single = 1 - curve.groupby("step").pearson_one_run.mean()
            ax.plot(single.index, single, color=color, linestyle=":", label=f"map {index + 1}, one run")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("1 - correlation with exact")
    ax.set_title("mean ± s.e. over seeds", fontsize=9)


def _size_label(size: int, num_runs: int) -> str:
    return f"|B| = {size}" + (f", mean of {num_runs} runs" if num_runs > 1 else "")


def _recipes(recipes: pd.DataFrame) -> Figure:
    """Draw a row for each task: error and correlation of the recipes against steps, a line for each point."""
    tasks = recipes.task.unique().tolist()
    figure, axes = plots.figure(len(tasks), 2, panel_size=(4.2, 3.6))
    for row, task in zip(axes, tasks, strict=True):
        for recipe, label in RECIPES.items():
            own = recipes[(recipes.task == task) & (recipes.recipe == recipe)]
            if not own.empty:
                color = plots.PALETTE[COLORS[recipe]]
                _recipe(row, own, f"{label}, |B| = {int(own.batch_size.iloc[0])}", color)
        row[0].axhline(1, color="#555555", linewidth=1, linestyle="--", label="error of zero")
        row[0].set_yscale("log")
        row[0].set_ylabel("relative error")
        row[1].set_ylim(-1.05, 1.05)
        row[1].set_ylabel("correlation of scores")
        for ax in row:
            ax.set_xscale("log")
            ax.set_xlabel("step")
            ax.set_title(task)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _recipe(row: np.ndarray, own: pd.DataFrame, label: str, color: str) -> None:
    finite = own[np.isfinite(own.error)]
    answers = finite[finite.step == -1]
    last = finite.step.max()
    for number, (_, curve) in enumerate(finite[finite.step > 0].groupby("point")):
        name = f"{label}: iterates" if number == 0 else None
        row[0].plot(curve.step, curve.error, color=color, linewidth=0.9, label=name)
        row[1].plot(curve.step, curve.pearson, color=color, linewidth=0.9)
    diverged_at = int(own.diverged_at.iloc[0])
    if diverged_at > 0:
        for ax in row:
            ax.axvline(diverged_at, color=color, linestyle=":", linewidth=0.9)
        row[0].plot([], [], color=color, linestyle=":", label=f"{label}: stopped here (DivergenceError)")
    else:
        places = np.full(len(answers), 1.15 * last)
        row[0].scatter(places, answers.error, color=color, s=18, label=f"{label}: answer")
        row[1].scatter(places, answers.pearson, color=color, s=18)
        promised = float(answers.promised.median())
        row[0].axhline(promised, color=color, linestyle=":", label=f"{label}: stationary error promised")
