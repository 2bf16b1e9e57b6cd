"""Similarities of sentences: means of squares, and how well a similarity picks the other wording out of ten."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from experiments.shared.stats import jackknife_error

METHODS = ("gradient", "influence")
KINDS = ("original", "paraphrased")


def pair_table(gradient: Tensor, influence: Tensor, sentences: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each pair of sentences (numbered from 0 as in the file), each pair once.

    Args:
        gradient: (20, 20) similarities.
        influence: (20, 20) similarities.
        sentences: their `fact` and `kind`.
    """
    first, second = np.triu_indices(len(sentences))
    facts, kinds = sentences.fact.to_numpy(), sentences.kind.to_numpy()
    return pd.DataFrame(
        {
            "first": first,
            "second": second,
            "first_fact": facts[first],
            "second_fact": facts[second],
            "first_kind": kinds[first],
            "second_kind": kinds[second],
            "gradient": gradient.numpy()[first, second],
            "influence": influence.numpy()[first, second],
        }
    )


def matrices(table: pd.DataFrame, model_seed: int) -> dict[str, np.ndarray]:
    """Return the (20, 20) similarities of one model by method, originals first."""
    own = table[table.model_seed == model_seed]
    size = int(own.second.max()) + 1
    found = {}
    for method in METHODS:
        matrix = np.empty((size, size))
        matrix[own["first"], own["second"]] = own[method]
        matrix[own["second"], own["first"]] = own[method]
        found[method] = matrix
    return found


def square_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return mean ± s.e. of the four squares of each heat map, and of the unrelated pairs in them.

    As in the paper, the s.e. is that of 100 (or, unrelated, 90) independent values; same-kind squares are
    symmetric and hold the ones of the diagonal.
    """
    rows = []
    for seed in table.model_seed.unique():
        maps = matrices(table, seed)
        maps["difference"] = maps["gradient"] - maps["influence"]
        half = len(maps["gradient"]) // 2
        for name, matrix in maps.items():
            for i, row_kind in enumerate(KINDS):
                for j, column_kind in enumerate(KINDS):
                    square = matrix[i * half : (i + 1) * half, j * half : (j + 1) * half]
                    apart = square[~np.eye(half, dtype=bool)]
                    rows.append(
                        {
                            "model_seed": seed,
                            "heat_map": name,
                            "rows": row_kind,
                            "columns": column_kind,
                            "mean": square.mean(),
                            "stderr": square.std(ddof=1) / np.sqrt(square.size),
                            "unrelated_mean": apart.mean(),
                            "unrelated_stderr": apart.std(ddof=1) / np.sqrt(apart.size),
                            "same_fact_mean": np.diag(square).mean(),
                        }
                    )
    return pd.DataFrame(rows)


def retrieval_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each model, method, direction and sentence: is its other wording the most similar of ten?

    `margin`: (similarity to the other wording - mean of the nine others) / their standard deviation.
    """
    return pd.DataFrame(
        {"model_seed": seed, "method": method} | row
        for seed in table.model_seed.unique()
        for method, matrix in matrices(table, seed).items()
        for row in retrieved(matrix)
    )


def retrieved(matrix: np.ndarray) -> list[dict[str, Any]]:
    """Return the rows of `retrieval_table` of one matrix of similarities, originals first."""
    half, rows = len(matrix) // 2, list[dict[str, Any]]()
    across = matrix[:half, half:]
    for direction, scores in zip(("to paraphrased", "to original"), (across, across.T), strict=True):
        for fact in range(half):
            others = np.delete(scores[fact], fact)
            rows.append(
                {
                    "direction": direction,
                    "fact": fact + 1,
                    "similarity": scores[fact, fact],
                    "others_mean": others.mean(),
                    "others_std": others.std(ddof=1),
                    "margin": (scores[fact, fact] - others.mean()) / others.std(ddof=1),
                    "rank": 1 + int((others >= scores[fact, fact]).sum()),
                }
            )
    return rows


def shared_words(sentences: list[str]) -> np.ndarray:
    """Return the share of the words of two sentences that they have in common (Jaccard): no model, no gradient."""
    words = [set(re.findall(r"[\w']+", sentence.lower())) for sentence in sentences]
    return np.array([[len(a & b) / len(a | b) for b in words] for a in words])


def unrelated(table: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs of sentences about different facts."""
    return table[table.first_fact != table.second_fact]


def mean_difference(table: pd.DataFrame) -> float:
    """Return the mean of gradient - influence similarity over the unrelated pairs."""
    pairs = unrelated(table)
    return float((pairs.gradient - pairs.influence).mean())


def positive_share(table: pd.DataFrame) -> float:
    """Return the share of unrelated pairs whose gradient similarity is the higher one."""
    pairs = unrelated(table)
    return float((pairs.gradient > pairs.influence).mean())


def jackknife_facts(table: pd.DataFrame, statistic: Callable[[pd.DataFrame], float]) -> tuple[float, int]:
    """Return the jackknife standard error of a statistic over facts (both wordings left out), and their number."""
    facts = np.unique(table.first_fact)
    left_out = [statistic(table[(table.first_fact != fact) & (table.second_fact != fact)]) for fact in facts]
    return jackknife_error(left_out), len(facts)
