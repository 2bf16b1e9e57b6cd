"""The five gaps, of which tab4 and tab5 are made: tables, how a task is judged over seeds, and Fig. 4's bars."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from omegaconf import DictConfig

from curvlab.influence.retraining import GAPS, LABELS
from curvlab.lab import (
    Claim,
    ClaimResult,
    Computed,
    Run,
    judge,
    load_paper_numbers,
    out_of_reach,
    plots,
    t_interval,
    task_settings,
)
from curvlab.lab.reporting.claims import REPRODUCED
from experiments.papers import FOLDER
from experiments.pbrf.networks import load_network
from experiments.pbrf.responses import NORMS, Decomposition
from experiments.shared import stats

# Distances from θ^s beside the gaps: of the influence estimate, and of two responses.
MOVES = {"moved": "", "moved by PBRF": "proximal_bregman", "moved by linearised": "linearised"}


# ------------------------------------------------------------------------------------ compute
def gap_tables(run: Run, cfg: DictConfig, curvature: str, printed: str) -> dict[str, pd.DataFrame]:
    """Return `table`, `points` and `networks`, rows for tasks, for points and gaps, and for seeds.

    `points` has, beside the gaps, the distances `MOVES`; all per example and in total (see `Decomposition`).

    `networks` says what a row is worth: training loss, that of the best constant outputs, gradient norm at θ^s,
    test loss, and residual of the influence estimate, the largest of its points'. With the Hessian also what its
    inverse is worth: its smallest eigenvalue, how many lie below -λ, and min |μ + λ|.

    Columns of `table`: means over seeds of all of these, but the largest residual; `learned`, whether every
    seed's training loss is below the constant outputs'; of each gap the mean, a 95 % t interval over the seeds'
    means (`low`, `high`; nan for one seed), and `std` over the points of a seed, averaged over seeds; the paper's
    mean and what it prints behind ±, which it does not explain, for the row itself or for that which it stands
    in for.

    Args:
        run: seeds, store.
        cfg: `tasks`, and for all of them or for one `seeds`, `num_points` and what `load_network` takes.
        curvature: of the influence estimate: "gauss_newton" or "hessian".
        printed: the paper's table.
    """
    rows, points, networks = [], [], []
    for name, settings in task_settings(cfg).items():
        own, states = [], []
        for seed in settings.seeds:
            found = Decomposition(load_network(run, name, settings, seed), settings.num_points)
            network, place = found.network, {"task": found.network.label, "seed": seed}
            measured = found.gaps(curvature)
            measured |= {move: found.distance(other or curvature, "base") for move, other in MOVES.items()}
            state = {key.replace("_", " "): value for key, value in found.base_state().items()}
            shown = {key: state[key] for key in ("train loss", "constant loss", "gradient norm", "test loss")}
            shown |= {"residual": found.influence(curvature)[1]}
            states.append(place | {"learning rate": network.lr} | shown | _saddle(found, curvature))
            own += [
                place | {"point": int(point), "gap": gap} | dict(zip(NORMS, values[k].tolist(), strict=True))
                for gap, values in measured.items()
                for k, point in enumerate(found.points)
            ]
        size = {"P": len(network.initial), "N": len(network.train[1]), "epochs": network.num_epochs}
        rows.append(_row(settings, size, pd.DataFrame(states), pd.DataFrame(own), printed))
        points += own
        networks += states
    found_networks = pd.DataFrame(networks)
    run.note(seeds=sorted(set(found_networks.seed.tolist())))
    return {"table": pd.DataFrame(rows), "points": pd.DataFrame(points), "networks": found_networks}


def _saddle(found: Decomposition, curvature: str) -> dict[str, float]:
    if curvature != "hessian":
        return {}
    spectrum = found.hessian_spectrum()
    names = {"smallest eigenvalue": "smallest", "eigenvalues below -λ": "num_below", "min |μ + λ|": "nearest"}
    return {column: spectrum[name] for column, name in names.items()}


def _row(
    settings: DictConfig, size: dict[str, int], states: pd.DataFrame, own: pd.DataFrame, printed: str
) -> dict[str, Any]:
    paper = load_paper_numbers("pbrf", folder=FOLDER)
    known = {number.row for number in paper.in_table(printed)}
    stands_for = settings.paper_row or settings.get("stands_for")
    row: dict[str, Any] = {"task": own.task.iloc[0], "paper's row": settings.paper_row or ""}
    row |= {"stands for": "" if settings.paper_row else stands_for or ""} | size
    row |= {"points": own.groupby("seed").point.nunique().max(), "seeds": own.seed.nunique()}
    means = states.drop(columns=["task", "seed"]).mean(skipna=False)
    row |= {"λ": settings.damping} | {str(name): value for name, value in means.items()}
    row["residual"] = states.residual.max(skipna=False)
    row["learned"] = bool((states["train loss"] < states["constant loss"]).all())
    row |= {move: own[own.gap == move].per_example.mean() for move in MOVES}
    for gap in GAPS:
        values = own[own.gap == gap].groupby("seed", sort=False)
        of_seeds = values.per_example.mean()
        interval = t_interval(of_seeds)
        row |= {f"{gap} per_example mean": of_seeds.mean()}
        row |= {f"{gap} per_example low": interval.low, f"{gap} per_example high": interval.high}
        row |= {f"{gap} per_example std": values.per_example.std().mean()}
        row |= {f"{gap} total mean": values.total.mean().mean()}
        if stands_for in known:
            number = paper.get(printed, stands_for, gap)
            row |= {f"{gap} paper mean": number.value, f"{gap} paper ±": number.stderr}
    return row


# ------------------------------------------------------------------------------------ judge
# Above it the influence estimate is not the solution that it is named after. With the Hessian's eigenvalues on
# both sides of zero a small residual bounds no error: only a solve to rounding is one.
LARGEST_RESIDUAL = {"gauss_newton": 0.1, "hessian": 1e-6}
MOVED = 0.5  # of the estimate's way, below which a descent has hardly begun


def arrived(
    *,
    curvature: str = "gauss_newton",
    residual: float = 0.0,
    is_exact: bool = True,
    learned: bool = True,
    moved: float = math.nan,
    moved_by_linearised: float = math.nan,
) -> str:
    """Return why a network decides nothing about an estimate; nothing where it does. What is nan is not asked.

    Three things are needed. The network has learned something: its training loss is below that of the best
    constant outputs. The estimate is what it is called: an exact one solved to `LARGEST_RESIDUAL`, LiSSA finite at
    the paper's depth, whatever its residual. And the retraining has got somewhere: its linearisation, which tends
    to the exact estimate, has moved the outputs by at least half of what that does; where it has hardly begun,
    anything is linear, and nothing predicts it for a reason.
    """
    if not learned:
        return "θ^s has learned nothing: constant outputs have a training loss as low."
    if not is_exact and not math.isfinite(residual):
        return "LiSSA is not finite at the paper's depth."
    if is_exact and not residual <= LARGEST_RESIDUAL[curvature]:
        needed = f"needed: {LARGEST_RESIDUAL[curvature]:g}"
        return f"The influence estimate is not solved: a residual of {residual:.2g}, {needed}."
    if moved_by_linearised < MOVED * moved:
        share = moved_by_linearised / moved
        return (
            f"The retraining has hardly begun: linearised, it has moved the outputs by {share:.2g} of what the "
            f"influence estimate does, needed: {MOVED:g}."
        )
    return ""


def explained(result: ClaimResult, why: str) -> ClaimResult:
    """Return the result with its explanation also where it is reproduced."""
    return replace(result, explanation=why) if result.verdict == REPRODUCED else result


def by_point(points: pd.DataFrame, norm: str = "per_example") -> pd.DataFrame:
    """Return the gaps of one task as columns, a row for each seed and point."""
    return points.pivot_table(index=["seed", "point"], columns="gap", values=norm, sort=False)


def arrived_row(row: pd.Series) -> str:
    """Return why a row of `table` decides nothing, see `arrived`."""
    return arrived(
        curvature="hessian" if "smallest eigenvalue" in row else "gauss_newton",
        residual=row.residual,
        learned=bool(row.learned),
        moved=row.moved if "smallest eigenvalue" not in row else np.nan,  # H's estimate is no limit of a descent
        moved_by_linearised=row["moved by linearised"],
    )


def judge_over_seeds(
    claim: Claim, reason: str, columns: pd.DataFrame, statistic: Callable[..., float], why: str
) -> ClaimResult:
    """Judge the geometric mean over seeds of a statistic of each seed's points, by a t interval of logarithms.

    All statistics are positive, and ratios differ by factors from seed to seed: on a linear scale one seed's 200
    beside 10 and 20 would give an interval down to -200. The points of one seed share its network, and its drift:
    an interval over them says nothing about another network.

    Args:
        claim: to judge.
        reason: why it is out of reach, or nothing.
        columns: what the statistic takes, a row for each seed and point.
        statistic: of vectors over the points, one for each column.
        why: the explanation.
    """
    if reason:
        return out_of_reach(claim, f"{reason} {why}")
    values = {
        seed: statistic(*(own[name].to_numpy() for name in columns))
        for seed, own in columns.groupby(level="seed", sort=False)
    }
    listed = ", ".join(f"{seed}: {value:.2g}" for seed, value in values.items())
    found = stats.geometric_mean(list(values.values()))
    text = f"{why} By seed: {listed}."
    return explained(judge(claim, *found, if_not_reproduced=text), text)


def mean_ratio(of: np.ndarray, by: np.ndarray) -> float:
    """Return the ratio of two means."""
    return float(np.mean(of) / np.mean(by))


# ------------------------------------------------------------------------------------ draw
_HATCH = "//"
_PALE = 0.35  # of what decides nothing
_NOISE = 1e-6  # outputs: what two optimisations of one convex cost differ by; smaller gaps lie below the panel
_LABEL_WIDTH = 14  # characters of a task's name on a line
_MOST_ROWS = 8  # in one figure
_MIN_WIDTH = 7.2  # inches, for the legend's longest line


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: shares of the gaps in their sum, and below it the sizes, on a logarithmic scale.

    Rows that decide nothing are pale; where there are many rows, they have a figure of their own.

    Beside ours stands the paper's row, or that which a stand-in stands for, marked with a star. The paper does
    not say whether its distances are divided by √N, ours are. Bars of the sizes are t intervals over seeds,
    and end at the lower edge of the panel where they reach 0; one seed has none.
    """
    table = computed["table"]
    decides = _counts(table)
    if len(table) <= _MOST_ROWS or not 0 < decides.sum() < len(table):
        return {"figure.png": _figure(table)}
    return {"figure.png": _figure(table[decides]), "figure_further.png": _figure(table[~decides])}


def _figure(table: pd.DataFrame) -> Figure:
    table = table.reset_index(drop=True)  # a row's place is its index
    figure, axes = plots.figure(2, 1, panel_size=(max(_MIN_WIDTH, 1.5 + 0.95 * len(table)), 3.0))
    _draw_shares(axes[0, 0], table)
    _draw_sizes(axes[1, 0], table)
    handles: list[Artist] = [
        Patch(color=color, alpha=0.9, label=label)
        for color, label in zip(plots.PALETTE, LABELS.values(), strict=False)
    ]
    if (table.reindex(columns=_printed()).sum(axis=1) > 0).any():
        handles.append(Patch(facecolor="white", edgecolor="black", hatch=_HATCH, label="hatched: the paper's"))
    if _has_paper(table).any():
        hollow: dict[str, Any] = {"marker": "o", "markersize": 4, "linestyle": "none", "fillstyle": "none"}
        text = "hollow: the paper's, ± as printed (0.000 left out)"
        handles.append(Line2D([], [], color="black", label=text, **hollow))
    text = "line: how far the influence estimate moves"
    handles.append(Line2D([], [], color="black", marker="_", markersize=12, linestyle="none", label=text))
    # The paper's tables give arithmetic means; seeds are judged by geometric ones, which fewer of them rule.
    text = "t 95 % over seeds of the arithmetic mean (claims:\nthe geometric); to the edge where it reaches 0"
    handles.append(Line2D([], [], color="black", marker="|", markersize=8, linestyle="none", label=text))
    if (_stands_for(table)[_has_paper(table)] != "").any():
        handles.append(Patch(facecolor="none", edgecolor="none", label="*: row that ours stands in for"))
    if not _counts(table).all():
        handles.append(Patch(facecolor="#555555", alpha=_PALE, label="pale: decides nothing, as its name says"))
    if not _has_paper(table).all():
        handles.append(Patch(facecolor="none", edgecolor="none", label="one bar: no value of the paper's"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _printed(what: str = "mean") -> list[str]:
    return [f"{gap} paper {what}" for gap in GAPS]


def _has_paper(table: pd.DataFrame) -> pd.Series:
    return table.reindex(columns=_printed()).notna().all(axis=1)


def _counts(table: pd.DataFrame) -> pd.Series:
    """Return whether ours decides anything."""
    return table.apply(lambda row: not arrived_row(row), axis=1)


def _stands_for(table: pd.DataFrame) -> pd.Series:
    return table.get("stands for", pd.Series("", table.index)).fillna("")


def _draw_shares(ax: Axes, table: pd.DataFrame) -> None:
    """Draw ours, with their sum above; beside it, in rows that the paper has, the paper's, or that all are 0."""
    stars = ["*" if name else "" for name in _stands_for(table)]
    shown = zip(table.iterrows(), stars, _counts(table), _has_paper(table), strict=True)
    for place, ((_, row), star, counts, has_paper) in enumerate(shown):
        ours = row[[f"{gap} per_example mean" for gap in GAPS]].to_numpy(float)
        _stack(ax, place - 0.2 if has_paper else place, ours, alpha=0.9 if counts else _PALE)
        if has_paper:
            printed = row[_printed()].to_numpy(float)
            _stack(ax, place + 0.2, printed, hatch=_HATCH, star=star)
            if printed.sum() == 0:
                words = f"paper{star}: 0.000 in all"
                ax.text(place + 0.2, 0.5, words, rotation=90, ha="center", va="center", fontsize=7)
    ax.set(xlim=(-0.6, len(table) - 0.4), ylim=(0, 1.12), yticks=np.linspace(0, 1, 6))
    ax.set_xticks(np.arange(len(table)), [""] * len(table))
    ax.set_ylabel("share of their sum\n(the sum, in outputs, on top)", fontsize=8)


def _stack(
    ax: Axes, place: float, sizes: np.ndarray, *, hatch: str = "", alpha: float = 0.9, star: str = ""
) -> None:
    if not sizes.sum() > 0:
        return
    bottom = 0.0
    for color, share in zip(plots.PALETTE, sizes / sizes.sum(), strict=False):
        ax.bar(place, share, 0.36, bottom, color=color, hatch=hatch, alpha=alpha)
        bottom += share
    ax.text(place, 1.01, f"{sizes.sum():.3g}{star}", ha="center", va="bottom", fontsize=6.5)


def _draw_sizes(ax: Axes, table: pd.DataFrame) -> None:
    ax.set_yscale("log", nonpositive="clip")  # a bar down to 0 or below ends at the lower edge
    counts = _counts(table)
    for index, gap in enumerate(GAPS):
        shift = 0.16 * (index - 2) - 0.03
        kind: dict[str, Any] = {"fmt": plots.MARKERS[index], "color": plots.PALETTE[index], "markersize": 3.5}
        kind |= {"capsize": 1.5, "elinewidth": 0.8}
        mean = table[f"{gap} per_example mean"]
        ends = np.stack([mean - table[f"{gap} per_example low"], table[f"{gap} per_example high"] - mean])
        for rows, alpha in ((counts.to_numpy(), 1.0), (~counts.to_numpy(), _PALE)):
            if not rows.any():
                continue
            ax.errorbar(mean.index[rows] + shift, mean[rows], yerr=ends[:, rows], alpha=alpha, **kind)
        if f"{gap} paper mean" in table:
            printed = table[f"{gap} paper mean"].where(lambda sizes: sizes > 0)
            spread = table[f"{gap} paper ±"].where(printed > 0)
            ax.errorbar(printed.index + shift + 0.07, printed, yerr=spread, markerfacecolor="white", **kind)
    ax.scatter(np.arange(len(table)), table.moved, marker="_", s=420, color="black", linewidths=0.9, zorder=1)
    means = table[[f"{gap} per_example mean" for gap in GAPS]]
    ax.set_ylim(bottom=max(float(means.where(means > 0).min().min()) / 3, _NOISE))
    ax.set_xlim(-0.6, len(table) - 0.4)
    ax.set_xticks(np.arange(len(table)), [_named(row) for _, row in table.iterrows()], fontsize=7)
    ax.set_ylabel("‖Y_a − Y_b‖ / √N, in logits or\npredictions", fontsize=8)


def _named(row: pd.Series) -> str:
    """Return the task with what keeps its row from deciding anything."""
    reason, name = arrived_row(row), textwrap.fill(row.task, _LABEL_WIDTH)
    words = {"θ^s": "learned nothing", "The influence": "not solved", "The retraining": "hardly moved"}
    named = [text for begin, text in words.items() if reason.startswith(begin)]
    one = ["1 seed"] if row.get("seeds", 0) == 1 else []
    return "\n".join([name, *named, *one])
