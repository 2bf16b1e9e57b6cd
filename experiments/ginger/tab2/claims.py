"""Table 2, claims: Ginger against Adam and QNG, what the rank does, LoRA against all weights, and cost."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, exact, out_of_reach, t_interval
from curvlab.lab import judge as judge_claim
from experiments.ginger.race.paired import judge_difference, of_racer

MIN_RANKS = 2  # for a slope
ABLATION = "without_curvature"


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task and half of the table, and what the printed table says about the text."""
    results = []
    for task, of_task in computed["table"].groupby("task", sort=False):
        for weights, table in of_task.groupby("weights", sort=False):
            name = f"{weights}-{task}"
            results += [
                _above(claims.claim("ginger-above-adam", of=name), table, "ginger", "adam"),
                _above(claims.claim("ginger-above-qng", of=name), table, "ginger", "qng"),
                _above(claims.claim("qng-below-adam", of=name), table, "adam", "qng"),
                _below(claims.claim("perplexity-below-adam", of=name), table, "adam"),
                _below(claims.claim("perplexity-below-qng", of=name), table, "qng"),
                _slope(claims.claim("rank-lowers-perplexity", of=name), table),
                _correlation(claims.claim("perplexity-and-rouge", of=name), table),
                _below(claims.claim("curvature-works", of=name), table, ABLATION),
            ]
        results += [
            _cost(claims.claim(f"cost-{weights}", of=str(task)), of_task[of_task.weights == weights])
            for weights in ("full", "lora")
        ]
        results.append(_gains(claims.claim("gain-smaller-with-lora", of=str(task)), of_task))
    return [*results, _printed(claims.claim("printed-lora-gain"), computed["paper"])]


def _named(table: pd.DataFrame, racer: str) -> str:
    own = table[table.racer == racer]
    if own.empty:
        return f"{racer}: not run"
    diverged = f", {own.diverged.sum()} of {len(own)} diverged" if own.diverged.any() else ""
    perplexity = f"training perplexity {own.train_perplexity.mean():.4g}"
    return f"{own.label.iloc[0]}: ROUGE {own.rouge.mean():.2f}, {perplexity}{diverged}"


def _above(claim: Claim, table: pd.DataFrame, one: str, other: str) -> ClaimResult:
    first, second = (of_racer(table, racer, "rouge") for racer in (one, other))
    return judge_difference(claim, first, second, f"{_named(table, one)}; {_named(table, other)}.")


def _slope(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    own = table[(table.racer == "ginger") & table.train_perplexity.notna()]
    slopes = [
        np.polyfit(np.log2(of_seed["rank"]), np.log(of_seed.train_perplexity), 1)[0]
        for _, of_seed in own.groupby("seed")
        if of_seed["rank"].nunique() >= MIN_RANKS
    ]
    if not slopes:
        return out_of_reach(claim, f"Fewer than {MIN_RANKS} ranks have a perplexity.")
    means = own.groupby("rank").train_perplexity.mean()
    by_rank = ", ".join(f"{value:.4g} at {rank:g}" for rank, value in means.items())
    return judge_claim(
        claim, np.mean(slopes), t_interval(slopes), if_not_reproduced=f"Training perplexity: {by_rank}."
    )


def _correlation(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    own = table[(table.racer != ABLATION) & table.train_perplexity.notna()]
    found = [
        stats.spearmanr(of_seed.train_perplexity, of_seed.rouge).statistic
        for _, of_seed in own.groupby("seed")
        if of_seed.train_perplexity.nunique() > 1 and of_seed.rouge.nunique() > 1
    ]
    if not found:
        return out_of_reach(claim, "No seed has two optimizers with different perplexities and scores.")
    why = (
        f"Perplexities range from {own.train_perplexity.min():.4g} to {own.train_perplexity.max():.4g}, "
        f"ROUGE from {own.rouge.min():.2f} to {own.rouge.max():.2f}."
    )
    return judge_claim(claim, np.mean(found), t_interval(found), if_not_reproduced=why)


def _below(claim: Claim, table: pd.DataFrame, other: str) -> ClaimResult:
    logarithms = table.assign(perplexity=np.log(table.train_perplexity))
    above, ginger = (of_racer(logarithms, racer, "perplexity") for racer in (other, "ginger"))
    damping, bound = (float(table[table.racer == "ginger"][name].iloc[0]) for name in ("damping", "clip"))
    settings = f"damping {damping:g}, {f'clipped at {bound:g}' if bound > 0 else 'not clipped'}"
    why = f"{_named(table, 'ginger')} ({settings}); {_named(table, other)}."
    return judge_difference(claim, above, ginger, why)


def _cost(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    ginger, adam = (table[table.racer == racer].flops for racer in ("ginger", "adam"))
    if ginger.empty or adam.empty:
        return out_of_reach(claim, "This half of the table was not run, or without Ginger or Adam.")
    ratio = float(ginger.min() / adam.min())
    why = (
        "Two backward passes and one or two forward passes instead of one each: "
        f"{ginger.min():.3g} operations against {adam.min():.3g}."
    )
    return judge_claim(claim, ratio, exact(ratio), if_not_reproduced=why)


def _gains(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    halves = {str(weights): own for weights, own in table.groupby("weights")}
    if set(halves) != {"full", "lora"}:
        return out_of_reach(claim, "Only one half of the table was run.")
    gains = {
        weights: of_racer(own, "ginger", "rouge") - of_racer(own, "adam", "rouge")
        for weights, own in halves.items()
    }
    why = "; ".join(f"{weights}: {gain.mean():+.2f} points" for weights, gain in gains.items()) + "."
    return judge_difference(claim, gains["full"], gains["lora"], why)


def _printed(claim: Claim, paper: pd.DataFrame) -> ClaimResult:
    lora = paper[paper.weights == "lora"]
    ginger = lora[lora.racer == "ginger"]
    gains = ginger.rouge - lora[lora.racer == "adam"].rouge.iloc[0]
    by_rank = ", ".join(f"{gain:+.2f} at {rank:g}" for rank, gain in zip(ginger["rank"], gains, strict=True))
    why = f"By rank, from the printed numbers: {by_rank}."
    return judge_claim(claim, gains.mean(), exact(gains.mean()), if_not_reproduced=why)
