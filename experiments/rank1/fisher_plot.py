"""The Fisher preconditioner, plot: drawn from the saved tables alone.

python -m experiments.rank1.fisher_plot results/rank1/fisher/embedded
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.reporting import plots
from experiments.rank1.redraw import redraw


def draw(table: pd.DataFrame, bounds: pd.DataFrame, rates: pd.DataFrame) -> dict[str, Figure]:
    """Return the figures by file name: the gap against its bounds, and the runs with steps against K(ε)."""
    return {"figure.png": _bounds_figure(bounds), "figure_rates.png": _rates_figure(table, rates)}


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
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _scatter(ax: Axes, table: pd.DataFrame, x: pd.Series, y: pd.Series, *, known: list[str]) -> None:
    """Draw a point a network on log axes; the bound holds below the line."""
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
    plots.identity_line(ax)


def _names(table: pd.DataFrame) -> list[str]:
    return [f"{model}, {state}" for model, state in zip(table.model, table.state, strict=True)]


def _rates_figure(table: pd.DataFrame, rates: pd.DataFrame) -> Figure:
    tasks = list(table.task.unique())
    figure, axes = plots.figure(2, len(tasks), panel_size=(3.0, 2.8))
    for column, task in enumerate(tasks):
        _curves(axes[0, column], table[table.task == task])
        _steps(axes[1, column], rates[rates.task == task])
        axes[0, column].set_title(task)
    axes[0, 0].set_ylabel("‖∇f(x_k)‖")
    axes[1, 0].set_ylabel("steps to ε")
    axes[0, 0].legend(fontsize=7)
    axes[1, 0].legend(fontsize=7)
    return figure


def _curves(ax: Axes, table: pd.DataFrame) -> None:
    for index, (method, own) in enumerate(table.groupby("method", sort=False)):
        for number, (_, run) in enumerate(own.groupby("seed")):
            ax.plot(
                run.step.clip(lower=0.5),
                run.gradient_norm,
                color=plots.PALETTE[index],
                linewidth=1,
                label=str(method) if number == 0 else None,
            )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(1e-10, 10)
    ax.set_xlabel("step k")


def _steps(ax: Axes, rates: pd.DataFrame) -> None:
    first = rates[rates.seed == rates.seed.min()].sort_values("relative_epsilon")
    ax.plot(1 / first.relative_epsilon, first.bound, color=plots.PALETTE[1], label="K(ε), first seed")
    reached = rates[rates.steps.notna()]
    ax.plot(
        1 / reached.relative_epsilon,
        reached.steps,
        linestyle="none",
        marker="o",
        markersize=4,
        color=plots.PALETTE[0],
        label="lemma's rule, all seeds",
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("‖∇f(x_0)‖ / ε")


def main() -> None:
    """Redraw the figures of a result folder."""
    redraw(draw, "table.csv", "bounds.csv", "rates.csv")


if __name__ == "__main__":
    main()
