"""Estimates and seconds; estimates of polynomials, where the value is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the estimates beside their seconds, the polynomials, and what else there are rows of."""
    figures = {}
    if len(steps := computed["default_sampler"].dropna(subset="estimate")):
        figures["default_sampler.png"] = _draw_default_sampler(steps)
    return figures | {
        "figure.png": _draw_methods(computed["summary"], computed["timings"]),
        "known.png": _draw_known(computed["known"]),
    }


def _draw_methods(summary: pd.DataFrame, timings: pd.DataFrame) -> Figure:
    """Return estimates with their intervals on the left, seconds on the right."""
    figure, axes = plots.figure(1, 2, panel_size=(4.6, 3.2))
    left, right = axes[0]
    colors = {name: plots.PALETTE[index] for index, name in enumerate(timings.method.unique())}
    summary = summary.fillna({"problems": ""})
    for row, (_, own) in enumerate(summary.iterrows()):
        left.errorbar(
            float(own.llc),
            row,
            xerr=[[float(own.llc - own.low)], [float(own.high - own.llc)]],
            fmt=plots.MARKERS[0],
            color=colors[own.method],
            markerfacecolor="white" if own.problems else colors[own.method],
            capsize=4,
        )
    left.set_yticks(range(len(summary)), summary.method)
    left.invert_yaxis()
    left.margins(y=0.2)
    hollow = "; hollow: not valid" if (summary.problems != "").any() else ""
    left.set_xlabel(f"estimated learning coefficient\n(95 % t interval over chains{hollow})")
    left.set_title(str(summary.model.iloc[0]))
    methods, threads = list(colors), sorted(timings.threads.unique())
    height = 0.8 / len(threads)
    for shift, count in enumerate(threads):
        own = timings[timings.threads == count]
        places = [methods.index(name) + (shift - (len(threads) - 1) / 2) * height for name in own.method]
        shades = [colors[name] for name in own.method]
        right.barh(places, own.cpu_seconds, height=height, color=shades, alpha=1.0 if shift == 0 else 0.55)
        for place, seconds in zip(places, own.cpu_seconds, strict=True):
            label = f"{seconds:.3g} s, {count} thread{'s' if count > 1 else ''}"
            right.annotate(label, (seconds, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    right.set_yticks(range(len(methods)), methods)
    right.invert_yaxis()
    right.margins(x=0.6)
    right.set_xlabel("CPU seconds of all cores\n(median; on the clock: timings.csv)")
    return figure


def _draw_default_sampler(table: pd.DataFrame) -> Figure:
    """Return devinterp's estimates over what is told of them on the left, what its batches do on the right."""
    figure, axes = plots.figure(1, 2, panel_size=(4.6, 3.6))
    left, right = axes[0]
    color, marker = plots.PALETTE, plots.MARKERS
    errors = [table.ratio - table.ratio_low, table.ratio_high - table.ratio]
    left.errorbar(table.ratio, range(len(table)), xerr=errors, fmt=marker[0], color=color[0], capsize=3)
    left.axvline(1.0, color="black", linewidth=1)
    left.set_yticks(range(len(table)), table.step)
    left.set_xlabel("devinterp's estimate / told\n(ours there, initial loss, batches)")
    own = table.dropna(subset="sampler")
    places = np.arange(len(own))
    errors = [own.sampler - own.sampler_low, own.sampler_high - own.sampler]
    right.errorbar(own.sampler, places, xerr=errors, fmt=marker[0], color=color[0], capsize=3, label="measured")
    told: dict[str, Any] = {"linestyle": "none", "color": color[1]}
    right.plot(own.sampler_told, places + 0.2, marker=marker[1], label="told", **told)
    right.plot(
        own.sampler_first_order,
        places + 0.4,
        marker=marker[1],
        markerfacecolor="none",
        label="told, without decay",
        **told,
    )
    right.set_yticks(places, own.step)
    right.set_xlabel("nβ (loss of own batches - of all the data)\nalong devinterp's chains")
    for ax in (left, right):
        ax.invert_yaxis()
        ax.margins(y=0.12)
    _legend(figure, title="95 % t over chains; right:")
    return figure


def _draw_known(table: pd.DataFrame) -> Figure:
    """Return estimates and asymptotic coefficients over the values at this n."""
    figure, axes = plots.figure(1, 1, panel_size=(6.0, 3.2))
    ax, rows = axes[0, 0], range(len(table))
    ratio = table.estimate / table.at_this_n
    errors = [(table.estimate - table.low) / table.at_this_n, (table.high - table.estimate) / table.at_this_n]
    ax.errorbar(
        ratio, rows, xerr=errors, fmt=plots.MARKERS[0], color=plots.PALETTE[0], capsize=3, label="estimate, 95 %"
    )
    ax.plot(
        table.asymptotic / table.at_this_n,
        rows,
        linestyle="none",
        marker=plots.MARKERS[1],
        color=plots.PALETTE[1],
        label="asymptotic coefficient",
    )
    ax.axvline(1.0, color="black", linewidth=1, label="value at this n (quadrature)")
    ax.set_yticks(list(rows), table.problem)
    ax.set_xscale("log")
    ax.set_xticks([1, 2, 3, 4, 5], ["1", "2", "3", "4", "5"])
    ax.minorticks_off()
    ax.invert_yaxis()
    ax.set_xlabel("ratio to the value at this n")
    _legend(figure)
    return figure


def _legend(figure: Figure, title: str | None = None) -> None:
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False, title=title)
