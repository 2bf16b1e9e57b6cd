"""Smoothing constants alpha and epsilon of NGD against its LLC (Saghir et al. 2024, Fig. 3).

make ngd-fig3 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist alphas=[0.01,1]"

Every network of a seed starts from the same weights and sees the same batches; SGD, which NGD becomes for alpha ->
∞ (at this lr, see curvlab.optim.NGD), is the band in both panels. One constant is varied at a time, the other
stands as in `ngd`; the paper says for neither panel what it was. Panel (b) is of Kaldi's epsilon, a floor of the
eigenvalues of each axis's estimate, an element's squared gradient, so it matters from there on; alpha multiplies
it. The paper's Eq. 7 floors tr(F), which is another sweep: below tr(F) nothing changes, above it κ = αε/d grows as
by alpha. `exact_ngd` has that floor, and is not swept along it. An LLC is given only where training has converged
and the estimate is valid, from the lowest sampled point (ngd-fig1); others are drawn hollow and count in no claim.
Networks differ in training loss, too, so the sweep of alpha is shown a second time at equal loss (`equal_loss`). A
task of its own takes exact NGD, with the full Fisher matrix of each batch.

At `laptop` the step is a third of what it was, so that it is stable where the chains end, at most 0.25 of the
limit (`LLC.stability`), for all but seven of exact NGD's states, which are marked. The MLP's LLC changed
little, no direction turned; 16 seeds of the MLP, since seven left more undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Computed, Run, Target, panels, plots, task_label, task_settings
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.claims.intervals import Interval, t_interval
from experiments.ngd.sampling import LOWEST, curvature_cutoff, measured_both_ways, whose
from experiments.ngd.trajectories import DIVERGED, ESTIMATE, Network, final_estimate, first_columns, trajectory
from experiments.shared import stats

TARGET = Target(
    __name__,
    title="Smoothing and floor of the Fisher matrix against the LLC",
    paper={
        "data.num_train": "not stated",
        "model.hidden_sizes": "not stated",
        "seeds": "not stated",
        "training.num_epochs": "not stated",
        "ngd.lr": "not stated; 0.01 elsewhere",
        "sgd.lr": "not stated; NGD becomes SGD at η/κ as κ -> ∞ (Sec. 3.2); ours, rescaled, at NGD's own lr",
        "ngd.alpha": "in the sweep of epsilon: not stated",
        "ngd.epsilon": "in the sweep of alpha: not stated; 1e-10 elsewhere; a floor of tr(F), not of eigenvalues",
    },
)
SWEEPS = {"alpha": "smoothing α", "epsilon": "floor ε"}
CONSTANT = {"alpha": "alpha", "epsilon": "Kaldi's epsilon"}
FLOOR = {"alpha": "", "epsilon": "; it is a floor of each axis's eigenvalues, Eq. 7's of tr(F)"}
PANEL = {"alpha": "(a)", "epsilon": "(b)"}  # of the paper's figure
ENDS = ("low", "high")
MIN_VALUES = 3  # of a sweep, for a seed's trend


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `summary` (`summary_table`), `trends` (`trend_table`), and the sweep of alpha at equal loss.

    That is `equal_loss` with its `equal_loss_trends`, of the same names.

    `table` has one row for each task, sweep (sgd, alpha, epsilon), value of the constant and seed; further columns
    as of `final_estimate`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`, `sgd` and `ngd` (see `make_optimizer`), `alphas`,
            `epsilons`, and what `final_estimate` and `equal_loss` take.
    """
    parts, at_equal_loss = [], []
    for network in Network.each(run, cfg):
        settings, place = network.settings, {"task": network.label}
        cells = [("sgd", math.nan, {**settings.sgd})]
        cells += [("alpha", alpha, {**settings.ngd, "alpha": alpha}) for alpha in settings.alphas]
        cells += [("epsilon", epsilon, {**settings.ngd, "epsilon": epsilon}) for epsilon in settings.epsilons]
        for sweep, value, optimizer in cells:
            for seed in settings.seeds:
                row = final_estimate(network, optimizer, settings, seed)
                parts.append(row.assign(**place, sweep=sweep, value=value, seed=seed))
        optimizers = {value: optimizer for sweep, value, optimizer in cells if sweep != "epsilon"}
        at_equal_loss += [
            equal_loss(network, optimizers, settings, seed).assign(**place) for seed in settings.seeds
        ]
    table = pd.concat(parts, ignore_index=True)
    table = first_columns(table, "task", "sweep", "value", "seed", *ESTIMATE)
    run.note(seeds=list(cfg.seeds))
    equal = first_columns(pd.concat(at_equal_loss, ignore_index=True), "task")
    tables = {"table": table, "summary": summary_table(table), "trends": trend_table(table)}
    return tables | {"equal_loss": equal, "equal_loss_trends": equal_loss_trends(equal)}


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each value: seeds, those that converged, those with an LLC, its mean, 95 % t interval.

    llc is from the lowest sampled point; llc_raw and descent, whose sum it is, are means over the same seeds.
    """
    rows = []
    for place, own in table.groupby(["task", "sweep", "value"], sort=False, dropna=False):
        counted = own[own.llc.notna()]
        rows.append(
            dict(zip(("task", "sweep", "value"), place, strict=True))
            | {"seeds": len(own), "converged": int(own.converged.sum()), "llcs": len(counted)}
            | stats.in_columns("llc", counted.llc)
            | {"llc_raw": counted.llc_raw.mean(), "descent": counted.descent.mean()}
            | {"curvature_cutoff": curvature_cutoff(own)}
            | {"train_loss": own.train_loss.mean(), "validation_loss": own.validation_loss.mean()}
            | {"problems": "; ".join(sorted(set(own.problem.dropna()) - {""}))}
        )
    return pd.DataFrame(rows)


def trend_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, sweep and seed, over the values that have an LLC.

    Columns: values, how many; rank_correlation, Spearman's, of LLC and value; slope, of ln LLC on log10 of the
    value; loss_rank_correlation, of the training loss and the value; most_smoothed, the largest value, with
    llc_there and sgd, the LLCs of NGD and of SGD at the same seed.
    """
    sgd = table[table.sweep == "sgd"].set_index(["task", "seed"]).llc
    rows = []
    for (sweep, task, seed), own in table[table.sweep != "sgd"].groupby(["sweep", "task", "seed"], sort=False):
        used = own[own.llc.notna() & (own.llc > 0)].sort_values("value")
        row: dict[str, Any] = {"task": task, "sweep": sweep, "seed": seed, "values": len(used)}
        row |= {"sgd": sgd.get((task, seed), np.nan), "curvature_cutoff": curvature_cutoff(own)}
        row |= dict.fromkeys(("rank_correlation", "slope", "loss_rank_correlation"), np.nan)
        at_most = own.iloc[own.value.argmax()]
        row |= {"most_smoothed": at_most.value, "llc_there": at_most.llc}
        if len(used) >= MIN_VALUES:
            row["rank_correlation"] = stats.spearman(used.value, used.llc)
            row["slope"] = float(np.polyfit(np.log10(used.value), np.log(used.llc), 1)[0])
            row["loss_rank_correlation"] = stats.spearman(used.value, used.train_loss)
        rows.append(row)
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------ at equal training loss
def equal_loss(
    network: Network, optimizers: Mapping[float, Mapping[str, Any]], settings: DictConfig, seed: int
) -> pd.DataFrame:
    """Return one row for each optimizer: its LLC where its training loss first falls to one and the same level.

    The level is the highest loss at the last epoch among those that have converged. The LLC is interpolated
    linearly in the logarithm of the loss between the two checkpoints beside the level; nan where one of the two
    has no valid estimate, or where training stays above the level. An optimizer that passes the level before its
    first checkpoint is taken there.

    Columns: value; level (nats); loss_before, loss_after of the two checkpoints, epoch of the later; valid; llc,
    from the lowest sampled point; problem; curvature_cutoff.

    Args:
        network: data and model.
        optimizers: see `make_optimizer`, by value of the constant; nan for SGD.
        settings: as of `trajectory`, with `training.checkpoints`, the last epoch included, and `converged_below`.
        seed: of the start and the order of batches.
    """
    unsampled: Any = OmegaConf.merge(settings, {"llc": None, "trace": None})
    curves = {value: _losses(network, optimizer, unsampled, seed) for value, optimizer in optimizers.items()}
    ends = [curve.train_loss.iloc[-1] for curve in curves.values()]
    level = max((end for end in ends if end <= settings.converged_below), default=np.nan)
    rows = []
    for value, optimizer in optimizers.items():
        curve = curves[value]
        row: dict[str, Any] = {"value": value, "seed": seed, "level": level, "valid": False, "llc": np.nan}
        below = np.flatnonzero(curve.train_loss.to_numpy(float) <= level)
        if len(below) == 0:
            rows.append(row | {"problem": "stays above the level"})
            continue
        beside = curve.epoch.iloc[[max(below[0] - 1, 0), below[0]]].tolist()
        sampled = trajectory(network, optimizer, settings, seed, llc_epochs=set(beside))
        rows.append(row | interpolated(sampled.set_index("epoch").loc[beside], level))
    return pd.DataFrame(rows)


def equal_loss_trends(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task and seed, over the values of alpha that have an LLC at equal loss.

    Columns: values, how many; level; rank_correlation, Spearman's, of value and LLC; sgd, SGD's LLC there;
    least_smoothed, the smallest value with an LLC, and llc_there.
    """
    rows = []
    for (task, seed), own in table.groupby(["task", "seed"], sort=False):
        used = own[own.value.notna() & own.llc.notna()].sort_values("value")
        sgd = own[own.value.isna()].llc
        row: dict[str, Any] = {"task": task, "seed": seed, "values": len(used), "level": own.level.iloc[0]}
        row |= {"curvature_cutoff": curvature_cutoff(own), "sgd": sgd.iloc[0] if len(sgd) else np.nan}
        row |= dict.fromkeys(("rank_correlation", "least_smoothed", "llc_there"), np.nan)
        if len(used):
            row |= {"least_smoothed": used.value.iloc[0], "llc_there": used.llc.iloc[0]}
        if len(used) >= MIN_VALUES:
            row["rank_correlation"] = stats.spearman(used.value, used.llc)
        rows.append(row)
    return pd.DataFrame(rows)


def _losses(network: Network, optimizer: Mapping[str, Any], settings: DictConfig, seed: int) -> pd.DataFrame:
    try:
        return trajectory(network, optimizer, settings, seed)
    except ArithmeticError:  # diverged
        return pd.DataFrame([dict.fromkeys(DIVERGED, np.inf) | {"epoch": settings.training.num_epochs}])


def interpolated(beside: pd.DataFrame, level: float) -> dict[str, Any]:
    """Return the LLC at the level from the checkpoints before and after it, by epoch."""
    losses = beside.train_loss.to_numpy(float)
    row: dict[str, Any] = {"loss_before": losses[0], "loss_after": losses[1], "epoch": beside.index[1]}
    problems = beside.get("problem", pd.Series(dtype=str)).dropna()
    row |= {"valid": bool(beside.valid.astype(bool).all()), "problem": "; ".join(sorted(set(problems) - {""}))}
    row["curvature_cutoff"] = curvature_cutoff(beside.reset_index())
    if row["valid"]:
        # np.interp wants rising abscissae: the loss after is the lower one.
        logs, llcs = np.log(losses[::-1]), beside.llc.to_numpy(float)[::-1]
        row["llc"] = float(np.interp(np.log(level), logs, llcs))
    return row


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge both constants on each task; intervals are over seeds."""
    table, trends, results = computed["table"], {"llc": computed["trends"]}, []
    raw = table.llc_raw.where(table.llc.notna() & (table.llc_raw > 0))  # below 0 it has no logarithm
    tables = {"llc": table, "llc_raw": table.assign(llc=raw)}
    trends["llc_raw"] = trend_table(tables["llc_raw"])
    at_equal_loss, its_trends = computed["equal_loss"], computed["equal_loss_trends"]
    names = {task_label(name): own.ngd.name for name, own in task_settings(computed.config).items()}
    for task in table.task.unique():
        for sweep, panel in PANEL.items():
            if table[(table.task == task) & (table.sweep == sweep)].empty:
                continue
            for column, words in measured_both_ways(task):
                own, swept = (
                    part[(part.task == task) & (part.sweep == sweep)] for part in (trends[column], tables[column])
                )
                of = words | {"of": f"{sweep}-{words['of']}", "panel": panel}
                of |= {"constant": CONSTANT[sweep], "floor": FLOOR[sweep]} | whose(names[task] == "exact_ngd")
                results += [
                    _falls(claims.claim("llc-falls-with", **of), sweep, own, swept),
                    _never_rises(claims.claim("llc-never-rises-with", **of), sweep, swept),
                    _approaches_sgd(claims.claim("llc-approaches-sgd", **of), sweep, own),
                ]
        found, equal = (part[part.task == task] for part in (at_equal_loss, its_trends))
        results.append(_falls_at_equal_loss(claims.claim("llc-falls-at-equal-loss", of=task), equal, found))
    return results


def _falls(claim: Claim, sweep: str, trends: pd.DataFrame, table: pd.DataFrame) -> ClaimResult:
    used = trends.dropna(subset="rank_correlation")
    if len(used) < 2:
        reason = f"Fewer than two seeds have {MIN_VALUES} estimates that count: {_left_out(table)}"
        return out_of_reach(claim, reason)
    slope = t_interval(used.slope)
    why = (
        f"Over a decade of {sweep} the LLC changes by {100 * np.expm1(used.slope.mean()):+.1f} % "
        f"({100 * np.expm1(slope.low):+.1f} to {100 * np.expm1(slope.high):+.1f}); the training loss, which the "
        f"LLC depends on, correlates with {sweep} by {used.loss_rank_correlation.mean():+.2f}. {_left_out(table)}"
    )
    found = used.rank_correlation
    return judge_claim(claim, found.mean(), _of_correlations(found), if_not_reproduced=why)


def _of_correlations(values: pd.Series) -> Interval:
    """Return the t interval over seeds, cut where correlations end."""
    interval = t_interval(values)
    return replace(interval, low=max(interval.low, -1.0), high=min(interval.high, 1.0))


def _never_rises(claim: Claim, sweep: str, table: pd.DataFrame) -> ClaimResult:
    """Judge the largest rise from one value to the next: each end is the highest of all steps' intervals."""
    logs = table.pivot_table(index="seed", columns="value", values="llc").apply(np.log)
    steps = logs.diff(axis="columns").iloc[:, 1:]
    steps = steps.loc[:, steps.count() >= 2]
    if steps.empty:
        return out_of_reach(claim, f"Nowhere have two seeds an LLC at neighbouring values of {sweep}.")
    # As many steps are looked at, so many chances there are for one to rise.
    confidence = 1 - 0.05 / steps.shape[1]
    intervals = {after: t_interval(own.dropna(), confidence=confidence) for after, own in steps.items()}
    ends = pd.DataFrame({name: {after: getattr(own, name) for after, own in intervals.items()} for name in ENDS})
    ends["mean"] = steps.mean()
    low, high, mean = np.exp(ends.max()[["low", "high", "mean"]])
    fewest = min(own.num_samples for own in intervals.values())
    kind = f"t 95 %, the highest of {len(ends)} steps together, {fewest} seeds or more"
    values = [float(value) for value in logs.columns]
    told = {name: values.index(float(ends[name].idxmax())) for name in ends}  # type: ignore[arg-type]
    names = {name: f"{values[at - 1]:g} to {values[at]:g}" for name, at in told.items()}
    why = (
        f"Its upper end is that of the step from {sweep} = {names['high']}, its lower end that of {names['low']}, "
        f"the largest mean that of {names['mean']}. {_left_out(table)}"
    )
    found = Interval(float(low), float(high), kind, fewest)
    return judge_claim(claim, float(mean), found, if_not_reproduced=why)


def _falls_at_equal_loss(claim: Claim, trends: pd.DataFrame, table: pd.DataFrame) -> ClaimResult:
    swept = table[table.value.notna()]
    lacking = swept[swept.llc.isna()]
    left_out = f"{len(lacking)} of {len(swept)} networks have no LLC at the level." if len(lacking) else ""
    used = trends.dropna(subset="rank_correlation")
    if len(used) < 2:
        return out_of_reach(claim, f"Fewer than two seeds have {MIN_VALUES} estimates that count. {left_out}")
    above = (used.llc_there / used.sgd).dropna()
    beside = f" {100 * (above.mean() - 1):+.0f} % on SGD's there" if len(above) else ""
    why = (
        f"At a training loss of {used.level.min():.3g} to {used.level.max():.3g}, which all networks of a seed "
        f"pass, the LLC at the smallest alpha is {used.llc_there.mean():.3g}{beside}. {left_out}"
    )
    found = used.rank_correlation
    return judge_claim(claim, found.mean(), _of_correlations(found), if_not_reproduced=why)


def _approaches_sgd(claim: Claim, sweep: str, trends: pd.DataFrame) -> ClaimResult:
    ratios = (trends.llc_there / trends.sgd).dropna()
    if len(ratios) < 2:
        return out_of_reach(claim, f"At the largest {sweep}, or for SGD, fewer than two seeds have an LLC.")
    why = (
        f"At the largest {sweep}, {trends.most_smoothed.iloc[0]:g}, NGD is not yet SGD, or {len(ratios)} seeds "
        "are too few to tell: compare the training losses in the figure."
    )
    return judge_claim(claim, ratios.mean(), t_interval(ratios), if_not_reproduced=why)


def _left_out(table: pd.DataFrame) -> str:
    lacking = table[table.llc.isna()]
    if lacking.empty:
        return "Every estimate counts."
    values = ", ".join(f"{value:g}" for value in sorted(lacking.value.unique()))
    return f"{len(lacking)} of {len(table)} estimates are left out (at {values}): not converged, or not valid."


# ------------------------------------------------------------------------------------ draw
EQUAL = "NGD, at equal training loss"
STYLES = {
    "NGD": panels.styles_of(["ngd"])["ngd"],
    EQUAL: panels.styles_of(["ngd"])["ngd"] | {"marker": "^", "linestyle": "--"},
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return a figure of the first task, and of the others."""
    table = computed["table"]
    first = table.task == table.task.iloc[0]
    figures = {"figure.png": table[first], "figure_more.png": table[~first]}
    return {name: _sweeps(own, computed["equal_loss"]) for name, own in figures.items() if len(own)}


def _sweeps(tasks: pd.DataFrame, equal: pd.DataFrame) -> Figure:
    """Draw for each task LLC and training loss against alpha and epsilon, SGD as a band."""
    equal = equal.assign(place=lambda rows: 1.25 * rows.value)  # a little to the right
    swept_and_equal = (tasks, equal[equal.task.isin(tasks.task)].assign(sweep="equal"))
    missing = max(_most_missing(table) for table in swept_and_equal)
    figure, rows = panels.rows(tasks, by="task", columns=4, panel_size=(3.2, 2.6))
    for axes, task, table in rows:
        axes[0].sharey(axes[1])
        axes[2].sharey(axes[3])
        there = equal[equal.task == task]
        for index, sweep in enumerate(SWEEPS):
            own = table[table.sweep == sweep]
            if own.empty:  # a task without this sweep
                axes[index].set_axis_off()
                axes[2 + index].set_axis_off()
                continue
            sgd = table[table.sweep == "sgd"]
            _llc_panel(axes[index], own, sgd, there if sweep == "alpha" else there[:0], counted=missing > 1)
            panels.lines(
                axes[2 + index], own, x="value", y="train_loss", bars=True, seeds=True, label="NGD", styles=STYLES
            )
            _band(axes[2 + index], sgd.train_loss, counted=True)
            panels.frame(axes[index], x=SWEEPS[sweep], y="LLC from the\nlowest point", log="x")
            panels.frame(axes[2 + index], x=SWEEPS[sweep], y="training loss (nats)", log="xy")
            if missing > 1:
                panels.counts(axes[index], own.assign(by="NGD"), x="value", valid="llc", by="by", styles=STYLES)
        swept = there[there.value.notna()].assign(by=EQUAL)
        if missing > 1:
            panels.counts(axes[0], swept, x="place", valid="llc", by="by", styles=STYLES)
        axes[0].set_title(str(task))
    number = panels.seeds(tasks.groupby("task").seed.nunique())
    note = f"mean over {number}, 95 % t interval (from three on); dots: seeds\n{LOWEST}"
    if any(text.get_text().isdigit() for ax in figure.axes for text in ax.texts if not text.get_gid()):
        note += "\nat the end of SGD's line: how many of its seeds count"
    if missing == 1:
        note += "\nof the LLC all seeds count at each setting, or all but one"
    panels.legend(figure, title=note, columns=3, axes=[figure.axes[0]])
    return figure


def _most_missing(table: pd.DataFrame) -> int:
    """Return of how many seeds at most one setting has no LLC that counts."""
    lacks = table.llc.isna().groupby([table.task, table.sweep, table.value.fillna(-1.0)])
    return int(lacks.sum().max())


def _llc_panel(ax: Axes, own: pd.DataFrame, sgd: pd.DataFrame, equal: pd.DataFrame, *, counted: bool) -> None:
    panels.lines(ax, own, x="value", y="llc", bars=True, seeds=True, label="NGD", styles=STYLES)
    swept = equal[equal.value.notna() & equal.llc.notna()]
    if len(swept):
        panels.lines(ax, swept, x="place", y="llc", bars=True, label=EQUAL, styles=STYLES, linewidth=1.0)
    at_level = equal[equal.value.isna()].llc.dropna()
    if len(at_level):
        color = panels.COLORS["sgd"]
        panels.rule(ax, y=at_level.mean(), color=color, linestyle=":", label="SGD, at equal training loss")
    _band(ax, sgd.llc, counted=counted)
    out, label = own[own.llc.isna() & own.estimate.notna()], "NGD, not converged or not valid"
    kind: dict[str, Any] = {"label": label, "styles": {label: STYLES["NGD"]}, "identity": False}
    panels.scatter(ax, out, x="value", y="estimate", size=22, facecolor="white", **kind)


def _band(ax: Axes, seeds: pd.Series, *, counted: bool) -> None:
    """Draw SGD's mean and interval, and, `counted`, at the line's end how many seeds count where not all do."""
    values, color = seeds.dropna(), panels.COLORS["sgd"]
    if not len(values):
        return
    panels.rule(ax, y=values.mean(), color=color, linewidth=1.2, label="SGD")
    if counted and len(values) < len(seeds):
        at_end: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "va": "center", "fontsize": 7}
        ax.annotate(str(len(values)), (1.01, values.mean()), color=color, **at_end)
    if len(values) >= plots.MIN_SEEDS:
        interval = t_interval(values)
        ax.axhspan(interval.low, interval.high, color=color, alpha=0.15, linewidth=0)
