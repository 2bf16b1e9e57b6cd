"""Influence in a bag-of-words model is TF-IDF (Klochkov & Liu 2024, App. D).

make lissa-appd PRESET=smoke|embedded|laptop|paper ARGS="length=50"

Real text as documents of equal length, in two vocabularies: the most frequent words, and words so rare that p |d|
is at most `max_expected`, as the appendix assumes; beside them documents of the same size drawn from the model.
Damping is given relative to the smallest p. Per query: rank correlation and top-k overlap of influence with
TF-IDF.

What is printed and does not hold: in the damped inverse's second form the rank-one term has the wrong sign (the
form before it is right); the limit of the influence lacks -1 and |d|² (the appendix sums gradients over words and
takes the Hessian of one word; with the Hessian of a document |d| is left). "DF(d)" means DF(t), and p^(-1/2)
weights, IDF = sqrt(1 / DF), are its own variant: the usual log(1 / DF) is shown too. Similarity here is g_qᵀ(G +
λ)⁻¹g_d, as printed; influence on the loss is minus that.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from curvlab import runs
from curvlab.data import TextCorpus
from curvlab.influence.tf_idf import (
    BagOfWordsOperator,
    damped_inverse_product,
    document_frequencies,
    document_gradients,
    influence_similarity,
    term_frequencies,
    tf_idf_similarity,
    word_probabilities,
)
from curvlab.linalg import identity
from curvlab.reporting import save_claims
from curvlab.runs import Run
from curvlab.solvers import Direct
from experiments.lissa.appd_claims import judge_claims
from experiments.lissa.appd_corpus import WordCounts, drawn_from_the_model, equal_documents, tokenize
from experiments.lissa.appd_formulas import inverse_factored, inverse_printed, printed_limit, rank_one_term
from experiments.lissa.appd_plot import draw
from experiments.lissa.appd_ranking import per_query

Row = dict[str, Any]
FILES = ("table.csv", "inverse.csv", "limit.csv", "frequencies.csv")
NUM_BINS = 12  # of words by p |d|


@runs.main("lissa/appd_tf_idf")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="lissa", item="appd", title="Influence in a bag-of-words model") as run:
        rows: dict[str, list[Row]] = {name: [] for name in FILES}
        for name, part in cfg.corpora.items():
            if part is None:
                continue
            corpus: TextCorpus = instantiate(part.data)
            run.record_data(corpus.name, corpus.checksum)
            for vocabulary in ("all", "rare"):
                key = {
                    "checksum": corpus.checksum,
                    "vocabulary": vocabulary,
                    "length": cfg.length,
                    "max_words": cfg.max_words,
                    "max_documents": cfg.max_documents,
                    "max_expected": cfg.max_expected,
                    "join": part.join,
                    "damping_ratios": list(cfg.damping_ratios),
                    "dampings": list(cfg.dampings),
                    "top": cfg.top,
                    "version": 1,
                }

                def compute(
                    name: str = str(name),
                    part: DictConfig = part,
                    corpus: TextCorpus = corpus,
                    v: str = vocabulary,
                ) -> dict[str, Any]:
                    return _measure(run, cfg, name, part, corpus=corpus, vocabulary=v)

                found = run.unit("lissa/appd", key, compute)
                for file in FILES:
                    rows[file] += [{"corpus": str(name), "vocabulary": vocabulary} | row for row in found[file]]
        tables = [pd.DataFrame(rows[name]) for name in FILES]
        for table, name in zip(tables, FILES, strict=True):
            run.save_table(table, name)
        save_claims(run.folder, judge_claims(*tables))
        for name, figure in draw(*tables).items():
            run.save_figure(figure, name)
        sizes = tables[2].drop_duplicates(["corpus", "vocabulary"])
        run.note(
            scale={
                "corpora": {"ours": sorted(set(sizes.corpus)), "paper": "none: a derivation"},
                "documents": {"ours": [int(size) for size in sizes.num_documents], "paper": "any"},
                "words": {"ours": [int(size) for size in sizes.num_words], "paper": "any"},
                "document length": {"ours": cfg.length, "paper": "any, equal"},
            },
            seeds=[cfg.seed],
        )


def _measure(
    run: Run, cfg: DictConfig, name: str, part: DictConfig, *, corpus: TextCorpus, vocabulary: str
) -> dict[str, Any]:
    real = equal_documents(
        tokenize([*corpus.train, *corpus.test]),
        length=cfg.length,
        max_words=cfg.max_words,
        join=part.join,
        max_documents=cfg.max_documents,
        max_expected=cfg.max_expected if vocabulary == "rare" else None,
    )
    drawn = drawn_from_the_model(real, run.generator("documents", name, vocabulary))
    found: dict[str, list[Row]] = {file: [] for file in FILES}
    for source, documents in (("text", real), ("model", drawn)):
        found["table.csv"] += [{"source": source} | row for row in _rankings(documents, cfg)]
        found["frequencies.csv"] += [{"source": source} | row for row in _frequencies(documents)]
    found["inverse.csv"] = _inverses(real, cfg)
    found["limit.csv"] = _limits(real, cfg)
    return found


def _rankings(documents: WordCounts, cfg: DictConfig) -> list[Row]:
    """Return agreement of influence with each TF-IDF and with TF products, per damping; means over queries."""
    counts = documents.counts
    smallest = float(word_probabilities(counts).min())
    frequencies = term_frequencies(counts)
    others = {
        "root": tf_idf_similarity(counts, idf="root"),
        "log": tf_idf_similarity(counts, idf="log"),
        "none": frequencies @ frequencies.T,
    }
    rows = []
    for ratio in cfg.damping_ratios:
        influence = influence_similarity(counts, ratio * smallest)
        for idf, similarity in others.items():
            agreement = per_query(influence, similarity, top=cfg.top)
            row: Row = {"damping_ratio": float(ratio), "damping": ratio * smallest, "idf": idf}
            for statistic, values in agreement.items():
                row[statistic] = float(values.mean())
                row[f"{statistic}_stderr"] = float(values.std()) / len(values) ** 0.5
            rows.append(row | {"num_queries": len(counts)})
    return rows


def _frequencies(documents: WordCounts) -> list[Row]:
    """Return DF over |d| p, the median of words in bins of |d| p."""
    length = float(documents.counts[0].sum())
    probabilities = word_probabilities(documents.counts)
    expected = probabilities * length
    ratios = document_frequencies(documents.counts) / expected
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


def _inverses(documents: WordCounts, cfg: DictConfig) -> list[Row]:
    """Return the largest relative errors of the closed forms against `Direct`, for all unit vectors."""
    probabilities = word_probabilities(documents.counts)
    eye = torch.eye(len(probabilities), dtype=probabilities.dtype)
    rows = []
    for damping in cfg.dampings:
        solved = Direct(max_size=len(eye)).solve(BagOfWordsOperator(probabilities) + damping * identity, eye).x
        forms = {
            "corrected": damped_inverse_product(probabilities, damping, eye),
            "factored": inverse_factored(probabilities, damping),
            "printed": inverse_printed(probabilities, damping),
        }
        largest = float(solved.abs().max())
        errors = {name: float((form - solved).abs().max()) / largest for name, form in forms.items()}
        rows.append({"damping": float(damping), "smallest": float(probabilities.min()), **errors})
    return rows


def _limits(documents: WordCounts, cfg: DictConfig) -> list[Row]:
    """Return, per damping, the rank-one term's size and the distance to the printed and the corrected limit.

    All with the appendix's gradients, |d| (TF - p), and the Hessian of one word; relative to the limit, over pairs
    of different documents.
    """
    counts = documents.counts
    probabilities, length = word_probabilities(counts), float(counts[0].sum())
    gradients = length * document_gradients(counts)
    printed = printed_limit(counts)
    corrected = length**2 * (printed - 1)
    rows = []
    for ratio in cfg.damping_ratios:
        damping = ratio * float(probabilities.min())
        influence = gradients @ damped_inverse_product(probabilities, damping, gradients.T)
        term = rank_one_term(probabilities, damping, gradients)
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


if __name__ == "__main__":
    main()
