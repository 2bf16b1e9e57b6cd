"""Formulas of App. D as they are printed (Klochkov & Liu 2024); curvlab.influence.tf_idf has those that hold."""

from __future__ import annotations

import torch
from torch import Tensor

from curvlab.influence.tf_idf import term_frequencies, word_probabilities


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
