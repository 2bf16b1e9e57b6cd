"""Theorem 1: the error over batch sizes, steps and dampings, beside the bounds."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

LINES = {"theorem": ("Theorem 1, best δ", "--", 0), "printed": ("(10) as printed", ":", 1)}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the error against |B| and from the far start; over steps; and its limit over dampings."""
    errors = computed["table"]
    problems = list(dict.fromkeys(errors.problem))
    figure, axes = plots.figure(1, len(problems) + 1, panel_size=(3.5, 3.4))
    for ax, problem in zip(axes[0], problems, strict=False):
        _against_batch(ax, errors, computed["settings"], problem)
    axes[0, 0].set_ylabel("E‖u_t - u*‖² / ‖u*‖²")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    _far_start(axes[0, -1], computed["start"])
    return {
        "figure.png": figure,
        "figure_steps.png": _over_steps(errors, problems),
        "figure_damping.png": _over_damping(computed["stationary"]),
    }


def _against_batch(ax: Axes, errors: pd.DataFrame, settings: pd.DataFrame, problem: str) -> None:
    """Draw the error after the last step against |B|, with both bounds and the three requirements on |B|."""
    own = errors[(errors.problem == problem) & (errors.step == errors[errors.problem == problem].step.max())]
    limits = settings[(settings.problem == problem) & (settings.damping_ratio == own.damping_ratio.iloc[0])].iloc[
        0
    ]
    shown = own[own.error < 1e3]
    label = "measured (LiSSA, 95 %)"
    plots.measured(ax, shown.batch_size, shown.error, shown.error_stderr, color="black", label=label)
    for column, (label, style, color) in LINES.items():
        line = own[own[column].notna()]
        ax.plot(line.batch_size, line[column], color=plots.PALETTE[color], linestyle=style, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for value, label, color in (
        (limits.exact, "second moment diverges left of it", 2),
        (limits.recipe, "recommended |B|, C = 2", 3),
        (limits.corollary, "recommended |B|, C measured", 4),
    ):
        ax.axvline(value, color=plots.PALETTE[color], linewidth=1, label=label)
    ax.set_xlabel(f"batch size |B| (t = {own.step.iloc[0]};\nerrors above 1000 not shown)")
    ax.set_title(f"{problem}, λ = {own.damping_ratio.iloc[0]:.3g} λmax\nC = {limits.constant:.2f}")


def _far_start(ax: Axes, start: pd.DataFrame) -> None:
    ax.plot(start.step, start.exact, color="black", linewidth=1, label="exact")
    some = start[start.step % max(len(start) // 12, 1) == 0]
    plots.measured(ax, some.step, some.error, some.error_stderr, color="black", label="measured (95 %)")
    ax.plot(start.step, start.theorem, color=plots.PALETTE[0], linestyle="--", label="Theorem 1")
    ax.plot(start.step, start.corrected, color=plots.PALETTE[5], linestyle="-.", label="corrected")
    ax.set_yscale("log")
    ax.set_xlabel("step t")
    ax.set_ylabel("E (u_t - u*)²")
    ax.set_title(f"{start.problem.iloc[0]}, from beyond u*")
    ax.legend(fontsize=7)


def _over_steps(errors: pd.DataFrame, problems: list[str]) -> Figure:
    """Draw, for each problem, three batch sizes: the smallest that (9) admits, and two larger ones."""
    figure, axes = plots.figure(1, len(problems), panel_size=(3.8, 3.4))
    for ax, problem in zip(axes[0], problems, strict=True):
        own = errors[errors.problem == problem]
        sizes = sorted(own[own.delta > 0].batch_size.unique())
        for index, size in enumerate(
            dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]] if sizes else [])
        ):
            rows, color = own[own.batch_size == size], plots.PALETTE[index]
            marker, label = plots.MARKERS[index], f"|B| = {size}"
            plots.measured(ax, rows.step, rows.error, rows.error_stderr, color=color, marker=marker, label=label)
            ax.plot(rows.step, rows.exact, color=color, linewidth=1)
            for column, (_, style, _) in LINES.items():
                ax.plot(rows.step, rows[column], color=color, linestyle=style, linewidth=1)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("step t")
        ax.set_title(problem)
        ax.legend(fontsize=7, title="dashed: Theorem 1,\ndotted: (10), line: exact", title_fontsize=7)
    axes[0, 0].set_ylabel("E‖u_t - u*‖² / ‖u*‖²")
    return figure


def _over_damping(stationary: pd.DataFrame) -> Figure:
    """Limit of the error over the second term of (10), against 1 / (2ηλ)."""
    figure, axes = plots.figure(1, 1, panel_size=(4.6, 3.4))
    ax = axes[0, 0]
    own = stationary[(stationary.batch_size == 100) & stationary.error.notna()]
    for index, (problem, rows) in enumerate(own.groupby("problem", sort=False)):
        ordered = rows.sort_values("inverse_delta")
        ax.plot(
            ordered.inverse_delta,
            ordered.error / ordered.printed,
            color=plots.PALETTE[index],
            marker=plots.MARKERS[index],
            markersize=5,
            label=str(problem),
        )
    ax.axhline(1, color="#555555", linestyle="--", linewidth=1, label="(10) as printed")
    ends = [stationary.inverse_delta.min(), stationary.inverse_delta.max()]
    ax.plot(ends, ends, color="#555555", linestyle=":", linewidth=1, label="the dropped factor 1 / (2ηλ)")
    ax.set_xscale("log")
    ax.set_yscale("log")
    plots.readable_log(ax.xaxis)
    ax.set_xlabel("1 / (2ηλ)")
    ax.set_ylabel("limit of the error /\nsecond term of (10), |B| = 100")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
