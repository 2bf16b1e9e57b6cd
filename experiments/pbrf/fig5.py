"""What the five gaps depend on (Bae et al. 2022, Sec. 6.2, App. C.4).

make pbrf-fig5 PRESET=smoke|embedded|laptop|paper ARGS="factor=width level=48"

The decomposition of `pbrf-tab5`, with one thing changed at a time: width and depth of the network, epochs and
weight decay of its training, damping, and how much of the training set is left out. Beside the five gaps stand
`whole`, the distance between cold optimum and influence estimate, and what each of the two moves from θ^s,
`retrained` and `moved`. A solver error as large as `moved` says that the linearised response has hardly begun: K/2
epochs at a tenth of the rate reach 1/(ηT), not the damping (pbrf-tab6 carries it on). The paper's estimate, LiSSA,
is cut off, too: its solver error stands beside the exact solve's. Every width and depth has its own base run.

As a sweep, in processes that may run at once and be killed: `python -m experiments run pbrf-fig5 -m
factor=width,depth,removed`, or `-m factor=width level=16,32,64`. All jobs share the store: `make pbrf-fig5` then
finds their units, and `python -m experiments gather pbrf-fig5` puts the variations' tables into one.

Sec. 6.2 and its figure are in the main text, which we do not have; App. C.4 gives settings and no number. So no
claim states what the figure shows. `small-at-every-level` asks of every level what Table 5 shows at one, of LiSSA
at the smallest scaling of the paper's list at which it is finite. The others hold directions that follow from the
appendix, and, of width and depth, what Klochkov & Liu report of Basu et al.; slopes.csv has all, not corrected.

Where the paper leaves a choice: "the percentage" in {0.1, ..., 0.9} is read as a fraction, 10 % to 90 %
(`factor=removed level=0.001` is the other reading); the groups are random, one inside the other along the levels;
their number is that of the points. A group of more than 32 enters the Bregman objective by its members in the
batch. It is not bounded below then (see `ProximalBregmanCost`); what diverges is nan, and networks.csv names it.
"""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from curvlab.influence.retraining import GAPS, LABELS, RETRAINED
from curvlab.lab import Computed, ConfigurationError, Run, Target, panels, plots, task_label, task_settings
from curvlab.lab import load_paper_numbers as load_numbers
from curvlab.lab.claims import ClaimResult, ClaimSheet, Interval, out_of_reach, t_interval, withheld
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.claims.claims import REPRODUCED
from curvlab.lab.names import reader_names
from curvlab.training import TrainingDivergedError
from experiments.papers import FOLDER
from experiments.pbrf.gaps import SOLVER_BY_LISSA, arrived, explained, gaps_by_lissa
from experiments.pbrf.networks import load_network
from experiments.pbrf.responses import NORMS, Decomposition
from experiments.shared import stats

TARGET = Target(
    __name__,
    title="Five gaps against width, depth, epochs, weight decay, damping, fraction removed",
    paper={
        "model.hidden_sizes": [1024, 1024],
        "table.csv:N": 6000,
        "training.num_epochs": 1000,
        "training.batch_size": 128,
        "training.lr": [1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001],
        "damping": 0.001,
        "num_points": 20,
        "seeds": "not stated",
        "factors.width": [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192],
        "factors.depth": [1, 3, 5, 7, 9, 11, 13, 15],
        "factors.epochs": [100, 500, 1000, 3000, 5000, 7000, 9000],
        "factors.weight_decay": [0.5, 0.1, 0.05, 0.01, 0.005, 0.001, 0.0005, 0.0001, 0.00005, 0.00001],
        "factors.damping": "0.5 to 0.000001, 12 levels",
        "factors.removed": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
    },
    curves=("table: mean over level by factor, gap",),
)
CURVATURE = "gauss_newton"
BY_LINEARISED = "moved by linearised"


# ------------------------------------------------------------------------------------ levels
@dataclass(frozen=True)
class Level:
    """One level of one factor.

    Attributes:
        factor: one of `FACTORS`.
        value: of the factor.
        settings: of the task, with this value.
        fraction: of the training set that is left out at a time; None: single points.
    """

    factor: str
    value: float
    settings: DictConfig
    fraction: float | None


# What is changed at each level, all else as in the task.
FACTORS: dict[str, Callable[[DictConfig, float], dict[str, Any]]] = {
    # of every hidden layer, at the task's depth
    "width": lambda task, value: {"model": {"hidden_sizes": [int(value)] * len(task.model.hidden_sizes)}},
    # hidden layers of the task's width
    "depth": lambda task, value: {"model": {"hidden_sizes": [task.model.hidden_sizes[0]] * int(value)}},
    "epochs": lambda task, value: {"training": {"num_epochs": int(value)}},  # K of the base run
    "weight_decay": lambda task, value: {"training": {"weight_decay": float(value)}},
    "damping": lambda task, value: {"damping": float(value)},
    "removed": lambda task, value: {},  # see `Level.fraction`
}


def levels(settings: DictConfig) -> list[Level]:
    """Return the levels of every factor of a task, or of the one `factor`, or its one `level`.

    `settings` are the task's: `factors`, the levels by factor; `factor`; `level`, which need not be among them.
    """
    chosen, level = settings.get("factor"), settings.get("level")
    if chosen is None and level is not None:
        raise ConfigurationError(f"level={level} of what? Add factor={', factor='.join(FACTORS)}.")
    if chosen is not None and chosen not in FACTORS:
        near = difflib.get_close_matches(str(chosen), FACTORS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigurationError(f"no factor {chosen!r}{hint} There are: {', '.join(FACTORS)}.")
    wanted = {factor: values for factor, values in settings.factors.items() if chosen in (None, factor)}
    if level is not None:
        wanted = {chosen: [level]}
    return [_level(settings, factor, value) for factor, values in wanted.items() for value in values]


def _level(settings: DictConfig, factor: str, value: Any) -> Level:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"a level of {factor} is a positive number, got {value!r}.")
    if factor == "removed" and value >= 1:
        raise ConfigurationError(f"a level of removed is a fraction of the training set below 1, got {value:g}.")
    changed: Any = OmegaConf.merge(settings, FACTORS[factor](settings, value))
    return Level(factor, value, changed, float(value) if factor == "removed" else None)


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables; see their columns below.

    `points`, a row for each task, factor, level, seed, group and gap: the gap per example and in total, with
    `whole`, the distance between the cold optimum and the influence estimate, `moved`, that between θ^s and the
    influence estimate, and `retrained`, that between θ^s and the cold optimum: what an estimate of zero is off by.
    `moved by linearised` is an estimate of zero's solver error; `solver by LiSSA`, `moved by LiSSA` are LiSSA's.
    `networks`, a row for each task, factor, level and seed: how large the network is, how well it is trained,
    how well the influence estimate is solved, and what diverged.
    `table`: of `points`, mean and standard deviation over groups and seeds, and over the seeds' means, with means
    of `networks`. `slopes`: see `slopes_of`.

    Args:
        run: seeds, store.
        cfg: `tasks`; `factors`, `factor`, `level`; `seeds`, `num_points` and what `load_network` takes.
    """
    points: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    for name, settings in task_settings(cfg).items():
        for level, seed in product(levels(settings), settings.seeds):
            own = {"task": task_label(name), "factor": level.factor, "level": level.value, "seed": seed}
            try:
                network = load_network(run, name, level.settings, seed)
            except TrainingDivergedError:
                networks.append(own | {"diverged": "base run"})
                continue
            found = Decomposition(network, level.settings.num_points, level.fraction)
            points += [own | row for row in _measured(found)]
            networks.append(own | _state(found))
    run.note(seeds=sorted({row["seed"] for row in networks}))
    tables = {"points": pd.DataFrame(points), "networks": pd.DataFrame(networks)}
    if tables["points"].empty:
        raise TrainingDivergedError("every base run diverged: lower training.lr, or list several to choose from.")
    return {"table": table_of(**tables), **tables, "slopes": slopes_of(tables["points"])}


def _measured(found: Decomposition) -> Iterable[dict[str, Any]]:
    """Yield the gaps of one network at one level, a row for each group and gap."""
    pairs = {"whole": ("cold", "influence"), "moved": ("influence", "base"), "retrained": ("cold", "base")}
    gaps = found.distances(GAPS | pairs | {BY_LINEARISED: ("linearised", "base")}, CURVATURE)
    gaps |= gaps_by_lissa(found.lissa_at_smallest(CURVATURE))
    for gap, values in gaps.items():
        for group, own in enumerate(values.tolist()):
            yield {"group": group, "gap": gap} | dict(zip(NORMS, own, strict=True))


def _state(found: Decomposition) -> dict[str, Any]:
    network, state = found.network, found.base_state()
    diverged = [name for name in ("cold", *RETRAINED) if not found.displacement(name).isfinite().all()]
    residual = found.influence(CURVATURE)[1]
    if math.isnan(residual):
        diverged.append("influence")
    return {
        "P": len(network.initial),
        "N": len(network.train[1]),
        "removed": len(found.groups[0]),
        "epochs": network.num_epochs,
        "learning rate": network.lr,
        "train loss": state["train_loss"],
        "gradient norm": state["gradient_norm"],
        "test loss": state["test_loss"],
        "residual": residual,
        "LiSSA": found.lissa_at_smallest(CURVATURE).get("name", ""),
        "diverged": ", ".join(diverged),
    }


def table_of(points: pd.DataFrame, networks: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each task, factor, level and gap.

    Columns: `mean` and `std` over groups and seeds of the gap per example, `seed std` of the seeds' means,
    `total`, the mean of the unnormalised gap; numbers of groups and seeds; what the gap is worth: means over
    seeds of training loss, gradient norm at θ^s, test loss, learning rate, residual of the influence estimate.
    """
    key = ["task", "factor", "level"]
    by_gap = points.groupby([*key, "gap"], sort=False)
    by_seed = points.groupby([*key, "gap", "seed"], sort=False).per_example.mean()
    table = by_gap.agg(
        mean=("per_example", _mean), std=("per_example", "std"), total=("total", _mean),
        groups=("group", "nunique"), seeds=("seed", "nunique"),
    )  # fmt: skip
    table.insert(2, "seed std", by_seed.groupby(level=[*key, "gap"], sort=False).std())
    shown = ["P", "N", "removed", "learning rate", "train loss", "gradient norm", "test loss", "residual"]
    return table.reset_index().merge(networks.groupby(key, sort=False)[shown].mean().reset_index(), on=key)


def _mean(values: pd.Series) -> float:
    """Return the mean, nan when one of them is: what diverged has no gap."""
    return float(values.mean(skipna=False))


# ------------------------------------------------------------------------------------ slopes
_ROUNDING = 9  # digits after the point: a gap that does not depend on the factor is the same at all levels


def slopes_of(points: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each task, factor and gap of `points`.

    Columns: `slope`, the mean of `seed_slopes`, with its t interval from `low` to `high`; `seeds`, how many have
    one; `direction`: rises or falls where the whole interval does, over three seeds or more.
    """
    rows = []
    for (task, factor, gap), own in points.groupby(["task", "factor", "gap"], sort=False):
        slopes = seed_slopes(own)
        interval = t_interval(slopes)
        row = {"task": task, "factor": factor, "gap": gap, "slope": np.mean(slopes) if slopes else math.nan}
        row |= {"low": interval.low, "high": interval.high, "seeds": len(slopes)}
        rows.append(row | {"direction": _direction(interval)})
    return pd.DataFrame(rows)


def seed_slopes(own: pd.DataFrame) -> list[float]:
    """Return the slope of log(mean gap per example) in log(level) by least squares, for each seed that has one.

    Levels at which the gap is 0, or nan because something diverged, do not count; two are needed. `own` are the
    rows of `points` of one task, factor and gap.
    """
    gaps = own.groupby(["seed", "level"]).per_example.agg(_mean).reset_index()
    slopes = [stats.log_log_slope(of_seed.level, of_seed.per_example) for _, of_seed in gaps.groupby("seed")]
    return [round(slope, _ROUNDING) for slope in slopes if math.isfinite(slope)]


def _direction(interval: Interval) -> str:
    if interval.has_too_few_samples:
        return "undecided"
    if interval.low == interval.high == 0:
        return "constant"
    return "rises" if interval.low > 0 else "falls" if interval.high < 0 else "undecided"


# ------------------------------------------------------------------------------------ judge
RATIO = "whole over retrained"
# Claims on slopes: which gap along which factor.
ALONG = {
    "proximity-grows-with-damping": ("damping", "proximity"),
    "linearisation-falls-with-damping": ("damping", "linearisation"),
    "non-convergence-falls-with-epochs": ("epochs", "non_convergence"),
    "warm-start-falls-with-weight-decay": ("weight_decay", "warm_start"),
    "linearisation-grows-with-removed": ("removed", "linearisation"),
    "misaligned-with-width": ("width", RATIO),
    "misaligned-with-depth": ("depth", RATIO),
}
SMALL = "small-at-every-level"


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task; intervals are over seeds."""
    points, table, networks = _with_ratio(computed["points"]), computed["table"], computed["networks"]
    results: list[ClaimResult] = []
    for task, own in points.groupby("task", sort=False):
        shown = table[table.task == task]
        elsewhere = set(points.factor) - set(own.factor)  # what other tasks alone sweep is no claim on this one
        asked = [name for name, (factor, _) in ALONG.items() if factor not in elsewhere]
        results += [_slope(claims, name, str(task), own, shown) for name in asked]
        by_factor = own.groupby("factor", sort=False)
        results += [_share(claims, str(factor), of_factor, networks) for factor, of_factor in by_factor]
    return results


def _with_ratio(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points with rows `whole over retrained`, a ratio of means over groups; 1 for no estimate."""
    key = ["task", "factor", "level", "seed"]
    means = points.groupby([*key, "gap"], sort=False).per_example.agg(_mean).unstack()
    ratio = (means.whole / means.retrained).rename("per_example").reset_index()
    return pd.concat([points, ratio.assign(gap=RATIO, group=0)], ignore_index=True)


def _slope(claims: ClaimSheet, name: str, task: str, own: pd.DataFrame, table: pd.DataFrame) -> ClaimResult:
    factor, gap = ALONG[name]
    claim, of_gap = claims.claim(name, of=task), own[(own.factor == factor) & (own.gap == gap)]
    slopes = seed_slopes(of_gap)
    if not slopes:
        return out_of_reach(claim, f"There are no two levels of {factor} here at which this gap is a number.")
    means = of_gap.groupby("level").per_example.mean()
    listed = "; ".join(
        f"{row.level:g}: {means[row.level]:.2g} (training loss {row['train loss']:.2g}, gradient norm "
        f"{row['gradient norm']:.2g})"
        for _, row in table[table.factor == factor].drop_duplicates("level").iterrows()
    )
    result = judge_claim(claim, *stats.mean(slopes), if_not_reproduced=f"By level: {listed}.")
    needed, interval = claim.criterion.at_least, result.interval
    if gap != RATIO or needed is None or interval is None or not interval.low <= 0 <= interval.high:
        return result
    return withheld(result, arrived(slope=needed, steepest=_steepest(own[own.factor == factor])))


def _steepest(own: pd.DataFrame) -> float:
    """Return the largest slope that an estimate of this size could have in any direction: that of the least seed.

    By the triangle inequality the ratio lies between 1 - m and 1 + m, where m is `moved` over `retrained`: two
    lengths, which do not depend on where the estimate points. Where m reaches 1 there is no bound.
    """
    means = own.groupby(["seed", "level", "gap"]).per_example.agg(_mean).unstack().reset_index()
    bounds = []
    for _, of_seed in means.groupby("seed"):
        share, log = of_seed.moved / of_seed.retrained, np.log(of_seed.level)
        rises = log > log.mean()  # a slope is a sum of logarithms, weighted by how far a level lies from the mean
        extreme = np.where(rises, 1 + share, np.maximum(1 - share, 0))
        bounds.append(stats.log_log_slope(of_seed.level, extreme) if (extreme > 0).all() else math.inf)
    return float(np.min(bounds))


def _share(claims: ClaimSheet, factor: str, own: pd.DataFrame, networks: pd.DataFrame) -> ClaimResult:
    """Judge the errors' largest share over the levels, of LiSSA's estimate."""
    means = pd.DataFrame(own.groupby(["seed", "level", "gap"]).per_example.agg(_mean).unstack())
    of = f"{factor}-{own.task.iloc[0]}"
    if SOLVER_BY_LISSA not in means:
        claim = claims.claim(SMALL, of=of, zero="unknown size")
        return out_of_reach(claim, arrived(is_exact=False, residual=math.nan))
    shares, zeros = (_shares(means, solver) for solver in (SOLVER_BY_LISSA, BY_LINEARISED))
    zero = zeros.groupby("seed").max().mean()
    claim = claims.claim(SMALL, of=of, zero=f"{zero:.2g}")
    if shares.isna().any():
        levels = ", ".join(f"{level:g}" for level in sorted(set(shares[shares.isna()].index.unique("level"))))
        return out_of_reach(claim, f"Something diverged at {levels}, so that not every level has its gaps.")
    at_levels = networks.query("task == @own.task.iloc[0] and factor == @factor").groupby("level").LiSSA
    taken = ["/".join(at_level.unique()) for _, at_level in at_levels]
    by_level = zip(shares.groupby("level").mean().items(), taken, strict=True)
    listed = "; ".join(f"{level:g}: {share:.2g} ({name})" for (level, share), name in by_level)
    largest = f"{_shares(means, 'solver').groupby('seed').max().mean():.2g}"
    why = f"Mean shares by level: {listed}. Solved exactly, the largest is {largest}."
    result = explained(judge_claim(claim, *stats.mean(shares.groupby("seed").max()), if_not_reproduced=why), why)
    if result.verdict == REPRODUCED and claim.criterion.holds([zero]):
        return withheld(result, f"Nothing is shown by a small share: an estimate of zero has {zero:.2g}. {why}")
    return result


def _shares(means: pd.DataFrame, solver: str) -> pd.Series:
    """Return the share of linearisation and solver in the five mean gaps, by seed and level; nan where one is."""
    gaps = means[list(GAPS)].assign(solver=means[solver])
    return (gaps.linearisation + gaps.solver) / gaps.sum(axis=1, skipna=False)


# ------------------------------------------------------------------------------------ draw
SHARE = "both errors,\n% of all five"
AXES = {"depth": "hidden layers", "weight_decay": "weight decay", "removed": "share removed"}
SHARES = {SOLVER_BY_LISSA: "LiSSA", "solver": "exact solve", BY_LINEARISED: "an estimate of zero: no change"}
RETRAINING = {gap: LABELS[gap] for gap in ("warm_start", "non_convergence", "proximity")}
OWN = {SOLVER_BY_LISSA: "LiSSA's error", "solver": "exact solve's error", "linearisation": LABELS["linearisation"]}
PARTS = {SHARE: SHARES, "retraining:\ngap / √N": RETRAINING, "influence:\ngap / √N": OWN}
STYLES = panels.styles_of([*RETRAINING.values(), *OWN.values()]) | panels.styles_of(SHARES.values())
NOTE = "mean over {}, of each over its points or groups; bars: 95 % t interval over seeds, to the edge: to zero"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return where the errors' share of the gaps is largest in the last task that varies most; all by level."""
    key = ["task", "factor", "level", "seed", "gap"]
    gaps = pd.DataFrame(computed["points"].groupby(key, sort=False).per_example.agg(_mean).unstack())
    shares = pd.DataFrame({name: 100 * _shares(gaps, solver) for solver, name in SHARES.items() if solver in gaps})
    of_tasks = gaps.reset_index().groupby("task", sort=False)
    first = str(of_tasks.factor.nunique()[::-1].idxmax())
    estimates = shares[shares.index.isin([first], "task")].drop(columns=SHARES[BY_LINEARISED], errors="ignore")
    largest = estimates.fillna(math.inf).groupby(["factor", "seed"], sort=False).max().replace(math.inf, math.nan)
    found = [
        {"factor": AXES.get(factor, factor), "of": name, **stats.in_columns("share", largest[name][factor])}
        for factor, name in product([each for each in FACTORS if each in largest.index], map(str, estimates))
    ]
    figure, ((by_level, by_factor),) = plots.figure(1, 2, panel_size=(4.0, 3.2))
    top = str(largest.groupby("factor").mean().max(axis=1).fillna(0).idxmax())
    _row([by_level], [top], first, SHARE, shares)
    by_level.set(yscale="linear", ylim=(0, None))
    look: Any = {"low": "share_low", "high": "share_high", "by": "of", "styles": STYLES}
    panels.forest(by_factor, pd.DataFrame(found), name="factor", value="share", **look)
    _rule(by_factor, "x")
    by_factor.set(xlim=(0, None), xlabel="largest share over the levels, %")
    factors = [name for name in FACTORS if name in gaps.index.unique("factor")]
    more, axes = plots.figure(3 * len(of_tasks), len(factors), panel_size=(7.8 / len(factors), 1.9), sharey="row")
    for line, (task, part) in zip(axes, product(of_tasks.groups, PARTS), strict=True):
        table = shares if part == SHARE else gaps.filter([*PARTS[part]]).rename(columns=PARTS[part])
        _row(line.tolist(), factors, str(task), part, table)
    for each in (figure, more):
        panels.legend(each, title=NOTE.format(panels.seeds(of_tasks.seed.nunique())))
    return {"figure.png": figure, "figure_more.png": more}


def _rule(ax: Axes, axis: str) -> None:
    """Draw a line at the largest share that the paper's Table 5 shows, in percent."""
    printed = load_numbers("pbrf", folder=FOLDER).in_table("Table 5")
    paper = pd.Series({(number.row, number.column): number.value for number in printed}).unstack()
    share = float(100 * _shares(paper, "solver").max())
    found: dict[str, Any] = {axis: share, "label": f"the paper's largest, {share:.2g} % (Table 5)"}
    panels.rule(ax, linestyle="-", **found)


def _row(axes: Sequence[Axes], factors: Sequence[str], task: str, label: str, table: pd.DataFrame) -> None:
    """Draw a panel for each factor: a task's columns of the table over the factor's levels."""
    of_task = table[table.index.isin([task], "task")]
    for ax, factor in zip(axes, factors, strict=True):
        own = of_task[of_task.index.isin([factor], "factor")]
        if own.empty:
            ax.set_axis_off()
            ax.text(0, 0.5, f"{AXES.get(factor, factor)}:\nnot varied here", fontsize=8.5)
            continue
        levels = own.index.unique("level").sort_values()
        for turn, name in enumerate(map(str, own)):  # side by side, or those that agree would hide each other
            values = own[name].dropna().reset_index()
            place = values.level.map(levels.get_loc) + 0.16 * (turn - (own.shape[1] - 1) / 2)
            panels.lines(ax, values.assign(place=place), x="place", y=name, label=name, styles=STYLES, bars=True)
        if label == SHARE:
            _rule(ax, "y")
        panels.frame(ax, x=AXES.get(factor, factor), y=label if ax is axes[0] else "", log="y")
        few = slice(None, None, math.ceil(len(levels) / 4))
        ax.set_xticks(range(len(levels))[few], [f"{level:g}" for level in levels[few]], fontsize=8)
    smallest = of_task.groupby(["factor", "level"]).mean()
    axes[0].set_ylim(bottom=smallest.where(smallest > 0).min().min() / 3 if len(smallest.dropna()) else None)
    name = textwrap.fill(reader_names([task], whole=True)[task], 14 if len(axes) > 1 else 40)
    axes[0].set_title(name, loc="left", fontsize=9)
