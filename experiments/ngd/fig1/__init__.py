"""LLC of networks trained by NGD and by SGD, over widths and depths (Saghir et al. 2024, Fig. 1).

make ngd-fig1 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist seeds=[0,1,2]"

Both optimizers start from the same weights and see the same batches for as many epochs. An LLC is given only where
training has converged (training loss below `converged_below`) and the estimate is valid: chains mixed, loss not
below the start; the others stand in the table with the reason. It is measured from the lowest sampled point
(`llc`), since from the weights themselves, as in the paper, it lacks what the loss can still fall
(`descent`); `llc_raw` is the paper's, in figure_losses.png. The t-tests are Welch's, over seeds. The paper's
"t-value of 1.9^-31" is a p-value of 1.9e-31. NGD as in ngd-fig2.

The paper compares at one learning rate. For the networks of `tuned_and_matched` the second figure asks how the
answer depends on that: each optimizer at the learning rate of its smallest validation loss, chosen from one grid
with equal seeds and epochs (tuning.csv, tuned.csv), and both at equal training loss, interpolated between
checkpoints (equal.csv, matched.csv). settings.csv puts them beside the paper's setting, for the LLC and for tr(H),
the other quantity of ngd-fig2.

An LLC is a number for one localization γ: directions of curvature below γ/(nβ) count little. The paper states
neither γ nor the step size. The networks of `cutoffs` are sampled again, with weaker and stronger localizations
and with other step sizes (cutoffs.csv, cutoff_summary.csv): does the difference keep its sign, and its size? One
run of Lanczos has what the Gauss-Newton matrix alone gives at every cut-off (quadratic.csv, in the second figure).

No step is sound for which ε(nβλmax + γ)/4 passes 0.25 where the chains end: `laptop` takes a third of the step
with which its first tables passed it, in three of eight networks tried.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig
from scipy import stats

from curvlab.lab import Computed, ConfigurationError, Run, Target, load_paper_numbers, panels, plots
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.claims.intervals import Interval, exact
from experiments.ngd.fig1.cutoffs import cutoff_tables, judge_cutoffs, judge_quadratic, quadratic_tables
from experiments.ngd.fig1.tuned_and_matched import (
    Compared,
    draw_tuned_and_matched,
    judge_tuned_and_matched,
    tuned_and_matched,
)
from experiments.ngd.fig1.widths import PLACE, by_network, networks, place_of
from experiments.ngd.sampling import curvature_cutoff
from experiments.ngd.trajectories import ESTIMATE, final_estimate, first_columns
from experiments.papers import FOLDER
from experiments.shared.stats import in_columns

TARGET = Target(
    __name__,
    title="LLC of NGD and SGD over widths",
    paper={
        "data.num_train": "60000, not stated",
        "widths": "a range, in the figure",
        "seeds": "not stated",
        "training.num_epochs": "not stated",
        "optimizers.*.lr": "0.01 for both; no tuning stated",
        "optimizers.ngd.alpha": 0.01,
        "training.batch_size": 128,
        "tuned_and_matched.lrs": "no such comparison",
        "tuned.csv:lr": "no such comparison",
        "llc.localization": "not stated",
        "llc.step_size": "not stated",
        "cutoffs.localizations": "no such comparison",
        "settings_tried": "not stated",
    },
)


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `summary` (`summary_table`), and further tables.

    Those are of `tuned_and_matched`, `cutoff_tables` and `quadratic_tables`.

    `table` has one row for each task, width, optimizer and seed; further columns as of `final_estimate`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `widths` (0: the model as it is), `seeds`, `optimizers` by
            name, `judged_optimizer`, `tuned_and_matched`, `cutoffs`, and what `final_estimate` takes.
    """
    found = networks(run, cfg)
    for key in ("tuned_and_matched", "cutoffs"):  # asked now, not after all trainings
        if not any(network.settings.width in network.settings[key].widths for network in found):
            raise ConfigurationError(
                f"{key}.widths names none of the widths of any task: add one, {key}.widths=[...]"
            )
    parts = [
        final_estimate(network, optimizer, network.settings, seed).assign(
            **place_of(network), optimizer=str(label), seed=seed
        )
        for network in found
        for label, optimizer in network.settings.optimizers.items()
        for seed in network.settings.seeds
    ]
    table = pd.concat(parts, ignore_index=True)
    table = first_columns(table, *PLACE, "optimizer", "seed", *ESTIMATE)
    run.note(seeds=list(cfg.seeds))
    tables = {"table": table, "summary": summary_table(table)}
    return tables | tuned_and_matched(found) | cutoff_tables(found) | quadratic_tables(found)


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each network and optimizer: mean LLC with 95 % t interval, losses, and p against sgd.

    llc is from the lowest sampled point; llc_raw and descent, whose sum it is, are means over the same seeds.
    """
    rows = []
    for place, network in table.groupby([*PLACE], sort=False):
        reference = network[network.optimizer == "sgd"].llc.dropna()
        for optimizer, own in network.groupby("optimizer", sort=False):
            counted = own[own.llc.notna()]
            row: dict[str, Any] = dict(zip(PLACE, place, strict=True)) | {"optimizer": optimizer}
            row |= {"seeds": len(own), "converged": int(own.converged.sum()), "llcs": len(counted)}
            row |= {"train_loss": own.train_loss.mean(), "validation_loss": own.validation_loss.mean()}
            row |= in_columns("llc", counted.llc)
            row |= {"llc_raw": counted.llc_raw.mean(), "descent": counted.descent.mean()}
            row |= {"difference": np.nan, "p": np.nan, "curvature_cutoff": curvature_cutoff(own)}
            if optimizer != "sgd" and min(len(counted), len(reference)) > 1:
                row["difference"] = counted.llc.mean() - reference.mean()
                row["p"] = float(stats.ttest_ind(counted.llc, reference, equal_var=False).pvalue)
            rows.append(row)
    return pd.DataFrame(rows)


def relative_difference(table: pd.DataFrame, judged: str, column: str) -> tuple[float, Interval]:
    """Return the judged optimizer's means over SGD's, both summed over widths, less one, and its 95 % interval.

    Every width has the mean of its own valid seeds, so that a seed that lacks a width shifts no other. To first
    order the variance is (sum v_judged + ratio² sum v_sgd) / (sum of SGD's means)², v of each mean, with the
    degrees of freedom of Welch and Satterthwaite; nan where a width has fewer than two seeds.

    Args:
        table: rows of one task: optimizer, width, seed, llc and `column`.
        judged: optimizer that is compared with SGD.
        column: what is compared, over the rows that have an llc.
    """
    own = table[table.llc.notna() & table.optimizer.isin([judged, "sgd"])]
    by_width = own.groupby(["optimizer", "width"])[column].agg(["mean", "var", "count"])
    num_widths = table[table.optimizer == judged].width.nunique()
    fewest = int(by_width["count"].min()) if len(by_width) == 2 * num_widths else 0
    kind = f"t 95 % (Welch), {fewest} to {int(by_width['count'].max()) if len(by_width) else 0} seeds a width"
    sums = by_width["mean"].groupby("optimizer").sum()
    ratio = float(sums[judged] / sums["sgd"])
    if fewest < 2:
        return ratio - 1, Interval(np.nan, np.nan, kind, fewest)
    weights = np.where(by_width.index.get_level_values("optimizer") == judged, 1.0, ratio**2) / sums["sgd"] ** 2
    parts = weights * (by_width["var"] / by_width["count"]).to_numpy()
    variance = parts.sum()
    degrees = variance**2 / (parts**2 / (by_width["count"].to_numpy() - 1)).sum()
    half = float(stats.t.ppf(0.975, degrees) * np.sqrt(variance))
    return ratio - 1, Interval(ratio - 1 - half, ratio - 1 + half, kind, fewest)


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each task (depth, LeNet-5) over its widths, then the networks of `tuned_and_matched` and `cutoffs`."""
    table, summary, settings = computed["table"], computed["summary"], computed["settings"]
    judged, results = computed.config["judged_optimizer"], []
    for task in summary.task.unique():
        named = [claims.claim(name, of=task) for name in ("llc-higher", "llc-significant", "llc-higher-raw")]
        own, its_summary, its_settings = (part[part.task == task] for part in (table, summary, settings))
        results += _judge_task(named, own, its_summary, its_settings, judged)
    results += judge_tuned_and_matched(Compared.of(computed), claims)
    results += judge_cutoffs(computed["cutoffs"], computed["cutoff_summary"], computed["quadratic"], claims)
    return results + judge_quadratic(computed["quadratic"], computed["cutoff_summary"], claims)


def _judge_task(
    claims: list[Claim], table: pd.DataFrame, summary: pd.DataFrame, settings: pd.DataFrame, judged: str
) -> list[ClaimResult]:
    """Judge direction, significance, and the direction from the trained weights; intervals are over seeds."""
    higher, significant, raw = claims
    own = summary[summary.optimizer == judged]
    lacking = own[own.p.isna()]
    if len(lacking):
        reason = f"No LLC at width {', '.join(map(str, lacking.width))}: {_why_none(table, judged)}"
        return [out_of_reach(claim, reason) for claim in claims]
    why = _by_width(summary, judged) + _losses(summary, judged) + _elsewhere(settings)
    difference, raw_difference = (relative_difference(table, judged, column) for column in ("llc", "llc_raw"))
    # The tests have two sides: a width at which the judged one is the lower one speaks against the claim.
    largest = float(own.p.where(own.difference > 0, 1.0).max())
    counts = summary[summary.optimizer.isin([judged, "sgd"])].llcs
    tests = exact(largest, kind=f"largest of {len(own)} tests, {counts.min()} to {counts.max()} seeds each")
    return [
        judge_claim(higher, *difference, if_not_reproduced=why),
        judge_claim(significant, largest, tests, if_not_reproduced=why),
        judge_claim(raw, *raw_difference, if_not_reproduced=why),
    ]


def _by_width(summary: pd.DataFrame, judged: str) -> str:
    """Return what each width alone says, with the seeds that have a valid LLC."""
    sgd, own = (summary[summary.optimizer == name].set_index("width") for name in ("sgd", judged))
    parts = [
        f"{f'width {width}: ' if width else ''}{100 * own.difference[width] / sgd.llc[width]:+.0f} % "
        f"(p = {own.p[width]:.2g}; {own.llcs[width]} and {sgd.llcs[width]} of {own.seeds[width]} seeds)"
        for width in own.index
    ]
    return f"{'; '.join(parts)}. "


def _why_none(table: pd.DataFrame, judged: str) -> str:
    own = table[table.optimizer.isin([judged, "sgd"]) & table.llc.isna()]
    if own.train_loss.isna().any():
        return "training diverged."
    if (~own.converged).any():
        return f"training has not converged (training loss {own.train_loss.max():.3g})."
    return f"the estimates are not valid ({own.problem.dropna().iloc[0]})."


def _losses(summary: pd.DataFrame, judged: str) -> str:
    losses = {name: summary[summary.optimizer == name].train_loss.mean() for name in (judged, "sgd")}
    widest = summary[summary.optimizer == judged].sort_values("p").iloc[-1]
    return (
        f"p is largest at width {widest.width}, where the LLCs of NGD lie within {widest.llc_low:.3g} to "
        f"{widest.llc_high:.3g} and their mean {widest.difference:.3g} above SGD's. "
        f"The training losses differ, {losses[judged]:.3g} (NGD) against {losses['sgd']:.3g} (SGD), and the LLC "
        "depends on them."
    )


def _elsewhere(settings: pd.DataFrame) -> str:
    """Return how NGD compares in the settings that the paper does not have."""
    return "".join(
        f" {network}, {row.setting}: {100 * row.relative_difference:+.0f} % "
        f"({100 * row.low:+.0f} to {100 * row.high:+.0f})."
        for network, own in by_network(settings[(settings.quantity == "llc") & settings.low.notna()])
        for _, row in own.iterrows()
    )


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's figure, of the tasks in which both have an LLC; what else is measured; other settings."""
    table, summary = computed["table"], computed["summary"]
    both = summary[summary.p.notna()].task.unique()
    shown = table[table.task.isin(both)] if len(both) else table
    tables = computed["quadratic"], computed["cutoff_summary"]
    return {
        "figure.png": _draw_widths(shown, summary),
        "figure_more.png": draw_tuned_and_matched(Compared.of(computed), computed["settings"], tables),
    }


def _draw_widths(table: pd.DataFrame, summary: pd.DataFrame) -> Figure:
    """Return a panel for each task, LLCs over widths."""
    tasks, names = table.task.unique().tolist(), table.optimizer.unique().tolist()
    figure, (axes,) = plots.figure(1, len(tasks), panel_size=(7.0 / len(tasks), 3.8))
    for ax, task in zip(axes, tasks, strict=True):
        of_task = summary[summary.task == task]
        widths = of_task.width.unique().tolist()
        own = _placed(table[table.task == task], widths, names).assign(
            optimizer=lambda of: of.optimizer.str.upper()
        )
        kind: dict[str, Any] = {"by": "optimizer", "styles": panels.styles_of(own.optimizer.unique())}
        panels.lines(ax, own, x="place", y="llc", bars=True, seeds=True, linestyle="none", markersize=6, **kind)
        panels.counts(ax, own.assign(place=own.width.map(widths.index)), x="place", valid="llc", **kind)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.15 * (high - low))
        ax.locator_params(axis="y", nbins=5)
        for _, each in of_task[of_task.p.notna()].drop_duplicates("width").iterrows():
            place = widths.index(each.width), high + 0.06 * (high - low)
            ax.text(*place, f"p = {each.p:.0e}", ha="center", fontsize=9)
        ax.set_xticks(range(len(widths)), ["" if width == 0 else f"{width}" for width in widths])
        ax.set_xlim(-0.5, len(widths) - 0.5)
        panels.frame(ax, x="" if widths == [0] else "width", y="LLC" if ax is axes[0] else "", title=task)
    printed = load_paper_numbers("ngd", folder=FOLDER).get("Fig. 1", "all", "p_value").value
    note = f"mean over {panels.seeds(table.groupby('task').seed.nunique())}, 95 % t interval; dots: seeds"
    note += f"\np: Welch's test that SGD and NGD are alike; the paper's smallest: {printed:g}"
    panels.legend(figure, title=note)
    return figure


def _placed(rows: pd.DataFrame, widths: list[int], names: list[str]) -> pd.DataFrame:
    """Return the rows with their place on the axis of widths, optimizers beside each other."""
    shift = rows.optimizer.map(names.index) - (len(names) - 1) / 2
    return rows.assign(place=rows.width.map(widths.index) + 0.12 * shift)
