"""Influence in a bag-of-words model in closed form, and TF-IDF beside it (Klochkov & Liu 2024, App. D).

The model: every word of a document is drawn from p = softmax(x); parameters are the logits x, one for each word of
the vocabulary. Documents are rows of counts, (D, V), all of one length |d|. Loss: -log p, mean over words, so

    gradient of document d: p - TF(d), TF = counts / |d|,          Gauss-Newton matrix = Hessian: diag(p) - p pᵀ.

The appendix sums over a document's words: its gradient is |d| times ours (with the sign of log p).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from curvlab.arguments import positive, tensor
from curvlab.linalg import LinearOperator


class BagOfWordsOperator(LinearOperator):
    """G = diag(p) - p pᵀ, (V, V), the Hessian of -log p by the logits, mean over words; G 1 = 0.

    Args:
        probabilities: (V,) p, positive, with sum 1.
    """

    def __init__(self, probabilities: Tensor) -> None:
        _check_probabilities(probabilities)
        super().__init__(len(probabilities), dtype=probabilities.dtype, device=probabilities.device)
        self.probabilities = probabilities

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return G V, (V, K) -> (V, K). Cost: linear."""
        return self.probabilities[:, None] * (vectors - self.probabilities @ vectors)

    @property
    def is_psd(self) -> bool:
        """True."""
        return True


def word_probabilities(counts: Tensor) -> Tensor:
    """Return the maximum-likelihood p, (D, V) -> (V,): each word's share of all words.

    Raises:
        ValueError: a word that never occurs, whose p would be 0; or documents of different lengths.
    """
    _document_length(counts)
    totals = counts.sum(0)
    if bool((totals == 0).any()):
        raise ValueError(
            f"{int((totals == 0).sum())} of {len(totals)} words occur in no document: drop their columns, or the "
            "model has no finite logits."
        )
    return totals / totals.sum()


def damped_inverse_product(probabilities: Tensor, damping: float, vectors: Tensor) -> Tensor:
    """Return (diag(p) - p pᵀ + damping)⁻¹ V, (V, K) -> (V, K), by Sherman and Morrison. Cost: linear.

    diag(p + λ)⁻¹ + (λ Σ_j d_j)⁻¹ d dᵀ with d = p / (p + λ). App. D prints the second term with a minus, which
    contradicts the line above it there: the rank-one part is subtracted before inversion, so it adds after.
    """
    _check_probabilities(probabilities)
    positive("damping", damping, "diag(p) - p pᵀ is singular, G 1 = 0")
    shares = probabilities / (probabilities + damping)
    rank_one = shares[:, None] * (shares @ vectors) / (damping * shares.sum())
    return vectors / (probabilities + damping)[:, None] + rank_one


def document_gradients(counts: Tensor) -> Tensor:
    """Return the gradient of log p of each document by the logits, mean over its words: TF - p, (D, V)."""
    return term_frequencies(counts) - word_probabilities(counts)


def influence_similarity(counts: Tensor, damping: float, *, queries: Tensor | None = None) -> Tensor:
    """Return g_qᵀ (G + damping)⁻¹ g_d of documents, (D, V) -> (Q, D): what adding d does to log p of q.

    Minus the influence on the loss that curvlab.influence gives. As damping -> 0 it goes to
    Σ_t TF(t, q) TF(t, d) / p_t - 1: App. D's limit lacks the -1 (and has |d|², from gradients summed over words).

    Args:
        counts: (D, V), rows of one sum.
        damping: compare it with the smallest p, not with 1: at p_t << damping a word is weighted alike.
        queries: rows that are asked about; all by default.
    """
    gradients = document_gradients(counts)
    asked = gradients if queries is None else gradients[queries]
    return asked @ damped_inverse_product(word_probabilities(counts), damping, gradients.T)


def term_frequencies(counts: Tensor) -> Tensor:
    """Return counts / |d|, (D, V)."""
    return counts / _document_length(counts)


def document_frequencies(counts: Tensor) -> Tensor:
    """Return the share of documents that each word occurs in, (D, V) -> (V,)."""
    return (counts > 0).to(counts.dtype).mean(0)


def tf_idf_similarity(
    counts: Tensor, *, idf: Literal["root", "log"] = "root", queries: Tensor | None = None
) -> Tensor:
    """Return Σ_t TF(t, q) TF(t, d) IDF(t)², (D, V) -> (Q, D).

    Args:
        counts: (D, V), rows of one sum.
        idf: "root", sqrt(1 / DF), as in App. D; "log", log(1 / DF), the usual one.
        queries: rows that are asked about; all by default.
    """
    inverse = 1 / document_frequencies(counts)
    if idf not in ("root", "log"):
        raise ValueError(f"idf must be 'root' or 'log', got {idf!r}")
    squares = inverse if idf == "root" else inverse.log().square()
    frequencies = term_frequencies(counts)
    asked = frequencies if queries is None else frequencies[queries]
    return (asked * squares) @ frequencies.T


def _document_length(counts: Tensor) -> float:
    if counts.ndim != 2 or not counts.dtype.is_floating_point:
        raise ValueError(
            f"counts must be a floating-point (D, V) tensor, got {counts.dtype} {tuple(counts.shape)}"
        )
    lengths = counts.sum(1)
    if not bool((lengths == lengths[0]).all()) or not float(lengths[0]) > 0:
        raise ValueError(
            f"documents must have one length, got {float(lengths.min()):g} to {float(lengths.max()):g} words: cut "
            "them to equal length first."
        )
    return float(lengths[0])


def _check_probabilities(probabilities: Tensor) -> None:
    total = float(tensor("probabilities", probabilities).sum())
    if probabilities.ndim != 1 or not bool((probabilities > 0).all()) or abs(total - 1) > 1e-6:
        raise ValueError(
            f"probabilities must be positive, (V,), with sum 1, got shape {tuple(probabilities.shape)}, smallest "
            f"{float(probabilities.min()):g}, sum {total:g}; word_probabilities(counts) gives them."
        )
