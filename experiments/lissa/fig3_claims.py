"""Fig. 3, claims: what Sec. 5 of the paper reads off the three heat maps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.reporting import Claim, ClaimResult, Criterion, Interval, exact, judge, out_of_reach, t_interval
from experiments.lissa.fig3_statistics import jackknife_facts, mean_difference, positive_share

SOURCE = "Klochkov & Liu 2024, Sec. 5, Fig. 3"
MIN_MODELS = 3


def judge_claims(table: pd.DataFrame, retrieval: pd.DataFrame, lissa: pd.DataFrame) -> list[ClaimResult]:
    """Judge every claim.

    Args:
        table: as `pair_table` gives it.
        retrieval: as `retrieval_table` gives it.
        lissa: one row a reading of the step size; may be empty.
    """
    return [
        _over_models(_lower(), table, mean_difference, why=_means(table)),
        _over_models(_positive(), table, positive_share, why=_means(table)),
        _stands_out(retrieval),
        _better(retrieval),
        _step_size(lissa, "printed"),
        _step_size(lissa, "code"),
    ]


def _lower() -> Claim:
    return Claim(
        id="unrelated-lower",
        statement="Sentences about different facts are less alike by influence than by gradients.",
        source=SOURCE,
        paper_value="higher gradient similarity in general",
        measure="mean of gradient - influence similarity over the 180 pairs of different facts; mean over models",
        criterion=Criterion(at_least=0.0),
    )


def _positive() -> Claim:
    return Claim(
        id="mostly-positive",
        statement="The difference gradient - influence similarity is mostly positive for unrelated sentences.",
        source=SOURCE,
        paper_value="mostly positive",
        measure="share of the 180 pairs of different facts with a positive difference; mean over models",
        criterion=Criterion(at_least=0.5),
    )


def _over_models(
    claim: Claim, table: pd.DataFrame, statistic: Callable[[pd.DataFrame], float], *, why: str
) -> ClaimResult:
    """Judge the mean over trained models; with fewer than three of them the interval is over facts."""
    values = [statistic(own) for _, own in table.groupby("model_seed")]
    if len(values) >= MIN_MODELS:
        return judge(claim, float(np.mean(values)), t_interval(values, unit="models"), if_not_reproduced=why)
    stderr, count = jackknife_facts(table, statistic)
    half = stats.t.ppf(0.975, count - 1) * stderr
    value = statistic(table)
    interval = Interval(value - half, value + half, f"jackknife 95 %, {count} facts", count)
    return judge(claim, value, interval, if_not_reproduced=why)


def _means(table: pd.DataFrame) -> str:
    apart = table[table.first_fact != table.second_fact]
    lines = [
        f"model {seed}: gradient {own.gradient.mean():.3f}, influence {own.influence.mean():.3f}"
        for seed, own in apart.groupby("model_seed")
    ]
    return f"Mean similarity of unrelated sentences: {'; '.join(lines)}."


def _stands_out(retrieval: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id="paraphrase-stands-out",
        statement="By influence a sentence is consistently more like its other wording than like unrelated ones.",
        source=SOURCE,
        paper_value="consistently higher",
        measure="share of the 20 sentences whose other wording is, by influence, the most similar of the ten "
        "sentences of the other kind; mean over models",
        criterion=Criterion(at_least=0.9, direction_at_least=0.5),
    )
    own = retrieval[retrieval.method == "influence"]
    hits = (own["rank"] == 1).groupby(own.model_seed).mean()
    ranks = ", ".join(f"{rank} ({count} times)" for rank, count in own["rank"].value_counts().sort_index().items())
    why = f"Ranks of the other wording among ten: {ranks}."
    if len(hits) < MIN_MODELS:
        return judge(claim, float(hits.mean()), _over_facts(own, (own["rank"] == 1)), if_not_reproduced=why)
    return judge(claim, float(hits.mean()), t_interval(hits.to_numpy(), unit="models"), if_not_reproduced=why)


def _better(retrieval: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id="stands-out-more",
        statement="Because unrelated similarities are lower, other wordings stand out more by influence than by "
        "gradients.",
        source=SOURCE,
        paper_value="given as the result of the lower similarities",
        measure="margin of the other wording over the nine unrelated sentences in their standard deviations, by "
        "influence less by gradient, mean over the 20 sentences; mean over models",
        criterion=Criterion(at_least=0.0),
    )
    margins = retrieval.pivot_table(
        index=["model_seed", "direction", "fact"], columns="method", values="margin"
    ).reset_index()
    margins["gain"] = margins.influence - margins.gradient
    per_model = margins.groupby("model_seed")[["gradient", "influence", "gain"]].mean()
    why = "Mean margins: " + "; ".join(
        f"model {seed}: gradient {row.gradient:.1f}, influence {row.influence:.1f}"
        for seed, row in per_model.iterrows()
    )
    value = float(per_model.gain.mean())
    if len(per_model) < MIN_MODELS:
        return judge(claim, value, _over_facts(margins, margins.gain), if_not_reproduced=f"{why}.")
    interval = t_interval(per_model.gain.to_numpy(), unit="models")
    return judge(claim, value, interval, if_not_reproduced=f"{why}.")


def _over_facts(rows: pd.DataFrame, values: pd.Series) -> Interval:
    """Return a t interval over facts, both directions of each averaged: they share their sentences."""
    return t_interval(values.astype(float).groupby(rows.fact).mean().to_numpy(), unit="facts")


def _step_size(lissa: pd.DataFrame, reading: str) -> ClaimResult:
    meaning = {"printed": "the step size", "code": "the code's lr, step size times damping"}[reading]
    claim = Claim(
        id=f"step-size-{reading}",
        statement=f"LiSSA converges with the caption's settings, its 0.003 taken as {meaning}.",
        source="Klochkov & Liu 2024, Fig. 3, caption, with lambda_max of Table 1",
        paper_value="used for the figure",
        measure="Pearson correlation with the exact solution of LiSSA's influences on all 20 sentences, with the "
        "paper's step_size · lambda_max, number of steps and sequences in a batch (0 if it diverged)",
        criterion=Criterion(at_least=0.95, direction_at_least=0.8),
    )
    if lissa.empty or reading not in set(lissa.reading):
        return out_of_reach(claim, "This preset does not run LiSSA beside the exact solution with these settings.")
    row = lissa[lissa.reading == reading].iloc[0]
    reason = (
        f"step_size · lambda_max is {row.scaled_step_size:.2f}, and LiSSA needs less than 2: it diverged, noticed "
        f"after step {row.steps_done}."
        if row.diverged
        else f"After {row.steps_done} steps the relative error is {row.relative_error:.2f}."
    )
    value = 0.0 if row.diverged else float(row.pearson)
    return judge(claim, value, exact(value, kind="one run"), if_not_reproduced=reason)
