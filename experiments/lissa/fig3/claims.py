"""Fig. 3: what Sec. 5 of the paper reads off the three heat maps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd
from scipy import stats

from curvlab.lab import (
    Claim,
    ClaimResult,
    ClaimSheet,
    Computed,
    Interval,
    exact,
    out_of_reach,
    reporting,
    t_interval,
)
from experiments.lissa.fig3.statistics import jackknife_facts, mean_difference, positive_share, unrelated

MIN_MODELS = 3
READINGS = {"printed": "the step size", "code": "the code's lr, step size times damping"}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim: over trained models, with fewer than three of them over facts."""
    table, retrieval = computed["table"], computed["retrieval"]
    apart = unrelated(table).groupby("model_seed")[["gradient", "influence"]].mean()
    means = _by_model("Mean similarity of unrelated sentences", apart, 3)
    by_influence = retrieval[retrieval.method == "influence"]
    ranks = by_influence["rank"].value_counts().sort_index().items()
    margins = retrieval.pivot_table(
        index=["model_seed", "direction", "fact"], columns="method", values="margin"
    ).reset_index()
    own = margins.groupby("model_seed")[["gradient", "influence"]].mean()
    return [
        *(
            _judge(
                claims.claim(name),
                table.groupby("model_seed")[table.columns.tolist()].apply(statistic),
                partial(_jackknife, table, statistic),
                why=means,
            )
            for name, statistic in (("unrelated-lower", mean_difference), ("mostly-positive", positive_share))
        ),
        _over_facts(
            claims.claim("paraphrase-stands-out"),
            by_influence.assign(value=(by_influence["rank"] == 1).astype(float)),
            why="Ranks of the other wording among ten: "
            + ", ".join(f"{rank} ({count} times)" for rank, count in ranks)
            + ".",
        ),
        _over_facts(
            claims.claim("stands-out-more"),
            margins.assign(value=margins.influence - margins.gradient),
            why=_by_model("Mean margins", own, 1),
        ),
        *(_step_size(claims, computed.get("lissa"), reading) for reading in READINGS),
    ]


def _judge(claim: Claim, by_model: pd.Series, over_facts: Callable[[], Interval], *, why: str) -> ClaimResult:
    interval = t_interval(by_model, unit="models") if len(by_model) >= MIN_MODELS else over_facts()
    return reporting.judge(claim, float(by_model.mean()), interval, if_not_reproduced=why)


def _jackknife(table: pd.DataFrame, statistic: Callable[[pd.DataFrame], float]) -> Interval:
    stderr, count = jackknife_facts(table, statistic)
    half, value = stats.t.ppf(0.975, count - 1) * stderr, statistic(table)
    return Interval(value - half, value + half, f"jackknife 95 %, {count} facts", count)


def _over_facts(claim: Claim, rows: pd.DataFrame, *, why: str) -> ClaimResult:
    """Judge the mean of `value`; over facts, both directions of each are averaged: they share their sentences."""
    return _judge(
        claim,
        rows.groupby("model_seed").value.mean(),
        lambda: t_interval(rows.groupby("fact").value.mean(), unit="facts"),
        why=why,
    )


def _by_model(what: str, means: pd.DataFrame, digits: int) -> str:
    lines = [
        f"model {seed}: gradient {row.gradient:.{digits}f}, influence {row.influence:.{digits}f}"
        for seed, row in means.iterrows()
    ]
    return f"{what}: {'; '.join(lines)}."


def _step_size(claims: ClaimSheet, lissa: pd.DataFrame | None, reading: str) -> ClaimResult:
    claim = claims.claim("step-size", of=reading, meaning=READINGS[reading])
    if lissa is None or reading not in set(lissa.reading):
        return out_of_reach(claim, "This preset does not run LiSSA beside the exact solution with these settings.")
    row = lissa[lissa.reading == reading].iloc[0]
    reason = (
        f"step_size · lambda_max is {row.scaled_step_size:.2f}, and LiSSA needs less than 2: it diverged, noticed "
        f"after step {row.steps_done}."
        if row.diverged
        else f"After {row.steps_done} steps the relative error is {row.relative_error:.2f}."
    )
    value = 0.0 if row.diverged else float(row.pearson)
    return reporting.judge(claim, value, exact(value, kind="one run"), if_not_reproduced=reason)
