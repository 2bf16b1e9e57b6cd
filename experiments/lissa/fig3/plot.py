"""Fig. 3: the three heat maps of every model, and how far other wordings stand out."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots
from experiments.lissa.fig3.statistics import KINDS, matrices

PANELS = ("influence", "gradient", "difference")  # as in the paper, from left to right
TITLES = {
    "influence": "influence similarity",
    "gradient": "gradient similarity",
    "difference": "gradient - influence",
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's three heat maps, one row of them for each model; and the margins."""
    table = computed["table"]
    return {
        "figure.png": _heat_maps(table, computed["squares"]),
        "figure_margins.png": _margins(table, computed["retrieval"]),
    }


def _heat_maps(table: pd.DataFrame, squares: pd.DataFrame) -> Figure:
    seeds = table.model_seed.unique()
    figure, axes = plots.figure(len(seeds), 3, panel_size=(3.6, 4.0))
    for row, seed in zip(axes, seeds, strict=True):
        maps = matrices(table, seed)
        maps["difference"] = maps["gradient"] - maps["influence"]
        apart = ~np.kron(np.ones((2, 2)), np.eye(10)).astype(bool)
        limit = float(np.abs(maps["difference"][apart]).max())
        for ax, name in zip(row, PANELS, strict=True):
            scale = (-limit, limit) if name == "difference" else (-1.0, 1.0)
            image = ax.imshow(maps[name], cmap="RdBu_r", vmin=scale[0], vmax=scale[1], interpolation="nearest")
            figure.colorbar(image, ax=ax, shrink=0.8, extend="both" if name == "difference" else "neither")
            ax.set_title(f"{TITLES[name]}" + (f" (model {seed})" if len(seeds) > 1 else ""))
            _frame(ax)
            own = squares[(squares.model_seed == seed) & (squares["heat_map"] == name)]
            means = {
                (square["rows"], square["columns"]): f"{square['mean']:.3f} ({square['stderr']:.3f})"
                for _, square in own.iterrows()
            }
            # Beside the map, not on it: a number there covers the cells that it is the mean of.
            lines = ["      ".join(means[row, column] for column in KINDS) for row in KINDS]
            ax.set_xlabel("means:\n" + "\n".join(lines) + "\n", fontsize=8)
    figure.supxlabel(
        "20 sentences, in the order of the paper's App. A. Below each map: means (standard errors) of its "
        "four 10 × 10 squares.\nColours of the differences span those between different facts.",
        fontsize=9,
    )
    return figure


def _frame(ax: Axes) -> None:
    ax.grid(False)
    ax.axhline(9.5, color="black", linewidth=0.8)
    ax.axvline(9.5, color="black", linewidth=0.8)
    ax.set_xticks([4.5, 14.5], ["original", "paraphrased"])
    ax.set_yticks([4.5, 14.5], ["original", "paraphrased"], rotation=90, va="center")
    ax.tick_params(length=0)


def _margins(table: pd.DataFrame, retrieval: pd.DataFrame) -> Figure:
    """Draw similarities of the same fact beside those of different facts, and the margins of the former."""
    figure, axes = plots.figure(1, 2, panel_size=(4.6, 3.4))
    left, right = axes[0]
    across = table[table.first_kind != table.second_kind]
    bins = np.linspace(-0.3, 1.0, 53)
    for index, method in enumerate(("gradient", "influence")):
        color = plots.PALETTE[index]
        for same, style in ((False, "-"), (True, "--")):
            values = across[(across.first_fact == across.second_fact) == same][method]
            label = f"{method}, {'same fact' if same else 'different facts'} (mean {values.mean():.3f})"
            left.hist(values, bins=bins, density=True, histtype="step", color=color, linestyle=style, label=label)
    left.set_xlabel("similarity of an original and a paraphrased sentence")
    left.set_ylabel("density over pairs and models")
    left.set_ylim(top=1.5 * left.get_ylim()[1])  # room for the legend
    left.legend(fontsize=7, frameon=False, loc="upper right")
    pairs = retrieval.pivot_table(
        index=["model_seed", "direction", "fact"], columns="method", values="margin"
    ).reset_index()
    for index, (seed, own) in enumerate(pairs.groupby("model_seed")):
        right.scatter(
            own.gradient, own.influence, s=14, color=plots.PALETTE[index % 7], marker=plots.MARKERS[index % 7],
            label=f"model {seed}",
        )  # fmt: skip
    plots.identity_line(right)
    top = retrieval.assign(hit=retrieval["rank"] == 1).groupby("method").hit.mean()
    right.set_xlabel(f"margin by gradient (standard deviations); top-1 {top['gradient']:.0%}")
    right.set_ylabel(f"margin by influence; top-1 {top['influence']:.0%}")
    right.set_title("other wording over nine unrelated sentences")
    right.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)
    return figure
