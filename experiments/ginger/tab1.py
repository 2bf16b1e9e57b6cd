"""Ginger, QNG, first-order methods and the wider field: one race with one budget (Ginger 2024, Table 1).

make ginger-tab1 PRESET=smoke|embedded|laptop|paper ARGS="ranks=[4] seeds=range(5)"

Image classification with no schedule and no weight decay, momentum 0.9 and second-moment decay 0.99. A part of the
training set is set aside for validation; it chooses settings and, as in the paper, the epoch that is reported.
Claims are about the test set at that epoch, which has chosen nothing; the paper has no such set.

Every candidate of every racer is tried for the same number of steps: the learning rate from {1, 5} x 10^{-1..-4},
and for Ginger also the damping, which the paper does not state: the published code's 1e-5 with its clipping, or
one of four without, where lr/γ is tuned. As in the paper settings are tuned at one rank and kept for the others.
The paper's claims are judged on Ginger as published; the one so tuned has the same claims, as ours.
Runs of one seed start from the same weights and see the same batches, and final runs have equal steps. What a
racer costs to tune is in tuning.csv; whether the best rate lies at the edge of the grid, in table.csv (`at_edge`).

The paper trains to a loss of 1e-6 to 1e-4 of a batch. Where ours ends above 1e-3 (`reaches-regime`) what the paper
says of accuracies and losses is out of reach. The smallest loss of a batch follows the learning rate that
validation prefers, and can round to 0; the mean of the last epoch stands beside it. figure_more.png takes Ginger
apart: momentum, its clip alone, its curvature alone, both; the entries of a clipped step are lr times the clip,
whatever the gradient's size.

What the paper lacks: NGD (Kaldi's), Muon (hidden weight matrices; Adam for vectors and the last layer) and SOAP;
Adam with Ginger's extra gradients; and ablations that take Ginger apart: one matrix for all parameters or one for
each tensor, clipping each entry of the update at 1 or not, labels sampled from the model or the data's own, the
published settings with and without any curvature (without it, the update is the clipped average gradient over the
damping: close to its sign), and QNG as published against as coded. A racer that diverged is shown so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig
from scipy.stats import binomtest

from curvlab.lab import Computed, Run, Target, panels, plots
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, Interval, out_of_reach
from curvlab.lab.claims import judge as verdict
from experiments.ginger.comparison import WORKING, best_of, draw_what_works, gated, judge_difference, of_racer
from experiments.ginger.optimizers import why_unavailable
from experiments.ginger.printed import judge_printed, table_1
from experiments.ginger.race import RaceTask, clipped, cost_of_a_step, final_run, log_losses, summarised
from experiments.ginger.tuning import load_racers
from experiments.shared import stats

TARGET = Target(
    __name__,
    title="Ginger, QNG, first-order methods and the wider field in one race",
    paper={
        "tasks": ["ResNet-18 on CIFAR-100", "ResNet-50 on CIFAR-100"],
        "num_epochs": 200,
        "batch_size": 128,
        "ranks": [1, 2, 4, 8, 16, 32],
        "lrs": [0.1, 0.5, 0.01, 0.05, 0.001, 0.005, 0.0001, 0.0005],
        "tuning.num_epochs": "not stated",
        "seeds": "not stated",
        "num_validation": "not stated; of the 10,000 test images",
        "augment": True,
        "table.csv:damping": "not stated; 1e-5 in the published code",
        "table.csv:clip": "not mentioned; 1 in the published code",
    },
    digits={"curves": 4},
    curves=("curves: train_loss, validation_accuracy over step by racer, rank",),
)
CONSTANT = ("label", "kind", "lr", "at_edge", "damping", "clip", "flops", "memory", "gradients")  # of all seeds
ACCURACY = "test_accuracy"
MIN_RANKS = 4  # of three ranks the correlation has four values alone
TOO_FEW_RANKS = f"A trend needs {MIN_RANKS} ranks."
BASELINES = ("momentum", "adam", "qng")
WIDER = ("ngd", "muon", "soap")
# Claim, the racer it is about, and the one that it is compared with; both at the tuned rank where they have ranks.
PAIRS = (
    ("extra-gradients", "ginger", "adam_twice"),
    ("curvature-works", "ginger_published", "without_curvature"),
    ("no-clipping", "ginger_unclipped", "ginger_clipped"),
    ("one-matrix", "ginger", "ginger_tensor"),
    ("sampled-labels", "ginger", "ginger_data_labels"),
    ("qng-as-published", "qng", "qng_as_coded"),
)


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, a row for each final run; `summary`, its means; `tuning`; `curves`; `clipped`; `paper`.

    And `absent`, racers that are not installed, if there are any.
    Reads `tasks`, and for all of them or for one: `seeds`, and what `RaceTask`, `load_racers` and `tune` read.
    """
    rows: list[dict[str, Any]] = []
    absent: list[dict[str, Any]] = []
    tuning: list[pd.DataFrame] = []
    curves: list[pd.DataFrame] = []
    clips = [pd.DataFrame(columns=["step", "share", "task", "racer", "rank"])]  # no racer may clip
    for task in RaceTask.each(run, cfg):
        racers = load_racers(task.settings)
        reasons = {name: reason for name, one in racers.items() if (reason := why_unavailable(one.settings))}
        places = {name: {"task": task.label, "racer": name, "label": racers[name].label} for name in reasons}
        absent += [places[name] | {"reason": reason} for name, reason in reasons.items()]
        present = {name: racer for name, racer in racers.items() if name not in reasons}
        tuned = {name: task.tune(racer) for name, racer in present.items() if racer.tuned_as == name}
        tries = pd.concat([pd.DataFrame(own.rows) for own in tuned.values()], ignore_index=True)
        tuning.append(tries.assign(task=task.label))
        for name, racer in present.items():
            found = tuned[racer.tuned_as]
            for rank in racer.ranks:
                place = {"task": task.label, "racer": name, "rank": rank}
                optimizer = racer.with_rank(rank, **found.chosen)
                given = {"label": racer.label, "kind": racer.kind, "lr": optimizer["lr"], "at_edge": found.at_edge}
                given |= {setting: optimizer.get(setting) for setting in ("damping", "clip")}
                size = task.settings.batch_size * racer.batch_factor
                cost = cost_of_a_step(task, optimizer=optimizer, batch_size=size)
                if name in WORKING and optimizer.get("clip") and rank == task.settings.tuned_rank:
                    how = {"num_steps": task.final_steps(racer), "batch_size": size}
                    clips.append(pd.DataFrame(clipped(task, optimizer=optimizer, **how)).assign(**place))
                for seed in task.settings.seeds:
                    row, curve = final_run(task, racer, optimizer, seed=seed)
                    rows.append(place | given | row | cost)
                    curves.append(curve.assign(**place))
    table = pd.DataFrame(rows)
    run.note(seeds=list(cfg.seeds))
    missing = {"absent": pd.DataFrame(absent)} if absent else {}
    return missing | {
        "table": table,
        "summary": summarised(table, by=("task", "racer", "rank"), constant=CONSTANT),
        "tuning": pd.concat(tuning, ignore_index=True),
        "curves": pd.concat(curves, ignore_index=True),
        "clipped": pd.concat(clips, ignore_index=True),
        "paper": table_1(),
    }


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task, and what the printed table says about the text."""
    results, rank = [], int(computed.config["tuned_rank"])
    for name, own in computed["table"].groupby("task", sort=False):
        task, first_order = str(name), best_of(own, ["momentum", "adam"])[0]
        table = _with_last_epoch(own, computed["curves"])
        table["log_loss"] = log_losses(table)
        # the paper reports the best validation accuracy; what is ours is judged on test images
        as_reported = table.assign(**{ACCURACY: table.accuracy})
        results += gated(
            _regime(claims.claim("reaches-regime", of=task), table),
            [
                *_of_ginger(claims, as_reported, "ginger_published", rank),
                *_of_ginger(claims, table, "ginger", rank),
                _above(claims.claim("qng-above-first-order", of=task), as_reported, "qng", first_order),
                _training_loss(claims.claim("training-loss", of=task), table, "min_train_loss"),
                _training_loss(claims.claim("training-loss-last-epoch", of=task), table, "last_epoch"),
                *(_published_loss(claims, table, task, other) for other in BASELINES),
                _training_loss(
                    claims.claim("training-loss-last-epoch-published", of=task),
                    table,
                    "last_epoch",
                    "ginger_published",
                ),
            ],
        )
        results += [
            _against_best(claims.claim("ginger-above-wider", of=task), table, "ginger", WIDER),
            *(_pair(claims.claim(claim, of=task), table, (one, other), rank) for claim, one, other in PAIRS),
        ]
    return results + judge_printed(claims, computed["paper"])


def _of_ginger(claims: ClaimSheet, table: pd.DataFrame, racer: str, rank: int) -> list[ClaimResult]:
    """Judge accuracy and ranks of one Ginger, by claims of the same form: as published, or as tuned here."""
    first, ranks = ("ginger", "rank") if racer == "ginger" else ("published", "published-rank")
    names = (f"{first}-best", *(f"{first}-above-{other}" for other in BASELINES), f"{ranks}-helps")
    stated = [claims.claim(name, of=str(table.task.iloc[0])) for name in (*names, f"{ranks}-saturates")]
    if not (table.racer == racer).any():
        return [out_of_reach(claim, "It takes no part in this preset.") for claim in stated]
    best, momentum, adam, qng, helps, saturates = stated
    return [
        _against_best(best, table, racer, BASELINES),
        _against_qng(qng, table, racer),
        _above(momentum, table, racer, "momentum"),
        _above(adam, table, racer, "adam"),
        _rank_helps(helps, table, racer),
        _rank_saturates(saturates, table, racer, rank),
    ]


def _with_last_epoch(table: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """Return the table with `last_epoch`, the mean training loss of each run's last epoch."""
    last = curves.groupby(["task", "racer", "rank", "seed"], dropna=False).train_loss.last()
    return table.merge(last.rename("last_epoch").reset_index(), how="left")


def _percent(values: pd.Series) -> str:
    return f"{100 * values.mean():.2f} %"


def _named(table: pd.DataFrame, racer: str, rank: int | None) -> str:
    own = table[(table.racer == racer) & (table["rank"].isna() if rank is None else table["rank"] == rank)]
    diverged = f", {own.diverged.sum()} of {len(own)} diverged" if own.diverged.any() else ""
    return f"{own.label.iloc[0]}{f' at rank {rank}' if rank else ''}: {_percent(own[ACCURACY])}{diverged}"


def _against_best(claim: Claim, table: pd.DataFrame, own: str, others: tuple[str, ...]) -> ClaimResult:
    if not table.racer.isin(others).any():
        return out_of_reach(claim, "None of them takes part in this preset.")
    ginger, other = best_of(table, [own]), best_of(table, others)
    first, second = (of_racer(table, racer, ACCURACY, rank) for racer, rank in (ginger, other))
    return judge_difference(claim, first, second, f"{_named(table, *ginger)}; {_named(table, *other)}.")


def _against_qng(claim: Claim, table: pd.DataFrame, racer: str) -> ClaimResult:
    ginger, qng = (table[table.racer == name] for name in (racer, "qng"))
    by_rank = 100 * (ginger.groupby("rank")[ACCURACY].mean() - qng.groupby("rank")[ACCURACY].mean()).dropna()
    why = f"In points by rank: {', '.join(f'{points:+.2f} at {rank:.0f}' for rank, points in by_rank.items())}."
    other = of_racer(table, "ginger_unclipped", ACCURACY)
    if racer == "ginger" and len(other):
        why += f" Ginger that never clips, its damping tuned so, has {_percent(other)} at its one rank."
    shared = [own[own["rank"].isin(by_rank.index)] for own in (ginger, qng)]
    means = [own.groupby("seed")[ACCURACY].mean() for own in shared]
    return judge_difference(claim, means[0], means[1], why)


def _above(claim: Claim, table: pd.DataFrame, racer: str, other: str) -> ClaimResult:
    first = of_racer(table, racer, ACCURACY)
    label = table[table.racer == racer].label.iloc[0]
    why = f"{label} over its ranks: {_percent(first)}; {_named(table, other, None)}."
    return judge_difference(claim, first, of_racer(table, other, ACCURACY), why)


def _regime(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    """Judge the smallest loss of a batch of the worst of the paper's four, each at its best rank.

    Ginger is there as published and as tuned: claims on both stand behind this gate.
    """
    found = {}
    for racer in [name for name in (*BASELINES, "ginger", "ginger_published") if (table.racer == name).any()]:
        rank = best_of(table, [racer], chosen_by="log_loss")[1]
        found[racer] = stats.geometric_mean(10 ** of_racer(table, racer, "log_loss", rank))
    listed = ", ".join(f"{racer} {value:.2g}" for racer, (value, _) in found.items())
    return verdict(claim, *max(found.values(), key=lambda pair: pair[0]), if_not_reproduced=f"In nats: {listed}.")


def _training_loss(claim: Claim, table: pd.DataFrame, column: str, racer: str = "ginger") -> ClaimResult:
    if not (table.racer == racer).any():
        return out_of_reach(claim, "It takes no part in this preset.")
    table = table[table.racer.isin([*BASELINES, racer])]
    table = table.assign(log_loss=np.log10(table[column]))
    own, other = (best_of(table, names, chosen_by="log_loss") for names in ([racer], BASELINES))
    first, second = (of_racer(table, name, "log_loss", rank) for name, rank in (own, other))
    at = f" at rank {own[1]}" if own[1] else ""
    label = table[table.racer == racer].label.iloc[0]
    why = f"{label}{at}: {10 ** first.mean():.2g}; {other[0]}: {10 ** second.mean():.2g} nats."
    return judge_difference(claim, first, second, why)


def _published_loss(claims: ClaimSheet, table: pd.DataFrame, task: str, other: str) -> ClaimResult:
    """Judge in how many seeds Ginger as published has a lower loss: a share, since losses can round to 0."""
    label = table[table.racer == other].label.iloc[0]
    claim = claims.claim(f"training-loss-published-below-{other}", of=task, other=label)
    if not (table.racer == "ginger_published").any():
        return out_of_reach(claim, "It takes no part in this preset.")
    best = {racer: best_of(table, [racer], chosen_by="log_loss")[1] for racer in (other, "ginger_published")}
    least, published = (of_racer(table, racer, "min_train_loss", rank) for racer, rank in best.items())
    published = published.reindex(least.index).dropna()
    least = least.reindex(published.index)
    below, seeds = int((published < least).sum()), len(published)
    found, alike = (binomtest(count, seeds).proportion_ci() for count in (below, seeds))  # six alike decide
    kind = f"Clopper-Pearson 95 %, {seeds} seeds"
    interval = Interval(float(found.low), float(found.high), kind, seeds, (float(alike.low), float(alike.high)))
    plain = of_racer(table, "without_curvature", "min_train_loss").reindex(published.index)
    lower = f"; in {int((plain < published).sum())} its steps without curvature are lower than its own"
    zero = ", ".join(str(seed) for seed in published.index[published == 0])
    ranks = table[table.racer == "ginger_published"].pivot(index="rank", columns="seed", values="min_train_loss")
    by_rank = ranks[published.index].lt(least, axis="columns").sum(axis=1).items()
    of_ranks = f" By rank: {', '.join(f'{count} at {own:.0f}' for own, count in by_rank)}."
    why = (
        f"It reads exactly 0 in float32 in seeds {zero}. " * bool(zero)
        + f"In {below} of {seeds} seeds at rank {best['ginger_published']}{lower if plain.notna().all() else ''}."
        + of_ranks * (len(ranks) > 1)
    )
    return verdict(claim, below / seeds, interval, if_not_reproduced=why)


def _rank_helps(claim: Claim, table: pd.DataFrame, racer: str) -> ClaimResult:
    own = table[table.racer == racer]
    if own["rank"].nunique() < MIN_RANKS:
        return out_of_reach(claim, TOO_FEW_RANKS)
    found = [stats.spearman(rows["rank"], rows[ACCURACY]) for _, rows in own.groupby("seed")]
    means = ", ".join(f"{_percent(rows[ACCURACY])} at {rank:.0f}" for rank, rows in own.groupby("rank"))
    # All alike: no trend.
    return verdict(claim, *stats.mean(np.nan_to_num(found)), if_not_reproduced=f"Means: {means}.")


def _rank_saturates(claim: Claim, table: pd.DataFrame, racer: str, middle: int) -> ClaimResult:
    own = table[table.racer == racer]
    low, high = own["rank"].min(), own["rank"].max()
    if own["rank"].nunique() < MIN_RANKS or not low < middle < high:
        return out_of_reach(claim, f"{TOO_FEW_RANKS} One is {middle}, one is below it and one above.")
    first, second, third = (of_racer(table, racer, ACCURACY, rank) for rank in (low, middle, high))
    gains = [100 * (second - first).mean(), 100 * (third - second).mean()]
    why = f"From rank {low:.0f} to {middle}: {gains[0]:+.2f} points, then {gains[1]:+.2f}."
    return judge_difference(claim, third - second, second - first, why)


def _pair(claim: Claim, table: pd.DataFrame, racers: tuple[str, str], tuned_rank: int) -> ClaimResult:
    if not set(racers) <= set(table.racer):
        return out_of_reach(claim, "One of the two takes no part in this preset.")
    ranks = [set(table[table.racer == racer]["rank"].dropna()) for racer in racers]
    if any(own and tuned_rank not in own for own in ranks):
        return out_of_reach(claim, f"Rank {tuned_rank} takes no part in this run.")
    places = [(racer, tuned_rank if own else None) for racer, own in zip(racers, ranks, strict=True)]
    first, second = (of_racer(table, racer, ACCURACY, rank) for racer, rank in places)
    why = "; ".join(_named(table, racer, rank) for racer, rank in places) + "."
    if racers[1] == "adam_twice" and second.equals(of_racer(table, "adam", ACCURACY)):
        epochs = table[table.racer == "adam_twice"].best_epoch
        why += (
            f" These are Adam's own numbers: its best epochs, {epochs.min()} to {epochs.max()}, come before the "
        )
        why += "further steps begin, which change nothing."
    return judge_difference(claim, first, second, why)


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return Table 1; and what of Ginger works."""
    table, rank = computed["table"], int(computed.config["tuned_rank"])
    table = table.assign(percent=100 * table[ACCURACY])
    first = table.task == table.task.iloc[0]
    figures = {"figure.png": _table_1(table[first], computed["paper"])}
    own = table[table.racer.isin([*WORKING, "ginger"]) & (table["rank"].isna() | (table["rank"] == rank))]
    own = _with_last_epoch(own, computed["curves"])
    shown = own.assign(decades=np.log10(own.last_epoch))
    labels = {
        "percent": "test accuracy less momentum's (points)",
        "decades": "log₁₀ of last epoch's loss / momentum's",
    }
    works = draw_what_works(shown, computed["clipped"], labels, by="task", rank=rank)
    note = f"of the table: {_settings(table[first], computed['paper'])}{_beside(table[~first])}"
    panels.legend(works, title=note, axes=[])
    return figures | {"figure_more.png": works}


RACERS = [*BASELINES, "ginger", "ginger_published"]  # of Table 1
COLUMNS = {  # of it: heading, scale, format, and whether more is better
    "accuracy": ("accuracy\n%", 100, "{:.2f}", True),
    "validation_loss": ("valid.\nloss", 1, "{:.3f}", False),
    "min_train_loss": ("training\nloss, 1e-6", 1e6, "{:.3g}", False),
    "flops": ("FLOPs/\nAdam's", 1, "{:.2f}", False),
}
BETTER, WORSE = "#CFE8CF", "#F6D5CC"


def _beside(table: pd.DataFrame) -> str:
    """Return a line for each further task: the accuracies of the paper's four and published Ginger."""
    lines = []
    for task, own in table[table.racer.isin(RACERS)].groupby("task", sort=False):
        found = [
            f"{rows.label.iloc[0]} {value:.2f} ± {(interval.high - interval.low) / 2:.2f}"
            for _, rows in own.groupby("racer", sort=False)
            for value, interval in [stats.mean(rows.groupby("seed").percent.mean())]
        ]
        lines.append(f"\n{task}: {', '.join(found)} %")
    return "".join(lines)


def _settings(own: pd.DataFrame, paper: pd.DataFrame) -> str:
    """Return how Table 1 trains Ginger, and the most memory of all ranks."""
    chosen = own[own.racer == "ginger"].iloc[0]
    clip = "without clip" if np.isnan(chosen["clip"]) else f"clip {chosen['clip']:g}"
    both = (_over_adams(of[of.racer.isin(RACERS)]) for of in (own, paper[paper.model == "ResNet-18"]))
    most, printed = (f"{of[of['rank'].notna()].memory.max():.2f}" for of in both)
    return (
        f"Ginger at damping {chosen.damping:g}, {clip}, chosen on validation; as published: 1e-05, clip 1\n"
        f"memory: at most {most} times Adam's, the paper's {printed}"
    )


def _table_1(own: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Return Table 1 against Adam: ours beside the printed ResNet-18, whose Ginger is the published one."""
    of_ours = _over_adams(own[own.racer.isin(RACERS)])
    printed = paper[paper.model == "ResNet-18"].replace({"racer": {"ginger": "ginger_published"}})
    of_paper = _over_adams(printed.assign(seed=0))
    either = pd.concat([of_paper, of_ours])[["racer", "rank"]].drop_duplicates()
    either = either.sort_values("rank").sort_values("racer", key=lambda of: of.map(RACERS.index), kind="stable")
    rows = [*either.itertuples(index=False, name=None)]
    names = of_ours.groupby("racer").label.first().replace({"Ginger": "Ginger, tuned"})
    labels = [names.get(racer, racer) + ("" if np.isnan(rank) else f", τ = {rank:.0f}") for racer, rank in rows]
    cells = [
        [_cell(table, place, column) for table in (of_ours, of_paper) for column in COLUMNS] for place in rows
    ]
    heads = [head for _ in range(2) for head, *_ in COLUMNS.values()]
    drawing, ((ax,),) = plots.figure(1, 1, panel_size=(8.0, 0.26 * len(rows) + 1.3))
    ax.axis("off")
    shown = ax.table(
        [heads, *([text for text, _ in row] for row in cells)],
        [["white"] * len(heads), *([colour for _, colour in row] for row in cells)],
        rowLabels=["", *labels],
        colWidths=[0.17, 0.1, 0.14, 0.1, 0.12, 0.1, 0.12, 0.1],
        cellLoc="center",
        bbox=(0.24, 0.0, 0.76, 0.93),
    )
    shown.auto_set_font_size(False)
    shown.set_fontsize(9)
    for place, cell in shown.get_celld().items():
        cell.set(linewidth=0.8, edgecolor="white", height=2.0 if place[0] == 0 else 1.0)
    for x, title in ((0.45, f"ours: {own.task.iloc[0]}"), (0.83, "the paper's: ResNet-18, CIFAR-100")):
        ax.text(x, 0.95, title, transform=ax.transAxes, ha="center", fontsize=10)
    number = panels.seeds([own.seed.nunique()])
    ours = f"ours: mean over {number} ± 95 % t interval, losses: geometric mean"
    note = f"best validation accuracy, as the paper's; {ours}"
    colours = "green: better than Adam, red: worse (ours: where the paired interval or every seed says so)"
    panels.legend(drawing, title=f"{note}\n{colours}")
    return drawing


def _over_adams(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with FLOPs and memory over Adam's."""
    adams = table[table.racer == "adam"]
    return table.assign(**{cost: table[cost] / adams[cost].mean() for cost in ("flops", "memory")})


def _cell(table: pd.DataFrame, place: tuple[str, float], column: str) -> tuple[str, str]:
    """Return the text and the colour of a racer's cell: of a loss the geometric mean, of one run its number.

    A loss that reads 0 in float32 has none: the cell says in how many runs.
    """
    _, scale, form, more = COLUMNS[column]
    has_rank = not np.isnan(place[1])
    own = table[(table.racer == place[0]) & (table["rank"].eq(place[1]) if has_rank else table["rank"].isna())]
    if own.empty:
        return "", "white"
    adam = table[table.racer == "adam"].set_index("seed")[column]
    values = own.set_index("seed")[column]
    if column.endswith("loss") and (values == 0).any():
        below = (values < adam.reindex(values.index)).all()
        return f"0 in {(values == 0).sum()} of {len(values)}", BETTER if below else "white"
    logs = column.endswith("loss") and (adam > 0).all()
    of, back = (np.log, np.exp) if logs else (np.asarray, np.asarray)
    mean, found = stats.mean(of(values))
    text = form.format(scale * float(back(mean)))
    if column == "accuracy" and len(values) > 1:
        text += f" ± {scale * (found.high - found.low) / 2:.2f}"
    if place[0] == "adam":
        return text, "white"
    value, interval = stats.mean(of(values) - of(adam.reindex(values.index)))
    single = len(values) == 1 or interval.low == interval.high
    low, high = (value, value) if single else (interval.low, interval.high)
    better, worse = (low > 0, high < 0) if more else (high < 0, low > 0)
    return text, BETTER if better else WORSE if worse else "white"
