"""T5 for summarisation, all weights or LoRA adapters: Ginger, QNG, Adam, momentum (Ginger 2024, Table 2).

make ginger-tab2 PRESET=smoke|embedded|laptop|paper ARGS="ranks=[4] seeds=range(5)"

One epoch over pairs of a document and its summary, batches of 4, no schedule and no weight decay, momentum 0.9 and
second-moment decay 0.99. Every fine-tuning of a column starts from the same pretrained weights; those of one seed
see the same batches and, with LoRA (rank 8 on every projection of every attention, which is what the FLOPs of the
paper's table imply; it says "each attention adapter"), start from the same adapters. The paper starts from the
published T5-small. The small presets cannot, so they pretrain a small T5 to copy what stretches of the training
documents begin with; both columns start from it. Their task is no summary but a shortening, which so small a T5
learns: write the words of four letters or more of a beginning of a paragraph.

Every racer tunes its learning rate, and Ginger its damping as well, for each column, at one rank, by the
validation loss; every candidate has the same number of steps (an epoch, or the final run's where that is shorter).
The damping is a number without clipping, where lr/γ is tuned, or the published code's 1e-5 with each entry of the
update clipped at 1. The paper's claims are judged on Ginger as published, with these two and a matrix for each
tensor; the one whose damping is so chosen, with one matrix for all, has claims of ours. figure_more.png takes
Ginger apart.
Where perplexities end above the start's or the paper's highest, 12.6, what it says of them and of ROUGE is out of
reach (`reaches-regime`); where no fine-tuned network has the ROUGE of the
start, what it says of ROUGE: the small network, pretrained to copy, loses by further training what ROUGE counts.

The curvature sees labels that the model draws token by token,
given the words before them (teacher forcing), scaled by the root of the number of tokens, as the loss is their
mean; Eq. 8 has the number of sequences there. The printed FLOPs do not say whether the paper has one matrix or one
for each tensor: both take d τ² operations.

ROUGE is of summaries that the model writes for the test documents after the epoch, the most probable token at each
step; the paper reports the best of its evaluations of each kind. How its training perplexity was taken is not said
of Table 2; of Table 1 (Sec. 4.1) training losses are "on sampled batches". Ours is of the last model on the first
pairs of the training set, of which a run shorter than an epoch has seen a part; beside it the smallest of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.lab import Computed, Run, Target, panels, plots
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, exact, out_of_reach, withheld
from curvlab.lab.claims import judge as verdict
from experiments.ginger.comparison import (
    WORKING,
    draw_by_rank,
    draw_what_works,
    gated,
    judge_difference,
    of_racer,
)
from experiments.ginger.printed import table_2
from experiments.ginger.summaries import KINDS, SummaryTask, clipped, cost_of_a_step, fine_tuned
from experiments.ginger.tuning import Racer, Tuned, load_racers, tune
from experiments.shared import stats

TARGET = Target(
    __name__,
    title="T5 for summarisation, full and LoRA: Ginger, QNG and first-order methods",
    paper={
        "tasks": ["T5-small on XSum"],
        "table.csv:train_pairs": 204000,
        "table.csv:test_pairs": 11000,
        "batch_size": 4,
        "num_steps": "one epoch",
        "source_length": 512,
        "target_length": 128,
        "adapters.rank": 8,
        "adapters.alpha": "not stated",
        "ranks": [1, 2, 4, 8, 16, 32],
        "lrs": [0.1, 0.5, 0.01, 0.05, 0.001, 0.005, 0.0001, 0.0005],
        "tuning.num_seeds": "not stated",
        "settings_tried": "not stated",
        "seeds": "not stated",
        "measuring.num_beams": "not stated",
        "table.csv:damping": "not stated; 1e-5 in the published code",
        "table.csv:clip": "not mentioned; 1 in the published code",
    },
)
ABLATION = "without_curvature"
PUBLISHED = "ginger_published"
FOUR = ("momentum", "adam", "qng", PUBLISHED)  # the paper's
MIN_RANKS = 2  # for a slope
HIGHEST = 12.6  # training perplexity of the paper's tables
PLACE = ("task", "weights", "racer", "label", "rank")
SETTINGS = ("lr", "damping", "clip")
SCORED = (*KINDS, "rouge", "train_perplexity", "test_loss")
MEASURES = (*KINDS, "rouge", "train_perplexity", "lowest_batch_perplexity", "test_loss")


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each fine-tuning; `start`, `summary`, `tuning`, `examples`, `clipped`, `paper`.

    `table`: ROUGE in percent, `rouge` the mean of the three kinds; `train_perplexity` after the last step, on
    training pairs; `lowest_batch_perplexity`, of a step's batch; `test_loss` (nats a token); `flops`, `memory`
    (bytes) of a step. `start`: the same measures of the pretrained network, which both columns start from.

    Reads `tasks`, and for all of them or for one: `seeds`, `weights` (full, lora), `num_epochs`, `num_steps`
    (null: whole epochs), and what `SummaryTask`, `load_racers` and `tune` read.
    """
    rows: list[dict[str, Any]] = []
    tries: list[pd.DataFrame] = []
    clips: list[pd.DataFrame] = []
    examples: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    for task in SummaryTask.each(run, cfg):
        settings, racers = task.settings, load_racers(task.settings)
        steps = int(settings.num_steps or settings.num_epochs * task.steps_per_epoch())
        unmoved = {"optimizer": "momentum", "lr": 1e-30, "momentum": 0.0}  # one step too short for any weight
        measured: dict[str, Any] = {"measuring": dict(settings.measuring)}
        base = fine_tuned(task, weights="full", optimizer=unmoved, num_steps=1, repeat="start", **measured)
        start = _row(task, base)
        starts.append({"task": task.label} | {name: start[name] for name in SCORED})
        for weights in settings.weights:
            own_racers = [racer for racer in racers.values() if racer.tuned_as == racer.name]
            tuned = {racer.name: _tuned(task, weights, racer, steps) for racer in own_racers}
            for name, racer in racers.items():
                place = {"task": task.label, "weights": weights, "racer": name, "label": racer.label}
                if name in tuned:
                    tries.append(pd.DataFrame(tuned[name].rows).assign(**place))
                optimizer = racer.with_rank(settings.tuned_rank, **tuned[racer.tuned_as].chosen)
                if name in WORKING and optimizer.get("clip"):
                    how: dict[str, Any] = {"weights": weights, "optimizer": optimizer, "num_steps": steps}
                    clips.append(pd.DataFrame(clipped(task, **how, repeat=settings.seeds[0])).assign(**place))
                for rank in racer.ranks:
                    optimizer = racer.with_rank(rank, **tuned[racer.tuned_as].chosen)
                    own = {**place, "rank": rank} | {key: optimizer.get(key) for key in SETTINGS}
                    cost = cost_of_a_step(task, weights=weights, optimizer=optimizer)
                    how = {"weights": weights, "optimizer": optimizer, "num_steps": steps}
                    for seed in settings.seeds:
                        found = fine_tuned(task, **how, repeat=seed, **measured)
                        rows.append(own | {"seed": seed} | _row(task, found) | {"steps": steps} | cost)
                        pairs = zip(task.splits.test_summaries, found["examples"], strict=False)
                        written = [{"reference": reference, "summary": text} for reference, text in pairs]
                        examples += [own | {"seed": seed} | pair for pair in written]
    run.note(seeds=list(cfg.seeds))
    table = pd.DataFrame(rows)
    return {
        "table": table,
        "start": pd.DataFrame(starts),
        "summary": summary_table(table),
        "tuning": pd.concat(tries, ignore_index=True),
        "examples": pd.DataFrame(examples),
        "clipped": pd.concat(clips, ignore_index=True),
        "paper": table_2(),
    }


def _tuned(task: SummaryTask, weights: str, racer: Racer, steps: int) -> Tuned:
    """Choose a racer's settings by trials of an epoch, or of a whole fine-tuning where that is shorter."""
    num_steps = min(steps, task.steps_per_epoch())

    def trial(optimizer: Mapping[str, Any], seed: str) -> float:
        found = fine_tuned(task, weights=weights, optimizer=optimizer, num_steps=num_steps, repeat=seed)
        return float(found["validation_loss"])

    untried = task.settings.untried_lrs[weights]
    start = task.start_loss
    return tune(racer, task.settings, trial, num_steps=num_steps, constant=start, untried_lrs=untried)


def _row(task: SummaryTask, found: Mapping[str, Any]) -> dict[str, Any]:
    losses = found["step_losses"]
    return {
        "diverged": found["diverged"],
        **{kind: found[kind] for kind in KINDS},
        "rouge": sum(found[kind] for kind in KINDS) / len(KINDS),
        "train_perplexity": math.exp(found["train_loss"]),
        "lowest_batch_perplexity": math.exp(losses.min()) if len(losses) else math.nan,
        "test_loss": found["test_loss"],
        "train_pairs": len(task.splits.train[1]),
        "test_pairs": len(task.splits.test[1]),
    }


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each variant: seeds, how many diverged, means and 95 % t intervals over the others."""
    rows = []
    for place, own in table.groupby(list(PLACE), sort=False, dropna=False):
        row = dict(zip(PLACE, place, strict=True)) | {"seeds": len(own), "diverged": int(own.diverged.sum())}
        row |= {name: own[name].iloc[0] for name in (*SETTINGS, "flops", "memory")}
        kept = own[~own.diverged.astype(bool)]
        for measure in MEASURES:
            row |= stats.in_columns(measure, kept[measure])
        rows.append(row)
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task and half of the table, and what the printed table says about the text."""
    results = []
    for task, of_task in computed["table"].groupby("task", sort=False):
        start = computed["start"].query("task == @task").iloc[0]
        worse = _worse_than_at_the_start(start, of_task)
        for weights, table in of_task.groupby("weights", sort=False):
            name = f"{weights}-{task}"
            results.append(withheld(_correlation(claims.claim("perplexity-and-rouge", of=name), table), worse))
            scores = [
                _above(claims.claim("published-above-adam", of=name), table, PUBLISHED, "adam"),
                _above(claims.claim("published-above-qng", of=name), table, PUBLISHED, "qng"),
                _above(claims.claim("qng-below-adam", of=name), table, "adam", "qng"),
            ]
            of_perplexity = [
                judged
                for first, racer in (("published-", PUBLISHED), ("", "ginger"))
                for judged in (
                    *(
                        _below(claims.claim(f"{first}perplexity-below-{other}", of=name), table, racer, other)
                        for other in ("adam", "qng")
                    ),
                    _slope(claims.claim(f"{first}rank-lowers-perplexity", of=name), table, racer),
                )
            ]
            results += gated(
                _regime(claims.claim("reaches-regime", of=name), table, start.train_perplexity),
                [*of_perplexity, *(withheld(score, worse) for score in scores)],
            )
            results.append(_below(claims.claim("curvature-works", of=name), table, PUBLISHED, ABLATION))
        results += [
            _cost(claims.claim(f"cost-{weights}", of=str(task)), of_task[of_task.weights == weights])
            for weights in ("full", "lora")
        ]
        gains = _gains(claims.claim("gain-smaller-with-lora", of=str(task)), of_task)
        results.append(withheld(gains, worse))
    return results


def _worse_than_at_the_start(start: pd.Series, table: pd.DataFrame) -> str:
    """Return why ROUGE ranks nothing: no fine-tuned network has as much as the one it started from, or ""."""
    best = table.groupby(["weights", "racer", "rank"], dropna=False).rouge.mean().max()
    if best >= start.rouge:
        return ""
    return (
        f"Before fine-tuning ROUGE is {start.rouge:.2f}, afterwards at most {best:.2f} (mean over seeds): "
        "it falls by training, and ranks none."
    )


def _named(table: pd.DataFrame, racer: str) -> str:
    own = table[table.racer == racer]
    if own.empty:
        return f"{racer}: not run"
    diverged = f", {own.diverged.sum()} of {len(own)} diverged" if own.diverged.any() else ""
    losses = f"training perplexity {own.train_perplexity.mean():.4g}, test loss {own.test_loss.mean():.3f}"
    return f"{own.label.iloc[0]}: ROUGE {own.rouge.mean():.2f}, {losses}{diverged}"


def _above(claim: Claim, table: pd.DataFrame, one: str, other: str) -> ClaimResult:
    first, second = (of_racer(table, racer, "rouge") for racer in (one, other))
    return judge_difference(claim, first, second, f"{_named(table, one)}; {_named(table, other)}.")


def _slope(claim: Claim, table: pd.DataFrame, racer: str) -> ClaimResult:
    own = table[(table.racer == racer) & table.train_perplexity.notna()]
    slopes = [
        np.polyfit(np.log2(of_seed["rank"]), np.log(of_seed.train_perplexity), 1)[0]
        for _, of_seed in own.groupby("seed")
        if of_seed["rank"].nunique() >= MIN_RANKS
    ]
    if not slopes:
        return out_of_reach(claim, f"Fewer than {MIN_RANKS} ranks have a perplexity.")
    means = own.groupby("rank").train_perplexity.mean()
    by_rank = ", ".join(f"{value:.4g} at {rank:g}" for rank, value in means.items())
    return verdict(claim, *stats.mean(slopes), if_not_reproduced=f"Training perplexity: {by_rank}.")


def _correlation(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    own = table[table.racer.isin(FOUR) & table.train_perplexity.notna()]
    by_seed = own.groupby("seed")
    found = np.array([stats.spearman(of_seed.train_perplexity, of_seed.rouge) for _, of_seed in by_seed])
    found = found[~np.isnan(found)]
    if not len(found):
        return out_of_reach(claim, "No seed has two optimizers with different perplexities and scores.")
    why = (
        f"Perplexities range from {own.train_perplexity.min():.4g} to {own.train_perplexity.max():.4g}, "
        f"ROUGE from {own.rouge.min():.2f} to {own.rouge.max():.2f}."
    )
    return verdict(claim, *stats.mean(found), if_not_reproduced=why)


def _regime(claim: Claim, table: pd.DataFrame, at_start: float) -> ClaimResult:
    """Judge the perplexity of the worst of the paper's four, each its geometric mean over ranks and seeds."""
    needed = min(HIGHEST, at_start)
    logarithms = table.assign(perplexity=np.log(table.train_perplexity / needed))
    found = {
        racer: stats.geometric_mean(np.exp(of_racer(logarithms, racer, "perplexity").dropna()))
        for racer in FOUR
        if (table.racer == racer).any()
    }
    listed = ", ".join(f"{racer} {needed * value:.3g}" for racer, (value, _) in found.items())
    worst = max(found.values(), key=lambda pair: pair[0])
    return verdict(claim, *worst, if_not_reproduced=f"By optimizer: {listed}; at the start {at_start:.3g}.")


def _below(claim: Claim, table: pd.DataFrame, racer: str, other: str) -> ClaimResult:
    if not {racer, other} <= set(table.racer):
        return out_of_reach(claim, "One of the two takes no part in this preset.")
    logarithms = table.assign(perplexity=np.log(table.train_perplexity))
    above, own = (of_racer(logarithms, name, "perplexity") for name in (other, racer))
    damping, bound = (float(table[table.racer == racer][name].iloc[0]) for name in ("damping", "clip"))
    settings = f"damping {damping:g}, {f'clipped at {bound:g}' if bound > 0 else 'not clipped'}"
    why = f"{_named(table, racer)} ({settings}); {_named(table, other)}."
    return judge_difference(claim, above, own, why)


def _cost(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    ginger, adam = (table[table.racer == racer].flops for racer in (PUBLISHED, "adam"))
    if ginger.empty or adam.empty:
        return out_of_reach(claim, "This half of the table was not run, or without Ginger or Adam.")
    ratio = float(ginger.min() / adam.min())
    why = (
        "Two backward passes and one or two forward passes instead of one each: "
        f"{ginger.min():.3g} operations against {adam.min():.3g}."
    )
    return verdict(claim, ratio, exact(ratio), if_not_reproduced=why)


def _gains(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    halves = {str(weights): own for weights, own in table.groupby("weights")}
    if set(halves) != {"full", "lora"}:
        return out_of_reach(claim, "Only one half of the table was run.")
    gains = {
        weights: of_racer(own, PUBLISHED, "rouge") - of_racer(own, "adam", "rouge")
        for weights, own in halves.items()
    }
    why = "; ".join(f"{weights}: {gain.mean():+.2f} points" for weights, gain in gains.items()) + "."
    return judge_difference(claim, gains["full"], gains["lora"], why)


# ------------------------------------------------------------------------------------ draw
HALVES = {"full": "all weights", "lora": "LoRA"}
RANK_LABEL = "rank τ (–: has none)"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return ROUGE and perplexity with all weights, ours beside the paper's; and what works."""
    table, names = computed["table"], computed["summary"].groupby("racer").label.first()
    lost = table.groupby(list(PLACE), dropna=False).diverged.transform("any").astype(bool)
    paper = computed["paper"].replace({"racer": {"ginger": PUBLISHED}})
    paper = paper.assign(label=paper.racer.map(names).fillna(paper.racer), seed=0)
    note = "; without variants that diverged" if lost.any() else ""
    kept = table[~lost & table.racer.isin([*FOUR, "ginger"])].replace({"label": {"Ginger": "Ginger, tuned"}})
    printed = _ours_and_papers(kept, paper, computed["start"].iloc[0], note)
    logarithm = table.assign(logarithm=np.log(table.train_perplexity))
    labels = {"logarithm": "log of training perplexity / momentum's", "rouge": "ROUGE less momentum's (points)"}
    rank = int(computed.config["tuned_rank"])
    named, clipped = (of.assign(weights=of.weights.replace(HALVES)) for of in (logarithm, computed["clipped"]))
    works = draw_what_works(named, clipped, labels, by="weights", rank=rank)
    ranks = sorted(table[table.racer == PUBLISHED]["rank"].unique())
    panels.legend(works, title=f"as published: mean over ranks {', '.join(f'{own:g}' for own in ranks)}", axes=[])
    return {"figure.png": printed, "figure_more.png": works}


def _ours_and_papers(ours: pd.DataFrame, paper: pd.DataFrame, start: pd.Series, note: str) -> Figure:
    """Draw ROUGE and perplexity by rank with all weights: left ours and where it starts, right the paper's."""
    figure, axes = plots.figure(2, 2, panel_size=(3.8, 2.5))
    styles = panels.styles_of(pd.concat([ours.label, paper.label]).unique())
    titles = (f"ours: {ours.task.iloc[0]}", "the paper's: T5-small on XSum")
    labels = {"rouge": "ROUGE 1, 2, L (%)", "train_perplexity": "training perplexity"}
    for row, (column, label) in zip(axes, labels.items(), strict=True):
        for ax, own, title in zip(row, (ours, paper), titles, strict=True):
            draw_by_rank(ax, own[own.weights == "full"], column, styles=styles)
            panels.frame(ax, title=title if column == "rouge" else "", x="" if column == "rouge" else RANK_LABEL)
        row[0].set_ylabel(label)
        panels.rule(row[0], y=start[column], color="black", label="before fine-tuning")
    told = f"mean over {panels.seeds([ours.seed.nunique()])}, 95 % t interval"
    panels.legend(
        figure, title=f"ours: {told}; both: all weights are tuned{note}; ROUGE: mean of the three", columns=5
    )
    return figure
