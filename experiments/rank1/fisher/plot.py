"""The Fisher preconditioner: gaps and their bounds; runs, and steps to ε against K(ε)."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from curvlab.lab import Computed, plots
from experiments.rank1.steps_panel import steps_panel

FLOOR = 1e-10  # gradient norm at which the runs stop


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures by file name: gap and bounds; runs, and steps against K(ε), by kind of loss."""
    table, figures = computed["table"], {"figure.png": _bounds_figure(computed["bounds"])}
    for kind, own in computed["rates"].groupby("kind", sort=False):
        name = f"figure_rates_{str(kind).replace(' ', '_')}.png"
        figures[name] = _rates_figure(table[table.objective.isin(own.objective)], own)
    return figures


def _bounds_figure(bounds: pd.DataFrame) -> Figure:
    figure, axes = plots.figure(1, 3, panel_size=(3.5, 3.4))
    curved = bounds[bounds.smoothness > 0].reset_index(drop=True)
    softmax = curved[curved.kind == "softmax"]
    known = list(dict.fromkeys(_names(curved)))
    _scatter(axes[0, 0], curved, curved.one_norm_bound, curved.gap, known=known)
    axes[0, 0].set_title("lemma without the square")
    axes[0, 0].set_xlabel("L · mean ‖∇_φ log p‖_1")
    axes[0, 0].set_ylabel("‖∇²f - F‖")
    _scatter(axes[0, 1], curved, curved.lemma, curved.squared, known=known)
    axes[0, 1].set_title("lemma as printed")
    axes[0, 1].set_xlabel("L Σ ‖∇_φ log p‖_1")
    axes[0, 1].set_ylabel("‖∇²f - F‖²")
    _scatter(axes[0, 2], softmax, softmax.loss_bound_without_L, softmax.gap, known=known)
    axes[0, 2].set_title("softmax as printed, without L")
    axes[0, 2].set_xlabel("2 f")
    axes[0, 2].set_ylabel("‖∇²f - F‖")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    labels = ["the bound: it holds below" if label == "x = y" else label for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _scatter(ax: Axes, table: pd.DataFrame, x: pd.Series, y: pd.Series, *, known: list[str]) -> None:
    """Draw one point for each model on log axes; the bound holds below the line."""
    names = _names(table)
    for name in dict.fromkeys(names):
        index = known.index(name)
        chosen = [found == name for found in names]
        ax.scatter(
            x[chosen],
            y[chosen],
            s=22,
            marker=plots.MARKERS[index % 7],
            color=plots.PALETTE[(index + 3 * (index // 7)) % 7],  # a pair of its own for each
            label=name,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    # Within one decade the default labels minor ticks, so many that they overlap: two labels and whole decades.
    low, high = 10 ** (x.map(_log10).min() - 0.15), 10 ** (x.map(_log10).max() + 0.15)
    ax.set_xlim(low, high)
    if high < 20 * low:
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    plots.identity_line(ax)


def _log10(value: float) -> float:
    return math.log10(value)


def _names(table: pd.DataFrame) -> list[str]:
    return [f"{model}, {state}" for model, state in zip(table.model, table.state, strict=True)]


def _rates_figure(table: pd.DataFrame, rates: pd.DataFrame) -> Figure:
    """Curves of all methods above, steps of the lemma's rule against K(ε) below; one column for each objective."""
    objectives = list(table.objective.unique())
    methods = list(table.method.unique())
    figure, axes = plots.figure(2, len(objectives), panel_size=(3.2, 3.2))
    for column, objective in enumerate(objectives):
        _curves(axes[0, column], table[table.objective == objective], methods)
        own = rates[(rates.objective == objective) & (rates.method == "lemma")]
        steps_panel(axes[1, column], own)
        axes[0, column].set_title(objective)
        if column:
            axes[1, column].set_ylabel("")
    axes[0, 0].set_ylabel("‖∇f(x_k)‖,\none line for each seed")
    axes[1, 0].set_ylabel("steps of the\nlemma's rule to ε")
    handles, labels = [
        [*above, *below]
        for above, below in zip(
            axes[0, 0].get_legend_handles_labels(), axes[1, 0].get_legend_handles_labels(), strict=True
        )
    ]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _curves(ax: Axes, table: pd.DataFrame, methods: list[str]) -> None:
    """Draw one line for each seed, and say which methods ended above the floor."""
    missing = []
    for index, method in enumerate(methods):
        own = table[table.method == method]
        runs = [run.sort_values("step") for _, run in own.groupby("seed")]
        for number, run in enumerate(runs):
            ax.plot(
                run.step.clip(lower=0.5),
                run.gradient_norm,
                color=plots.PALETTE[index],
                linestyle="--" if method == "lemma as printed" else "-",
                linewidth=1,
                label=method if number == 0 else None,
            )
        above = sum(not run.gradient_norm.iloc[-1] <= FLOOR for run in runs)
        if above:
            missing.append(f"{method}: {above} of {len(runs)}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(FLOOR, 10)
    lines = [f"not at {FLOOR:g} in {table.step.max()} steps:", *missing] if missing else []
    ax.set_xlabel("\n".join(["step k", *lines]), fontsize=8)  # in the panel it would cover curves
