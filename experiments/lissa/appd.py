"""Influence in a bag-of-words model is TF-IDF (Klochkov & Liu 2024, App. D).

make lissa-appd PRESET=smoke|embedded|laptop|paper ARGS="length=50"

Real text as documents of equal length, in two vocabularies: the most frequent words, and words so rare that p |d|
is at most `max_expected`, as the appendix assumes; beside them documents of the same size drawn from the model.
Damping is given relative to the smallest p. For each query: rank correlation and top-k overlap of influence with
TF-IDF.

What is printed and does not hold: in the damped inverse's second form the rank-one term has the wrong sign (the
form before it is right); the limit of the influence lacks -1 and |d|² (the appendix sums gradients over words and
takes the Hessian of one word; with the Hessian of a document |d| is left). "DF(d)" means DF(t), and p^(-1/2)
weights, IDF = sqrt(1 / DF), are its own variant: the usual log(1 / DF) is shown too. Similarity here is g_qᵀ(G +
λ)⁻¹g_d, as printed; influence on the loss is minus that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from scipy.stats import t as student
from torch import Tensor

from curvlab.influence import tf_idf
from curvlab.lab import Computed, Run, Target, panels, plots, unit
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, Interval, exact, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.data import TextCorpus
from curvlab.linalg import identity
from curvlab.solvers import Direct
from experiments.lissa import bag_of_words
from experiments.shared import stats
from experiments.shared.worst_case import farthest_ratio, judge_row, smallest

TARGET = Target(
    __name__,
    title="Influence in a bag-of-words model",
    paper={
        "limit.csv:corpus": "none: a derivation",
        "limit.csv:num_documents": "any",
        "limit.csv:num_words": "any",
        "length": "any, equal",
        "dampings": "limit 0",
    },
)


Row = dict[str, Any]
TABLES = ("table", "inverse", "limit", "frequencies")
SETTINGS = ("length", "max_words", "max_documents", "max_expected", "damping_ratios", "dampings", "top")
NUM_BINS = 12  # of words by p |d|


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return rankings (`table`), errors of closed forms (`inverse`) and of the `limit`, document `frequencies`.

    Args:
        run: seeds and store.
        cfg: `corpora` by name (`data`, a TextCorpus, and `join`; null: left out) and `SETTINGS`.
    """
    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    settings = {name: list(cfg[name]) if name.startswith("damping") else cfg[name] for name in SETTINGS}
    for name, part in cfg.corpora.items():
        if part is None:
            continue
        corpus: TextCorpus = instantiate(part.data)
        run.record_data(corpus.name, corpus.checksum)
        for vocabulary in ("all", "rare"):
            names = {"corpus": str(name), "vocabulary": vocabulary}
            known = {"checksum": corpus.checksum, "join": part.join}
            found = _measure(run, cfg, corpus, **names, **settings, **known)
            for table, rows in tables.items():
                rows += [names | row for row in found[table]]
    run.note(seeds=[cfg.seed])
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


@unit("lissa/appd", version=1, about="{corpus}, {vocabulary} words")
def _measure(run: Run, cfg: DictConfig, texts: TextCorpus, /, **key: Any) -> dict[str, Any]:
    real = bag_of_words.equal_documents(
        bag_of_words.tokenize([*texts.train, *texts.test]),
        length=cfg.length,
        max_words=cfg.max_words,
        join=key["join"],
        max_documents=cfg.max_documents,
        max_expected=cfg.max_expected if key["vocabulary"] == "rare" else None,
    )
    drawn = bag_of_words.drawn_from_the_model(real, run.generator("documents", key["corpus"], key["vocabulary"]))
    rankings, frequencies = [], []
    for source, documents in (("text", real), ("model", drawn)):
        rankings += [{"source": source} | row for row in _rankings(documents, cfg)]
        frequencies += [{"source": source} | row for row in _frequencies(documents)]
    found = (rankings, _inverses(real, cfg), _limits(real, cfg), frequencies)
    return dict(zip(TABLES, found, strict=True))


def _rankings(documents: bag_of_words.WordCounts, cfg: DictConfig) -> list[Row]:
    """Return agreement of influence with each TF-IDF and with TF products at each damping; means over queries."""
    counts = documents.counts
    smallest = float(tf_idf.word_probabilities(counts).min())
    frequencies = tf_idf.term_frequencies(counts)
    others = {
        "root": tf_idf.tf_idf_similarity(counts, idf="root"),
        "log": tf_idf.tf_idf_similarity(counts, idf="log"),
        "none": frequencies @ frequencies.T,
    }
    rows = []
    for ratio in cfg.damping_ratios:
        influence = tf_idf.influence_similarity(counts, ratio * smallest)
        for idf, similarity in others.items():
            agreement = bag_of_words.per_query(influence, similarity, top=cfg.top)
            row: Row = {"damping_ratio": float(ratio), "damping": ratio * smallest, "idf": idf}
            for statistic, values in agreement.items():
                row[statistic] = float(values.mean())
                row[f"{statistic}_stderr"] = float(values.std()) / len(values) ** 0.5
            rows.append(row | {"num_queries": len(counts)})
    return rows


def _frequencies(documents: bag_of_words.WordCounts) -> list[Row]:
    """Return DF over |d| p, the median of words in bins of |d| p."""
    length = float(documents.counts[0].sum())
    probabilities = tf_idf.word_probabilities(documents.counts)
    expected = probabilities * length
    ratios = tf_idf.document_frequencies(documents.counts) / expected
    independent = (1 - (1 - probabilities) ** length) / expected
    return [
        {
            "expected": float(expected[chosen].median()),
            "ratio": float(ratios[chosen].median()),
            "ratio_low": float(ratios[chosen].quantile(0.1)),
            "ratio_high": float(ratios[chosen].quantile(0.9)),
            "independent": float(independent[chosen].median()),
            "num_words": len(chosen),
        }
        for chosen in expected.argsort().tensor_split(min(NUM_BINS, len(expected)))
    ]


def _inverses(documents: bag_of_words.WordCounts, cfg: DictConfig) -> list[Row]:
    """Return the largest relative errors of the closed forms against `Direct`, for all unit vectors."""
    probabilities = tf_idf.word_probabilities(documents.counts)
    eye = torch.eye(len(probabilities), dtype=probabilities.dtype)
    rows = []
    for damping in cfg.dampings:
        solved = (
            Direct(max_size=len(eye)).solve(tf_idf.BagOfWordsOperator(probabilities) + damping * identity, eye).x
        )
        forms = {
            "corrected": tf_idf.damped_inverse_product(probabilities, damping, eye),
            "factored": bag_of_words.inverse_factored(probabilities, damping),
            "printed": bag_of_words.inverse_printed(probabilities, damping),
        }
        largest = float(solved.abs().max())
        errors = {name: float((form - solved).abs().max()) / largest for name, form in forms.items()}
        rows.append({"damping": float(damping), "smallest": float(probabilities.min()), **errors})
    return rows


def _limits(documents: bag_of_words.WordCounts, cfg: DictConfig) -> list[Row]:
    """Return, for each damping, the rank-one term's size and the distance to the printed and the corrected limit.

    All with the appendix's gradients, |d| (TF - p), and the Hessian of one word; relative to the limit, over pairs
    of different documents.
    """
    counts = documents.counts
    probabilities, length = tf_idf.word_probabilities(counts), float(counts[0].sum())
    gradients = length * tf_idf.document_gradients(counts)
    printed = bag_of_words.printed_limit(counts)
    corrected = length**2 * (printed - 1)
    rows = []
    for ratio in cfg.damping_ratios:
        damping = ratio * float(probabilities.min())
        influence = gradients @ tf_idf.damped_inverse_product(probabilities, damping, gradients.T)
        term = bag_of_words.rank_one_term(probabilities, damping, gradients)
        rows.append(
            {
                "damping_ratio": float(ratio),
                "damping": damping,
                "num_documents": len(counts),
                "num_words": len(probabilities),
                "length": length,
                "rank_one": _size(term) / _size(corrected),
                "error_printed": _size(influence - printed) / _size(printed),
                "error_scaled": _size(influence / length**2 - printed) / _size(printed),
                "error_corrected": _size(influence - corrected) / _size(corrected),
            }
        )
    return rows


def _size(matrix: Tensor) -> float:
    """Return the root mean square over pairs of different documents."""
    apart = ~torch.eye(len(matrix), dtype=torch.bool)
    return float(matrix[apart].square().mean().sqrt())


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge slopes, document frequencies, and what dividing by DF brings; other claims say their value."""
    table, limit, frequencies = computed["table"], computed["limit"], computed["frequencies"]
    closest = table[table.damping_ratio == table.damping_ratio.min()]
    return [
        _rank_one(claims.claim("rank-one-vanishes"), limit[limit.damping_ratio <= 0.1]),
        _frequency(claims.claim("document-frequency"), frequencies[frequencies.expected <= 0.1]),
        _tf_idf(claims.claim("tf-idf-rare"), closest[closest.vocabulary == "rare"]),
        _gain(claims.claim("idf-gain-rare"), closest[closest.vocabulary == "rare"]),
        _tf_idf(claims.claim("tf-idf-all"), closest[closest.vocabulary == "all"]),
    ]


def _rank_one(claim: Claim, small: pd.DataFrame) -> ClaimResult:
    own = small.groupby(["corpus", "vocabulary"])
    slopes = [stats.log_log_slope(rows.damping, rows.rank_one) for _, rows in own if len(rows) > 1]
    if not slopes:
        return out_of_reach(claim, "Fewer than two dampings of at most 0.1 min p.")
    value = max(slopes, key=lambda slope: abs(slope - 1))
    interval = exact(value, kind=f"exact, of {len(slopes)} settings")
    return judge_claim(claim, value, interval, if_not_reproduced="λ is not small against the smallest p.")


def _frequency(claim: Claim, rare: pd.DataFrame) -> ClaimResult:
    text, drawn = (rare[rare.source == source].ratio for source in ("text", "model"))
    if text.empty:
        return out_of_reach(claim, "No bin of words with |d| p of at most 0.1.")
    why = (
        "Words of real text come in bursts: one that occurs in a document is likely to occur there again. In "
        f"documents drawn from the model the farthest is {drawn.iloc[farthest_ratio(drawn)]:.3f}."
    )
    return judge_row(claim, rare, text, farthest_ratio(text), f"of {len(text)} settings", why)


def _gain(claim: Claim, closest: pd.DataFrame) -> ClaimResult:
    """Judge what dividing by DF brings; the errors of both correlations as if independent, which is too wide."""
    text = closest[closest.source == "text"]
    with_idf, without = (text[text.idf == idf].set_index("corpus") for idf in ("root", "none"))
    left = (1 - with_idf.spearman) / (1 - without.spearman)
    error = np.hypot(with_idf.spearman_stderr, left * without.spearman_stderr) / (1 - without.spearman)
    corpus = str(left.idxmax())
    why = (
        f"Correlations on {corpus}: {with_idf.spearman[corpus]:.3f} with IDF, {without.spearman[corpus]:.3f} "
        f"without. {_of_the_model(closest)}: what is off is not the derivation but the model, in which words do "
        "not come in bursts."
    )
    return _over_queries(claim, 1 - left[corpus], error[corpus], with_idf.num_queries[corpus], why)


def _tf_idf(claim: Claim, closest: pd.DataFrame) -> ClaimResult:
    text = closest[closest.source == "text"]
    own, usual = (text[text.idf == idf] for idf in ("root", "log"))
    row = own.iloc[smallest(own.spearman)]
    why = (
        "Frequent words break the assumption p |d| << 1: DF stops at 1 while |d| p grows, so 1 / DF weights them "
        f"more than influence does. {_of_the_model(closest)}. The usual log(1 / DF) takes that weight away: "
        f"{usual.spearman.min():.3f}. Over rare words it is closer, see tf-idf-rare. Of the most similar "
        f"documents {own.overlap.min():.2f} are shared."
    )
    return _over_queries(claim, row.spearman, row.spearman_stderr, row.num_queries, why)


def _of_the_model(closest: pd.DataFrame) -> str:
    drawn = closest[(closest.idf == "root") & (closest.source == "model")]
    return f"In documents drawn from the model the correlation with IDF is at least {drawn.spearman.min():.3f}"


def _over_queries(claim: Claim, value: float, stderr: float, num_queries: int, why: str) -> ClaimResult:
    count = int(num_queries)
    half = float(student.ppf(0.975, count - 1)) * float(stderr)
    interval = Interval(value - half, value + half, f"t 95 %, {count} queries", count)
    return judge_claim(claim, float(value), interval, if_not_reproduced=why)


# ------------------------------------------------------------------------------------ draw
IDF = {"root": "TF-IDF, sqrt(1/DF) (App. D)", "log": "TF-IDF, log(1/DF)", "none": "TF products, no IDF"}
PANELS = {
    ("text", "all"): "text, frequent words",
    ("text", "rare"): "text, rare words",
    ("model", "rare"): "drawn from the model, rare words",
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the agreement with TF-IDF, and the formulas behind it."""
    table = computed["table"].assign(similarity=lambda own: own.idf.map(IDF))
    return {"figure.png": _closest(table), "figure_more.png": _formulas(computed)}


def _closest(table: pd.DataFrame) -> Figure:
    """Draw the rank correlation of influence with each similarity at the smallest damping."""
    own = table[(table.damping_ratio == table.damping_ratio.min()) & (table.source == "text")]
    half = 1.96 * own.spearman_stderr
    own = own.assign(low=own.spearman - half, high=own.spearman + half, corpus=own.corpus.str.replace("_", " "))
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 0.55 * own.corpus.nunique() + 1.7), sharey=True)
    for ax, (vocabulary, rows) in zip(axes[0], own.groupby("vocabulary"), strict=False):
        panels.forest(ax, rows, name="corpus", value="spearman", low="low", high="high", by="similarity")
        panels.rule(ax, x=1, label="the paper: approximately equal", color="black")
        panels.frame(ax, x="rank correlation with influence", title=PANELS["text", str(vocabulary)])
    queries = f"{own.num_queries.min():.0f}"
    note = (
        f"mean over {queries} queries, bars: 95 %; frequent: a text's most frequent words, rare: as App. D assumes"
    )
    panels.legend(figure, columns=2, title=note)
    return figure


def _formulas(computed: Computed) -> Figure:
    figure, axes = plots.figure(1, 3, panel_size=(3.7, 3.3))
    left, middle, right = axes[0]
    forms = {"printed": "printed, minus", "factored": "factored, as printed", "corrected": "corrected, plus"}
    inverse = _stacked(computed["inverse"], forms).assign(error=lambda own: own.value.clip(lower=1e-17))
    panels.scatter(left, inverse, x="damping", y="error", by="form", identity=False, size=16)
    panels.rule(left, y=1e-12)
    title = "closed forms against Direct"
    panels.frame(left, x="damping λ", y="largest error / largest entry", title=title, log="xy")
    lines = {
        "error_scaled": "printed limit, times |d|²",
        "error_corrected": "|d|² (Σ TF TF / p - 1)",
        "rank_one": "rank-one term",
    }
    limit = _stacked(computed["limit"], lines).assign(own=lambda own: own.corpus + own.vocabulary)
    panels.traces(
        middle, limit, x="damping_ratio", y="value", run="own", by="form", marker="o", markersize=3, alpha=1
    )
    title = "influence and its limit (lines: corpora)"
    panels.frame(middle, x="damping λ / smallest p", y="relative to the limit", title=title, log="xy")
    _draw_frequencies(right, computed["frequencies"])
    for ax in axes[0]:
        ax.legend(fontsize=7)
    return figure


def _stacked(table: pd.DataFrame, labels: dict[str, str]) -> pd.DataFrame:
    """Return the columns of `labels` one below the other, as `value`, with their label as `form`."""
    return pd.concat([table.assign(form=label, value=table[column]) for column, label in labels.items()])


def _draw_frequencies(ax: Axes, frequencies: pd.DataFrame) -> None:
    own = frequencies[frequencies.vocabulary == "all"].sort_values("source", kind="stable")
    own = own.assign(of=own.corpus + own.source.map({"model": ", drawn from the model", "text": ", text"}))
    styles = panels.styles_of(own.of.unique())
    for of, rows in own.groupby("of", sort=False):  # bins may share their median, which `panels.lines` would merge
        color = styles[of]["color"]
        ax.fill_between(rows.expected, rows.ratio_low, rows.ratio_high, color=color, alpha=0.15, linewidth=0)
        ax.plot(rows.expected, rows.ratio, markersize=4, linewidth=1, label=str(of), **styles[of])
    independent = own.sort_values("expected")
    ax.plot(independent.expected, independent.independent, "k:", linewidth=1)
    panels.frame(ax, x="|d| p (bins; band: 10 to 90 % of words)", y="DF / (|d| p)", log="x")
    ax.set_ylim(0, None)
    ax.set_title("document frequency (dotted:\nindependent words)")
