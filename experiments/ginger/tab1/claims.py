"""Table 1, claims: Ginger against QNG and first-order methods, what the rank does, and what of Ginger works."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, exact, out_of_reach, t_interval
from curvlab.lab import judge as judge_claim
from experiments.ginger.printed import table_2
from experiments.ginger.race.paired import best_of, judge_difference, of_racer

BASELINES = ["momentum", "adam", "qng"]
WIDER = ["ngd", "muon", "soap"]
ACCURACY = "test_accuracy"
# Claim, the racer it is about, and the one that it is compared with; both at the tuned rank where they have ranks.
PAIRS = (
    ("extra-gradients", "ginger", "adam_twice"),
    ("curvature-works", "ginger_published", "without_curvature"),
    ("no-clipping", "ginger_unclipped", "ginger_clipped"),
    ("one-matrix", "ginger", "ginger_tensor"),
    ("sampled-labels", "ginger", "ginger_data_labels"),
    ("qng-as-published", "qng", "qng_as_coded"),
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task, and what the printed table says about the text."""
    results = []
    rank = int(computed.config["tuned_rank"])
    for task, table in computed["table"].groupby("task", sort=False):
        name = str(task)
        results += [
            _against_best(claims.claim("ginger-best", of=name), table, BASELINES),
            _against_qng(claims.claim("ginger-above-qng", of=name), table),
            *(
                _against_first_order(claims.claim(f"ginger-above-{of}", of=name), table, of)
                for of in BASELINES[:2]
            ),
            _qng_against_first_order(claims.claim("qng-above-first-order", of=name), table),
            _training_loss(claims.claim("training-loss", of=name), table),
            _rank_helps(claims.claim("rank-helps", of=name), table),
            _rank_saturates(claims.claim("rank-saturates", of=name), table, rank),
            _against_best(claims.claim("ginger-above-wider", of=name), table, WIDER),
            *(_pair(claims.claim(claim, of=name), table, (one, other), rank) for claim, one, other in PAIRS),
        ]
    return results + _printed(claims, computed["paper"])


def _percent(values: pd.Series) -> str:
    return f"{100 * values.mean():.2f} %"


def _named(table: pd.DataFrame, racer: str, rank: int | None) -> str:
    own = table[(table.racer == racer) & (table["rank"].isna() if rank is None else table["rank"] == rank)]
    diverged = f", {own.diverged.sum()} of {len(own)} diverged" if own.diverged.any() else ""
    return f"{own.label.iloc[0]}{f' at rank {rank}' if rank else ''}: {_percent(own[ACCURACY])}{diverged}"


def _against_best(claim: Claim, table: pd.DataFrame, others: list[str]) -> ClaimResult:
    if not table.racer.isin(others).any():
        return out_of_reach(claim, "None of them takes part in this preset.")
    ginger, other = best_of(table, ["ginger"]), best_of(table, others)
    first, second = (of_racer(table, racer, ACCURACY, rank) for racer, rank in (ginger, other))
    return judge_difference(claim, first, second, f"{_named(table, *ginger)}; {_named(table, *other)}.")


def _against_qng(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    ranks = sorted(set(table[table.racer == "qng"]["rank"]) & set(table[table.racer == "ginger"]["rank"]))
    pairs = {rank: [of_racer(table, racer, ACCURACY, rank) for racer in ("ginger", "qng")] for rank in ranks}
    ginger, qng = pairs[min(ranks, key=lambda rank: (pairs[rank][0] - pairs[rank][1]).mean())]
    by_rank = ", ".join(f"{100 * (a - b).mean():+.2f} at {rank:.0f}" for rank, (a, b) in pairs.items())
    why = f"In points by rank: {by_rank}."
    other = of_racer(table, "ginger_unclipped", ACCURACY)
    if len(other):
        why += f" Ginger that never clips, its damping tuned so, has {_percent(other)} at its one rank."
    return judge_difference(claim, ginger, qng, why, comparisons=len(ranks))


def _against_first_order(claim: Claim, table: pd.DataFrame, other: str) -> ClaimResult:
    ginger, first_order = of_racer(table, "ginger", ACCURACY), of_racer(table, other, ACCURACY)
    why = f"Ginger over its ranks: {_percent(ginger)}; {_named(table, other, None)}."
    return judge_difference(claim, ginger, first_order, why)


def _qng_against_first_order(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    other, _ = best_of(table, ["momentum", "adam"])
    qng = of_racer(table, "qng", ACCURACY)
    why = f"QNG over its ranks: {_percent(qng)}; {_named(table, other, None)}."
    return judge_difference(claim, qng, of_racer(table, other, ACCURACY), why)


def _training_loss(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    table = table.assign(log_loss=np.log10(table.min_train_loss))
    ginger, other = (best_of(table, names, chosen_by="log_loss") for names in (["ginger"], BASELINES))
    first, second = (of_racer(table, racer, "log_loss", rank) for racer, rank in (ginger, other))
    why = f"Ginger at rank {ginger[1]}: {10 ** first.mean():.2g}; {other[0]}: {10 ** second.mean():.2g} nats."
    return judge_difference(claim, first, second, why)


def _rank_helps(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    own = table[table.racer == "ginger"]
    if own["rank"].nunique() < 3:
        return out_of_reach(claim, "A trend needs three ranks.")
    found = [stats.spearmanr(rows["rank"], rows[ACCURACY]).statistic for _, rows in own.groupby("seed")]
    values = np.nan_to_num(np.array(found))  # all alike: no trend
    means = ", ".join(f"{_percent(rows[ACCURACY])} at {rank:.0f}" for rank, rows in own.groupby("rank"))
    return judge_claim(claim, values.mean(), t_interval(values), if_not_reproduced=f"Means: {means}.")


def _rank_saturates(claim: Claim, table: pd.DataFrame, middle: int) -> ClaimResult:
    own = table[table.racer == "ginger"]
    low, high = own["rank"].min(), own["rank"].max()
    if not low < middle < high:
        return out_of_reach(claim, f"It needs a rank below {middle} and one above.")
    first, second, third = (of_racer(table, "ginger", ACCURACY, rank) for rank in (low, middle, high))
    gains = [100 * (second - first).mean(), 100 * (third - second).mean()]
    why = f"From rank {low:.0f} to {middle}: {gains[0]:+.2f} points, then {gains[1]:+.2f}."
    return judge_difference(claim, third - second, second - first, why)


def _pair(claim: Claim, table: pd.DataFrame, racers: tuple[str, str], tuned_rank: int) -> ClaimResult:
    if not set(racers) <= set(table.racer):
        return out_of_reach(claim, "One of the two takes no part in this preset.")
    has_rank = [(table[table.racer == racer]["rank"] == tuned_rank).any() for racer in racers]
    places = [(racer, tuned_rank if has else None) for racer, has in zip(racers, has_rank, strict=True)]
    first, second = (of_racer(table, racer, ACCURACY, rank) for racer, rank in places)
    why = "; ".join(_named(table, racer, rank) for racer, rank in places)
    return judge_difference(claim, first, second, f"{why}.")


def _text() -> float:
    """Return the same ratio of Table 2's printed FLOPs with all weights trained."""
    table = table_2()
    flops = table[(table.weights == "full") & (table.racer == "ginger")].set_index("rank").flops
    return float((flops[32] - flops[16]) / (flops[16] - flops[8]))


def _printed(claims: ClaimSheet, paper: pd.DataFrame) -> list[ClaimResult]:
    losses = paper[paper.model == "ResNet-50"].groupby("racer").min_train_loss.min()
    place = int((losses < losses["ginger"]).sum()) + 1
    order = ", ".join(f"{racer} {loss / 1e-6:.3g}e-6" for racer, loss in losses.sort_values().items())
    flops = paper[(paper.model == "ResNet-18") & (paper.racer == "ginger")].set_index("rank").flops
    ratio = float((flops[32] - flops[16]) / (flops[16] - flops[8]))
    return [
        judge_claim(
            claims.claim("printed-second-best"),
            place,
            exact(place, kind="printed"),
            if_not_reproduced=f"By its own table it is the best there: {order}.",
        ),
        judge_claim(
            claims.claim("printed-flops"),
            ratio,
            exact(ratio, kind="printed"),
            if_not_reproduced=f"Linear from rank 4 on. In Table 2, all weights, the same ratio is {_text():.1f}.",
        ),
    ]
