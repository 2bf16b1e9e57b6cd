"""App. D: influence against TF-IDF, on real documents and on drawn ones, and the formulas behind it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

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
from curvlab.lab import Run
from curvlab.lab.data import TextCorpus
from curvlab.linalg import identity
from curvlab.solvers import Direct
from experiments.lissa.appd.corpus import WordCounts, drawn_from_the_model, equal_documents, tokenize
from experiments.lissa.appd.formulas import inverse_factored, inverse_printed, printed_limit, rank_one_term
from experiments.lissa.appd.ranking import per_query

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
            key = names | settings | {"checksum": corpus.checksum, "join": part.join}
            measure = partial(_measure, run, cfg, corpus, key)
            found = run.unit("lissa/appd", key, measure, version=1, about=f"{name}, {vocabulary} words")
            for table, rows in tables.items():
                rows += [names | row for row in found[table]]
    run.note(seeds=[cfg.seed])
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def _measure(run: Run, cfg: DictConfig, corpus: TextCorpus, key: Row) -> dict[str, Any]:
    real = equal_documents(
        tokenize([*corpus.train, *corpus.test]),
        length=cfg.length,
        max_words=cfg.max_words,
        join=key["join"],
        max_documents=cfg.max_documents,
        max_expected=cfg.max_expected if key["vocabulary"] == "rare" else None,
    )
    drawn = drawn_from_the_model(real, run.generator("documents", key["corpus"], key["vocabulary"]))
    rankings, frequencies = [], []
    for source, documents in (("text", real), ("model", drawn)):
        rankings += [{"source": source} | row for row in _rankings(documents, cfg)]
        frequencies += [{"source": source} | row for row in _frequencies(documents)]
    found = (rankings, _inverses(real, cfg), _limits(real, cfg), frequencies)
    return dict(zip(TABLES, found, strict=True))


def _rankings(documents: WordCounts, cfg: DictConfig) -> list[Row]:
    """Return agreement of influence with each TF-IDF and with TF products at each damping; means over queries."""
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
    """Return, for each damping, the rank-one term's size and the distance to the printed and the corrected limit.

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
