"""Lemma 1: second moments over steps, thresholds, growth of typical trials."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from curvlab.lab import Computed, plots

ROLES = {
    "half": "half the exact threshold",
    "below": "just below it",
    "between": "just above it, R > 1",
    "double": "twice the printed one",
}
KEY = "points: trials, line: exact, dashed: R^t"
TICKS = (2, 3, 5, 10, 20, 50, 100)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figures: second moments, thresholds and growth; and the second moments of all spectra."""
    errors, limits = computed["table"], computed["thresholds"]
    figure, axes = plots.figure(1, 3, panel_size=(3.9, 3.6))
    own = _first_damping(errors)
    _second_moments(axes[0, 0], _case(own, _showcase(own, limits)))
    axes[0, 0].legend(fontsize=7, loc="upper left", title=KEY, title_fontsize=7)
    _thresholds(axes[0, 1], limits)
    _growth(axes[0, 2], computed["growth"])
    return {"figure.png": figure, "figure_spectra.png": _all_spectra(own)}


def _first_damping(table: pd.DataFrame) -> pd.DataFrame:
    return table[table.damping == table.damping.min()]


def _showcase(own: pd.DataFrame, limits: pd.DataFrame) -> tuple[str, int]:
    """Return the measured case in which R's threshold is the farthest from the exact one."""
    measured = own[["spectrum", "size"]].drop_duplicates().merge(limits, on=["spectrum", "size"])
    row = measured.iloc[int((measured.sufficient / measured.exact).to_numpy().argmax())]
    return row.spectrum, int(row["size"])


def _case(table: pd.DataFrame, case: tuple[str, int]) -> pd.DataFrame:
    return table[(table.spectrum == case[0]) & (table["size"] == case[1])]


def _second_moments(ax: Axes, own: pd.DataFrame) -> None:
    """Points: measured, with error bars; line: exact; dashed: u_0ᵀ R^t u_0."""
    growing = own[own.start == "growing"]
    for index, (role, label) in enumerate(ROLES.items()):
        rows = growing[growing.role == role]
        if rows.empty:
            continue
        color = plots.PALETTE[index]
        plots.measured(
            ax,
            rows.step,
            rows.second_moment,
            rows.second_moment_stderr,
            color=color,
            marker=plots.MARKERS[index],
            label=f"|B| = {rows.batch_size.iloc[0]}, {label}",
        )
        ax.plot(rows.step, rows.second_moment_exact, color=color, linewidth=1)
        ax.plot(rows.step, rows.second_moment_printed, color=color, linewidth=1, linestyle="--")
    ax.set_yscale("log")
    ax.set_ylim(top=ax.get_ylim()[1] * 1e5)  # room for the legend
    ax.set_xlabel("step t")
    ax.set_ylabel("E‖u_t‖² / ‖u_0‖², g = 0")
    ax.set_title(f"{growing.spectrum.iloc[0]}, {growing['size'].iloc[0]} eigenvalues")


def _thresholds(ax: Axes, limits: pd.DataFrame) -> None:
    for index, (name, own) in enumerate(limits.groupby("spectrum", sort=False)):
        for size, (_, rows) in zip((6, 3), own.groupby("damping"), strict=False):
            ax.plot(
                rows.printed,
                rows.exact_largest,
                color=plots.PALETTE[index],
                marker=plots.MARKERS[index],
                markersize=size,
                linestyle="none",
                label=str(name) if size == 6 else None,
            )
    line = np.array([limits.printed.min() / 1.3, limits.printed.max() * 1.3])
    ax.plot(line, line, color="#555555", linestyle="--", linewidth=1, label="equal")
    ax.plot(line, line / 2, color="#555555", linestyle=":", linewidth=1, label="half")
    for scale, axis in ((ax.set_xscale, ax.xaxis), (ax.set_yscale, ax.yaxis)):
        scale("log")
        axis.set_major_locator(FixedLocator(TICKS))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    ax.legend(fontsize=7)
    ax.set_xlabel("printed threshold of |B|")
    ax.set_ylabel("exact threshold of |B|")
    ax.set_title("divergence below (small marks:\nlarger damping)")


def _growth(ax: Axes, growth: pd.DataFrame) -> None:
    """Growth of the typical trial against that of the root of the second moment, one point for each setting."""
    ax.axhline(0, color="#555555", linewidth=0.8)
    ax.axvline(0, color="#555555", linewidth=0.8)
    for index, (name, own) in enumerate(growth.groupby("spectrum", sort=False)):
        plots.measured(
            ax,
            own.half_log_radius,
            own.growth,
            own.growth_stderr,
            color=plots.PALETTE[index],
            marker=plots.MARKERS[index],
            label=str(name),
        )
    near = float(growth[growth.role != "half"].half_log_radius.abs().max())
    ax.set_xscale("symlog", linthresh=near / 10)
    ax.set_yscale("symlog", linthresh=near / 10)
    ax.tick_params(axis="x", rotation=45)
    ax.legend(fontsize=7, loc="upper left")
    ax.set_xlabel("½ log spectral radius (per step)")
    ax.set_ylabel("log‖u_t‖ / t, typical trial")
    ax.set_title("below 0 right of 0: trials converge,\nsecond moment diverges")


def _all_spectra(own: pd.DataFrame) -> Figure:
    cases = list(dict.fromkeys(zip(own.spectrum, own["size"], strict=True)))
    columns = min(len(cases), 3)
    figure, axes = plots.figure(-(-len(cases) // columns), columns, panel_size=(3.4, 2.9))
    for ax in axes.flat[len(cases) :]:
        ax.set_axis_off()
    for ax, case in zip(axes.flat, cases, strict=False):
        _second_moments(ax, _case(own, case))
        ax.legend(fontsize=6, loc="upper left", title=KEY, title_fontsize=6)
    return figure
