"""Word counts of documents of equal length, App. D's formulas as they are printed, and agreement of rankings.

The formulas that hold are in curvlab.influence.tf_idf.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.feature_extraction.text import CountVectorizer
from torch import Tensor

from curvlab.influence.tf_idf import term_frequencies, word_probabilities
from curvlab.lab.data import DataNotFoundError, TextCorpus
from experiments.shared.stats import column_correlations

IGNORED = frozenset({"unk"})  # the Penn Treebank's mark of a word that it removed


@dataclass(frozen=True)
class WordCounts:
    """Documents as rows of counts, all of one length.

    Attributes:
        counts: (D, V) float64; every word occurs somewhere.
        words: V words, most frequent in the whole text first.
    """

    counts: Tensor
    words: tuple[str, ...]


def load_articles(root: str | Path, *, num_train: int | None = None, num_test: int | None = None) -> TextCorpus:
    """Articles of `root/xsum/test.jsonl` (XSum, BBC news), all as training documents."""
    path = Path(root) / "xsum" / "test.jsonl"
    if not path.is_file():
        raise DataNotFoundError(
            f"no articles: looked for {path.as_posix()}, one JSON object with a 'document' a line. Put XSum's "
            "test split there, or leave this corpus out (corpora.articles=null); documentation needs no files."
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    documents = tuple(str(json.loads(line)["document"]) for line in lines if line.strip())[:num_train]
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return TextCorpus(name="xsum", train=documents, test=(), checksum=digest)


def tokenize(texts: Iterable[str]) -> list[list[str]]:
    """Return the lower-case words of each text: scikit-learn's, two characters or more, from a letter on."""
    analyze = CountVectorizer(token_pattern=r"(?u)\b[^\W\d_]\w+\b").build_analyzer()
    return [[word for word in analyze(text) if word not in IGNORED] for text in texts]


def equal_documents(
    tokens: Sequence[Sequence[str]],
    *,
    length: int,
    max_words: int,
    join: bool,
    max_documents: int | None = None,
    max_expected: float | None = None,
) -> WordCounts:
    """Count the `max_words` most frequent words in documents cut to `length` of them.

    Args:
        tokens: words of each text.
        length: |d|, counted after other words are dropped.
        max_words: size of the vocabulary, ties by alphabet.
        join: texts follow one another and are cut into pieces (paragraphs, sentences); otherwise each is a
        document
            of its own, cut at `length` and left out when shorter (articles).
        max_documents: keep the leading ones.
        max_expected: leave out words until p_t |d| is at most this for all: App. D assumes rare words.
    """
    totals = Counter(word for text in tokens for word in text)
    ranked = sorted(totals, key=lambda word: (-totals[word], word))
    first = 0
    while True:
        found = _count(tokens, ranked[first : first + max_words], length, join, max_documents)
        if max_expected is None:
            return found
        expected = found.counts.sum(0) / len(found.counts)
        frequent = {word for word, often in zip(found.words, expected, strict=True) if often > max_expected}
        if not frequent:
            return found
        # Which words remain changes the lengths, so the share of every word: count again, without fewer than all.
        first += max(1, sum(word in frequent for word in ranked[first : first + max_words]))


def _count(
    tokens: Sequence[Sequence[str]], words: Sequence[str], length: int, join: bool, max_documents: int | None
) -> WordCounts:
    places = {word: place for place, word in enumerate(words)}
    texts = [[places[word] for word in text if word in places] for text in tokens]
    if join:
        stream = [place for text in texts for place in text]
        pieces = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
    else:
        pieces = [text[:length] for text in texts if len(text) >= length]
    pieces = pieces[:max_documents]
    if len(pieces) < 2:
        raise ValueError(
            f"{len(pieces)} documents of {length} words: choose a shorter length, more max_words, or more text."
        )
    counts = np.zeros((len(pieces), len(words)))
    for row, piece in zip(counts, pieces, strict=True):
        np.add.at(row, piece, 1)
    kept = counts.sum(0) > 0
    return WordCounts(
        torch.from_numpy(counts[:, kept]), tuple(word for word, keep in zip(words, kept, strict=True) if keep)
    )


def drawn_from_the_model(like: WordCounts, generator: torch.Generator) -> WordCounts:
    """Return as many documents of the same length whose words are drawn independently from the corpus's p."""
    totals = like.counts.sum(0)
    length, size = int(like.counts[0].sum()), len(like.counts)
    drawn = torch.multinomial(totals / totals.sum(), length * size, replacement=True, generator=generator)
    counts = torch.zeros_like(like.counts)
    counts.index_put_(
        (torch.arange(size).repeat_interleave(length), drawn), torch.ones(1, dtype=torch.float64), accumulate=True
    )
    kept = counts.sum(0) > 0
    return WordCounts(
        counts[:, kept], tuple(word for word, keep in zip(like.words, kept.tolist(), strict=True) if keep)
    )


# ------------------------------------------------------------------------------------ as printed
def inverse_factored(probabilities: Tensor, damping: float) -> Tensor:
    """Return diag(q)⁻¹ (I + r rᵀ / (1 - ‖r‖²)) diag(q)⁻¹, q = sqrt(p + λ), r = p / sqrt(p + λ), (V, V)."""
    q = (probabilities + damping).sqrt()
    r = probabilities / q
    inner = torch.eye(len(q), dtype=q.dtype) + torch.outer(r, r) / (1 - r @ r)
    return inner / torch.outer(q, q)


def inverse_printed(probabilities: Tensor, damping: float) -> Tensor:
    """Return diag(p + λ)⁻¹ - (λ Σ_j p_j / (p_j + λ))⁻¹ d dᵀ, d = p / (p + λ), (V, V): the sign is wrong."""
    shares = probabilities / (probabilities + damping)
    return torch.diag(1 / (probabilities + damping)) - torch.outer(shares, shares) / (damping * shares.sum())


def rank_one_term(probabilities: Tensor, damping: float, gradients: Tensor) -> Tensor:
    """Return g_qᵀ (λ Σ_j p_j / (p_j + λ))⁻¹ d dᵀ g_d for all pairs, (D, V) -> (D, D): said to be O(λ)."""
    shares = probabilities / (probabilities + damping)
    projections = gradients @ shares
    return torch.outer(projections, projections) / (damping * shares.sum())


def printed_limit(counts: Tensor) -> Tensor:
    """Return Σ_t TF(t, q) TF(t, d) / p_t for all pairs, (D, V) -> (D, D): the influence as λ -> 0, as printed."""
    frequencies = term_frequencies(counts)
    return (frequencies / word_probabilities(counts)) @ frequencies.T


# ------------------------------------------------------------------------------------ rankings
def per_query(left: Tensor, right: Tensor, *, top: int) -> dict[str, Tensor]:
    """Compare rows of two (D, D) similarities over the other documents.

    Returns:
        spearman, pearson: (D,) correlations; overlap: (D,) share of the `top` most similar that both have.
    """
    size = len(left)
    if left.shape != right.shape or left.shape != (size, size):
        raise ValueError(f"need two square matrices of one size, got {tuple(left.shape)} and {tuple(right.shape)}")
    if not 1 <= top < size:
        raise ValueError(f"top must be between 1 and {size - 1}, the number of other documents, got {top}")
    apart = ~torch.eye(size, dtype=torch.bool)
    one, two = left[apart].reshape(size, size - 1), right[apart].reshape(size, size - 1)
    ranks = [torch.from_numpy(rankdata(rows.numpy(), axis=1)) for rows in (one, two)]
    best = [rows.topk(top, dim=1).indices for rows in (one, two)]
    shared = (best[0][:, :, None] == best[1][:, None]).any(2).double().mean(1)
    spearman, pearson = (column_correlations(a.T, b.T) for a, b in (ranks, (one, two)))
    return {"spearman": spearman, "pearson": pearson, "overlap": shared}
