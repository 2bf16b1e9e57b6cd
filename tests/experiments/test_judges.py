"""Published results from their own tables again: verdicts, tables made of others, and rules that none shows.

A target's rules are tested where they apply, on the tables that they are made for. What no published table shows
is a line of `RULES`, which changes one. Made-up tables, in a target's own tests, are for what is neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pandas as pd
import pytest

from curvlab.lab import Computed, all_targets, tables
from curvlab.lab.claims import load_claims
from curvlab.lab.targets.comparison import ROUNDING, other_tables
from curvlab.lab.targets.execution import judged
from curvlab.lab.targets.target import published
from curvlab.lab.targets.verify import judged_otherwise
from experiments.benchmarks.attribution.which_score import which_score
from experiments.benchmarks.llc.peers import summary_table
from experiments.ngd.branching import Branches
from experiments.ngd.fig1.tuned_and_matched import Compared

RESULTS = Path(__file__).parents[2] / "results"
PUBLISHED = {path.relative_to(RESULTS).as_posix(): (target, path) for target, path in published(RESULTS)}


@pytest.mark.parametrize("place", PUBLISHED)
def test_a_published_result_judged_again_has_the_claims_that_it_has(place: str) -> None:
    assert list(judged_otherwise(*PUBLISHED[place])) == []


# ------------------------------------------------------------------------------------ tables of tables
Make = Callable[[Computed], pd.DataFrame]


def by(function: str, *of: str) -> Make:
    """Return what calls a function of experiments/ with these tables."""
    return lambda computed: resolve_name(f"experiments.{function}")(*(computed[name] for name in of))


def which_scores(computed: Computed) -> pd.DataFrame:
    names = ("table", "timing", "ranks", "queries", "removals")
    return which_score({name: computed[name] for name in names}, computed.config["paper_damping"])


DERIVED: list[tuple[str, str, Make]] = [
    ("lissa/fig1", "cells", by("lissa.fig1.agreement_panels:cell_table", "table", "summary")),
    ("lissa/fig3", "squares", by("lissa.sentence_similarity:square_table", "table")),
    ("lissa/fig3", "retrieval", by("lissa.sentence_similarity:retrieval_table", "table")),
    ("lissa/fig4", "summary", by("lissa.fig4:summary", "table", "constants")),
    ("lissa/tab1", "summary", by("lissa.tab1:summary", "table")),
    ("lissa/tab1", "paper", by("lissa.tab1:paper_table")),
    ("lissa/tab3", "paper", by("lissa.tab3:paper_table")),
    ("lissa/tab3", "summary", by("lissa.tab3:summary", "table", "sketches", "gradients")),
    ("pbrf/fig5", "table", by("pbrf.fig5:table_of", "points", "networks")),
    ("ginger/tab1", "paper", by("ginger.printed:table_1")),
    ("ginger/tab2", "paper", by("ginger.printed:table_2")),
    ("ginger/tab2", "summary", by("ginger.tab2:summary_table", "table")),
    ("ngd/fig1", "summary", by("ngd.fig1:summary_table", "table")),
    ("ngd/fig1", "cutoff_summary", by("ngd.fig1.cutoffs:cutoff_summary", "cutoffs")),
    ("ngd/fig1", "settings", lambda c: Compared(c["tuning"], c["equal"], c["tuned"], c["matched"]).settings()),
    ("ngd/fig2", "matched", by("ngd.matched_loss:matched_differences", "table")),
    ("ngd/fig3", "summary", by("ngd.fig3:summary_table", "table")),
    ("ngd/fig3", "trends", by("ngd.fig3:trend_table", "table")),
    ("ngd/fig3", "equal_loss_trends", by("ngd.fig3:equal_loss_trends", "equal_loss")),
    ("ngd/fig4", "summary", lambda c: Branches.of(c["table"]).summary),
    ("ngd/fig7", "summary", by("ngd.overfitting:since_minimum", "table")),
    ("rank1/fig1", "summary", by("rank1.fig1:summary", "table")),
    ("rank1/rate", "summary", by("rank1.rate:summary", "table")),
    ("benchmarks/attribution", "retraining", by("benchmarks.attribution.retraining:summary", "retraining_timing")),
    ("benchmarks/attribution", "which_score", which_scores),
    (
        "benchmarks/llc",
        "summary",
        lambda c: summary_table(c["table"].astype({"problem": object}).fillna({"problem": ""})),
    ),
    ("benchmarks/scale", "summary", by("benchmarks.scale:summary", "scale")),
    ("benchmarks/solvers", "summary", by("benchmarks.solvers.trajectories:summary_table", "table")),
    ("benchmarks/speed", "difference_summary", by("benchmarks.speed.differences:_summary", "differences")),
    ("benchmarks/speed", "step_summary", by("benchmarks.speed.steps:_summary", "steps")),
]


@pytest.mark.parametrize(
    ("key", "name", "make"), DERIVED, ids=lambda given: given if isinstance(given, str) else ""
)
def test_a_published_table_follows_from_those_that_it_is_made_of(key: str, name: str, make: Make) -> None:
    checked = []
    for place, (target, folder) in PUBLISHED.items():
        computed = Computed.of(folder)
        if target.key == key and name in list(computed):
            checked.append(place)
            again = tables.as_written(make(computed), name, digits=target.digits.get(name, 6))
            assert list(other_tables({name: computed[name]}, {name: again}, rtol=ROUNDING)) == [], place
    assert checked


# ------------------------------------------------------------------------------------ special rules
Change = Callable[[pd.DataFrame], pd.DataFrame]


def only(condition: str) -> Change:
    return lambda table: table.query(condition)


def without(*columns: str) -> Change:
    return lambda table: table.drop(columns=list(columns))


def where(condition: str, **values: Any) -> Change:
    """Set columns in the rows that fulfil a condition; a text that begins with = is an expression of columns."""

    def change(table: pd.DataFrame) -> pd.DataFrame:
        rows, table = table.eval(condition), table.copy()
        for name, value in values.items():
            new = table.eval(value[1:]) if isinstance(value, str) and value.startswith("=") else value
            table[name] = table[name].where(~rows, new) if name in table else new
        return table

    return change


OUT, NOT, NAN = "out of reach", "not reproduced", float("nan")
PEERS = ("kronfluence EK-FAC", "dattri EK-FAC as shipped", "dattri EK-FAC mended")
# What is changed in which tables of a result; claims that follow, by how their ids begin; verdict, words of why.
RULES: dict[str, list[tuple[str, Change, str, str, str]]] = {
    "benchmarks/attribution/embedded": [
        ("ranks", without("other orders"), "unrolled-above-filter", OUT, "num_orders=1"),
        ("ranks", without(*PEERS), "filter-above-peers-ekfac", OUT, "no EK-FAC of kronfluence or dattri ran"),
    ],
    "benchmarks/llc/embedded": [
        ("table", only("method == 'curvlab'"), "agrees-with-devinterp", OUT, "devinterp is not installed"),
        ("table", where("repeat == 0", problem="it still moves"), "valid", NOT, "it still moves"),
        ("exact", where("stability > 0", problem="not mixed"), "unstable-step-refused", NOT, "at a stability of"),
        ("default_sampler", where("chains > 0", estimate=NAN), "default-s", OUT, "devinterp is not installed"),
        ("default_sampler", where("chains > 0", estimate=NAN, problem="NaN"), "default-s", OUT, "NaN"),
    ],
    "benchmarks/solvers/embedded": [
        ("lissa", where("fitted", outcome="all 9 steps"), "importance-mlp", OUT, "do not diverge here: C is"),
        ("recipes", where("P > 0", outcome="diverges at step 9"), "recommended", NOT, "Measured 0 ("),
        ("recipes", where("P > 0", error_worst=0.2), "importance-sampling", "direction only", "Measured 1 ("),
    ],
    "ginger/tab1/embedded": [
        ("table", only("racer != 'ginger_published'"), "published-above", OUT, "It takes no part in this preset."),
        ("table", where("racer == 'ginger_published'", accuracy=1.0), "published-above", "reproduced", ""),
    ],
    "ginger/tab3/embedded": [
        ("table", where("seed == seed", min_train_loss=0.1), "published-ins", OUT, "end in the paper's regime"),
        ("table", only("sweep in ['published', 'grid']"), "small-damping-needs", OUT, "was not tried"),
        ("table", only("sweep != 'published' or decay != 0.99"), "published-above-default", OUT, "The grid lacks"),
    ],
    "ginger/tab2/embedded": [
        ("table", only("racer != 'ginger_published'"), "curvature-works", OUT, "takes no part in this preset"),
    ],
    "lissa/fig1/embedded": [
        ("table", without("lissa_cg_case"), "three-cases", OUT, "of which this preset has none"),
        ("table", where("position == seed == 0", lissa_pbrf_case="both near zero"), "three", "reproduced", ""),
        ("table", without("lissa_cg_case", "lissa_cg_error"), "recipe-converges-mlp-8", OUT, "exact"),
        ("table", only("constant != 'C measured' or seed < 1"), "cell-saturated-m", OUT, "nothing is drawn"),
        ("table", where("seed == seed", lissa_pbrf_case="agree"), "cause-larger-convnet", NOT, "SGD leaves"),
    ],
    "lissa/fig2/embedded": [
        ("table", where("step > 200", pearson=NAN, pearson_last=NAN), "converges", NOT, "Not finite at the end"),
    ],
    "lissa/fig3/embedded": [("table retrieval", only("model_seed == 0"), "unrelated-lower", "reproduced", "")],
    "lissa/fig4/embedded": [("table", only("unit == 'images'"), "incoherence", OUT, "No language model")],
    "lissa/tab1/embedded": [
        ("table", where("trace > 0", exact_trace=NAN, full_trace_per_parameter_stderr="=full_trace_per_parameter"),
         "trace-unbiased", "undecided", "The interval lies on both sides of a bound")
    ],
    "ngd/fig1/embedded": [
        ("summary table", where("width < 17", p=NAN, llc=NAN, converged=False), "llc-s", OUT, "has not converged"),
        ("summary table", where("width < 17", p=NAN, llc=NAN, converged=True, problem="x"), "llc-s", OUT, "(x)"),
        ("quadratic", where("seed > 0", llc=NAN), "quadratic-higher", OUT, "Fewer than two seeds have both"),
    ],
    "ngd/fig2/embedded": [
        ("table", only("epoch == epoch.max()"), "llc-plateaus-sgd", OUT, "at the end"),
        ("table", where("epoch > 20", valid=False), "llc-higher-convnet", "not asked here", "Of epochs 10, 20."),
        ("table", where("epoch > 10", valid=False), "llc-higher-convnet", OUT, "at epoch 10 alone"),
        ("table", where("optimizer == 'sgd'", llc_raw=-5.0), "llc-higher-raw", OUT, "no LLC is below 0"),
        ("table", where("optimizer == 'sgd'", llc_raw=-5.0), "llc-plateaus-sgd-raw", OUT, "fewer than two seeds"),
    ],
    "ngd/fig7/embedded": [
        ("summary", where("quantity == 'validation_loss'", change=NAN), "overfits-sgd", NOT, "Measured 0 ("),
        ("table", where("epoch == epoch.max() and seed > 0", valid=False), "llc-sign-sgd", OUT, "there are 1"),
        ("table", where("seed == seed", valid=False), "llc-sign-sgd", OUT, "there are 0"),
    ],
    "pbrf/appg/embedded": [("curves", only("method != 'CG'"), "truncated-cg", OUT, "")],
    "pbrf/fig6/embedded": [
        ("networks", where("N > 0", **{"PBRF gradient norm, median": 0.6}), claims, OUT, "hardly begun: of its")
        for claims in ("pbrf-finds", "influence-aligns")
    ],
    "pbrf/tab4/embedded": [
        ("curvatures", only("estimate == 'exact'"), "solver-error", OUT, "LiSSA is not computed"),
        ("curvatures", where("estimate != 'exact'", solver=NAN), "solver-error", OUT, "LiSSA is not finite"),
        ("table", where("epochs > 0", learned=False), "solver-error", OUT, "has learned nothing"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "names", "change", "claims", "verdict", "words"),
    [(place, *own) for place in RULES for own in RULES[place]],
)
def test_a_rule_that_no_published_result_shows(
    place: str, names: str, change: Change, claims: str, verdict: str, words: str
) -> None:
    computed = Computed.of(RESULTS / place)
    given = {name: change(computed[name]) for name in names.split()}
    results = judged(all_targets()[place.rpartition("/")[0]], replace(computed, given=given))
    found = [result for result in results if result.claim.id.startswith(claims)]
    assert {result.verdict for result in found} == {verdict}
    assert words in found[0].explanation
    for shown in (own for own in load_claims(RESULTS / place) if own.claim.id == found[0].claim.id):
        own = (verdict, found[0].explanation, found[0].interval)
        assert (shown.verdict, shown.explanation, shown.interval) != own
