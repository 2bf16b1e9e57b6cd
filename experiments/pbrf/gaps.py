"""The five gaps, of which tab4 and tab5 are made: tables, how a task is judged over seeds, and the sizes drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.influence.retraining import GAPS, LABELS
from curvlab.lab import Computed, Run, load_paper_numbers, panels, plots, task_settings
from curvlab.lab.claims import Claim, ClaimResult, judge, out_of_reach, t_interval
from curvlab.lab.claims.claims import REPRODUCED
from experiments.papers import FOLDER
from experiments.pbrf.networks import load_network
from experiments.pbrf.responses import NORMS, Decomposition
from experiments.shared import stats

# Distances from θ^s beside the gaps: of the influence estimate, and of two responses.
MOVES = {"moved": "influence", "moved by PBRF": "proximal_bregman", "moved by linearised": "linearised"}
SOLVER_BY_LISSA = "solver by LiSSA"  # beside that of an exact solve


# ------------------------------------------------------------------------------------ compute
def gap_tables(run: Run, cfg: DictConfig, curvature: str, printed: str) -> dict[str, pd.DataFrame]:
    """Return `table`, `points` and `networks`, rows for tasks, for points and gaps, and for seeds.

    `points` has, beside the gaps, the distances `MOVES`; all per example and in total (see `Decomposition`). Of
    tasks with `solver_by_lissa` also the solver error and the move by LiSSA, at the smallest of the paper's
    scalings at which it is finite; `table` names it in "LiSSA beside", if it is in every seed.

    `networks` says what a row is worth: training loss, that of the best constant outputs, gradient norm at θ^s,
    test loss, and residual of the influence estimate, the largest of its points'. With the Hessian also what its
    inverse is worth: its smallest eigenvalue, how many lie below -λ, and min |μ + λ|. Where the estimate is
    not computed (`is_solved`) what it is compared with is nan.

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
        own, states, residuals, lissas = [], [], [], []
        for seed in settings.seeds:
            found = Decomposition(load_network(run, name, settings, seed), settings.num_points)
            network, place = found.network, {"task": found.network.label, "seed": seed}
            solved = found.is_solved(curvature)
            moves = {move: (other, "base") for move, other in MOVES.items()}
            measured = found.distances(GAPS | moves, curvature)
            lissa = found.lissa_at_smallest(curvature) if settings.get("solver_by_lissa") else {}
            measured |= gaps_by_lissa(lissa)
            lissas.append(str(lissa.get("name", "")))
            state = {key.replace("_", " "): value for key, value in found.base_state().items()}
            shown = {key: state[key] for key in ("train loss", "constant loss", "gradient norm", "test loss")}
            shown |= {"residual": found.influence(curvature)[1] if solved else math.nan}
            residuals += [shown["residual"]] if solved else []
            states.append(place | {"learning rate": network.lr} | shown | _saddle(found, curvature))
            own += [
                place | {"point": int(point), "gap": gap} | dict(zip(NORMS, values[k].tolist(), strict=True))
                for gap, values in measured.items()
                for k, point in enumerate(found.points)
            ]
        size = {"P": len(network.initial), "N": len(network.train[1]), "epochs": network.num_epochs}
        sampled = settings.influence[curvature]._target_.endswith("Lissa")
        by = {"estimate": LISSA} if sampled else {}  # else solved, as the tables have it that lack the column
        by |= {"LiSSA beside": "/".join(dict.fromkeys(lissas))} if all(lissas) else {}
        row = _row(settings, size, pd.DataFrame(states), pd.DataFrame(own), printed)
        rows.append(row | by | {"residual": float(np.max(residuals)) if residuals else math.nan})
        points += own
        networks += states
    found_networks = pd.DataFrame(networks)
    run.note(seeds=sorted(set(found_networks.seed.tolist())))
    return {"table": pd.DataFrame(rows), "points": pd.DataFrame(points), "networks": found_networks}


def gaps_by_lissa(lissa: Mapping[str, Any]) -> dict[str, Any]:
    """Return the solver error and the move by LiSSA, as `Decomposition.truncated` has them; nothing of nothing."""
    return {SOLVER_BY_LISSA: lissa["solver"], "moved by LiSSA": lissa["moved"]} if lissa else {}


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
    means = states.drop(columns=["task", "seed"]).mean()
    row |= {"λ": settings.damping} | {str(name): value for name, value in means.items()}
    row["learned"] = bool((states["train loss"] < states["constant loss"]).all())
    row |= {move: own[own.gap == move].per_example.mean() for move in MOVES}
    for gap in GAPS:
        values = own[own.gap == gap].groupby("seed", sort=False)
        of_seeds = values.per_example.mean().dropna()  # nan where the estimate is not computed
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
LISSA = "LiSSA"  # in the column `estimate`
MOVED = 0.5  # of the estimate's way, below which a descent has hardly begun


def arrived(
    *,
    curvature: str = "gauss_newton",
    residual: float = 0.0,
    is_exact: bool = True,
    learned: bool = True,
    moved: float = math.nan,
    moved_by_linearised: float = math.nan,
    gradient_left: float = math.nan,
    slope: float = math.nan,
    steepest: float = math.nan,
) -> str:
    """Return why a network decides nothing about an estimate; nothing where it does. What is nan is not asked.

    Four things are needed. The network has learned something: its training loss is below that of the best
    constant outputs. The estimate is what it is called: an exact one solved to `LARGEST_RESIDUAL`, LiSSA finite at
    the paper's depth, whatever its residual. The retraining has got somewhere: its linearisation, which tends
    to the exact estimate, has moved the outputs by at least half of what that does, or, where only the PBRF is
    known, at most half of its objective's gradient is left; where it has hardly begun, anything is linear, and
    nothing predicts it for a reason. And the estimate is long enough: pointing somewhere, its `steepest` slope
    could be the `slope` that is needed.
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
    if gradient_left > MOVED:
        return (
            f"The retraining has hardly begun: of its objective's gradient {gradient_left:.2g} is left, at most "
            f"{MOVED:g} may be."
        )
    if steepest < slope:
        return (
            "The stated size is out of reach, the sign open: the estimate moves so little beside what retraining "
            f"moves that in one of the seeds no direction of it has a slope above {steepest:.2g}."
        )
    return ""


def explained(result: ClaimResult, why: str) -> ClaimResult:
    """Return the result with its explanation also where it is reproduced."""
    return replace(result, explanation=why) if result.verdict == REPRODUCED else result


def by_point(points: pd.DataFrame) -> pd.DataFrame:
    """Return the gaps of one task as columns, a row for each seed and point."""
    return points.pivot_table(index=["seed", "point"], columns="gap", values="per_example", sort=False)


def arrived_row(row: pd.Series) -> str:
    """Return why a row of `table` decides nothing, see `arrived`."""
    return arrived(
        curvature="hessian" if "smallest eigenvalue" in row else "gauss_newton",
        residual=row.residual,
        is_exact=row.get("estimate") != LISSA,
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
MOST = 2  # tasks of the headline picture
ENDS = {"value": "mean", "low": "low", "high": "high"}
SMALLEST = 5e-4  # where the paper's 0.000 stands
NOTE = (
    "distance of outputs per example, mean over the points left out; bars: 95 % t interval over seeds\n"
    "diamonds: the paper's, its solver error by LiSSA; a printed 0.000 is at 0.0005; bars to the edge go to zero"
)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the sizes of the five gaps: of the tasks nearest to the paper's, and of all with what they lack."""
    table, more = computed["table"], _by_lissa(computed["table"], computed["points"])
    solver = ""
    if more is not None:  # by it are all of the paper's solver errors
        table, solver = table.assign(**{"solver paper mean": np.nan}), ", exact"
    return {
        "figure.png": gap_figure(nearest(table), MOST, 4.0, more, solver=solver),
        "figure_more.png": gap_figure(table, 3, 2.3, more, solver=solver),
    }


def _by_lissa(table: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame | None:
    """Return LiSSA's solver errors, and the paper's, for `gap_figure`, a row for each task; None without any."""
    own = points[points.gap == SOLVER_BY_LISSA]
    of_seeds = own.groupby(["task", "seed"], sort=False).per_example.mean()
    rows = []
    for task, printed in zip(table.task, table["solver paper mean"], strict=True):
        values = of_seeds[of_seeds.index.get_level_values("task") == task]
        sizes = {"value": values.mean(), "low": t_interval(values).low, "high": t_interval(values).high}
        sizes["paper"] = np.maximum(printed, SMALLEST)
        rows.append({"task": task, "name": f"{LABELS['solver']}, LiSSA", "curvlab": "curvlab"} | sizes)
    return pd.DataFrame(rows) if len(own) else None


def nearest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the networks that decide most: the paper's own, with an interval, of as many epochs as there are."""
    decides = table.apply(lambda row: not arrived_row(row), axis=1)
    counts, many = decides & (table.epochs > 0), table.seeds >= plots.MIN_SEEDS
    own = next(of for of in (table[counts & many], table[counts], table) if len(of))
    order = own.assign(own=own["paper's row"].fillna("") != "").sort_values(
        ["own", "epochs"], ascending=False, kind="stable"
    )
    return own.loc[order.index[:MOST]]


def gap_figure(
    table: pd.DataFrame, columns: int, height: float, more: pd.DataFrame | None = None, *, solver: str = ""
) -> Figure:
    """Return a panel for each row of `table`: its gaps, what influence moves, and the rows of `more`.

    Args:
        table: of `gap_tables`.
        columns: panels side by side.
        height: of a panel, inches.
        more: task, name, value, low, high, paper and `curvlab` (whose value) of what is drawn below the gaps.
        solver: ends the label of the solver error, where `more` has those of other solutions.
    """
    columns = min(columns, len(table))
    figure, axes = plots.figure(math.ceil(len(table) / columns), columns, panel_size=(7.8 / columns, height))
    for ax, (_, row) in zip(axes.flat, table.iterrows(), strict=False):
        shown = pd.DataFrame(_sizes(row, solver))
        if more is not None:
            shown = pd.concat([shown, more[more.task == row.task]], ignore_index=True)
        smallest = shown[["value", "paper"]].where(lambda sizes: sizes > 0).min().min()
        shown["low"] = shown.low.clip(lower=1e-3 * smallest)  # an interval down to 0 ends at the edge
        paper = "paper" if shown.paper.notna().any() else None
        panels.forest(ax, shown, name="name", value="value", low="low", high="high", by="curvlab", paper=paper)
        panels.frame(ax, title=row.task + _lacking(row), log="x")
        ax.set_xlim(left=smallest / 3)
    for ax in axes[:, 1:].flat:
        ax.set_yticklabels([])
    for ax in axes.flat[max(0, len(table) - columns) : len(table)]:  # the lowest of each column
        ax.set_xlabel("‖Y_a − Y_b‖ / √N")
    for ax in axes.flat[len(table) :]:
        ax.remove()
    panels.legend(figure, title=NOTE)
    return figure


def _sizes(row: pd.Series, solver: str) -> list[dict[str, Any]]:
    rows = [{"name": "influence moves outputs by", "value": row.moved}]
    of = {"solver": solver.replace("exact", "LiSSA") if row.get("estimate") == LISSA else solver}
    for gap in GAPS:
        own = {name: row[f"{gap} per_example {end}"] for name, end in ENDS.items()}
        paper = np.maximum(row.get(f"{gap} paper mean", np.nan), SMALLEST)
        rows.append(own | {"name": LABELS[gap] + of.get(gap, ""), "paper": paper})
    return [{"curvlab": "curvlab", "low": np.nan, "high": np.nan, "paper": np.nan} | each for each in rows]


def _lacking(row: pd.Series) -> str:
    """Return its seeds, what keeps a row from deciding anything, and which of the paper's it stands in for."""
    reason = arrived_row(row)
    words = {"θ^s": "learned nothing", "The influence": "not solved", "The retraining": "hardly moved"}
    named = [panels.seeds([row.seeds])] + [text for begin, text in words.items() if reason.startswith(begin)]
    stands = row.get("stands for")
    named += [f"for {stands}"] if isinstance(stands, str) and stands else []
    return f"\n({', '.join(named)})"
