"""Bag-of-words influence: closed form against dense solutions and autograd, its limit, TF-IDF by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.tf_idf import (
    BagOfWordsOperator,
    damped_inverse_product,
    document_frequencies,
    influence_similarity,
    tf_idf_similarity,
    word_probabilities,
)
from curvlab.linalg import identity
from curvlab.solvers import Direct


@pytest.fixture
def counts() -> Tensor:
    """40 documents of 25 words, with a vocabulary whose frequencies fall as 1/k."""
    generator = torch.Generator().manual_seed(0)
    shares = 1 / torch.arange(1, 61, dtype=torch.float64)
    drawn = torch.multinomial(shares, 40 * 25, replacement=True, generator=generator).reshape(40, 25)
    found = torch.stack([torch.bincount(row, minlength=60) for row in drawn]).double()
    return found[:, found.sum(0) > 0]


def dense_hessian(probabilities: Tensor) -> Tensor:
    """Return the Hessian of the mean -log p over words distributed as p, by autograd."""

    def loss(logits: Tensor) -> Tensor:
        return -(probabilities * logits.log_softmax(0)).sum()

    return torch.autograd.functional.hessian(loss, probabilities.log())


@pytest.mark.parametrize("damping", [1e-5, 1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("size", [50, 200, 1000])
def test_closed_form_agrees_with_direct(size: int, damping: float) -> None:
    shares = 1 / torch.arange(1, size + 1, dtype=torch.float64)
    probabilities = shares / shares.sum()
    b = torch.randn(size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = Direct().solve(BagOfWordsOperator(probabilities) + damping * identity, b).x
    found = damped_inverse_product(probabilities, damping, b)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-12


def test_operator_is_the_hessian_of_the_model(counts: Tensor) -> None:
    probabilities = word_probabilities(counts)
    operator = BagOfWordsOperator(probabilities)
    torch.testing.assert_close(operator.to_dense(), dense_hessian(probabilities), rtol=1e-12, atol=1e-15)
    assert operator.is_psd
    ones = torch.ones(len(probabilities), dtype=torch.float64)
    assert float((operator @ ones).abs().max()) < 1e-15


def test_operator_is_the_gauss_newton_matrix_over_words(counts: Tensor) -> None:
    class Logits(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.x + 0 * inputs[:, :1]

    words = torch.repeat_interleave(torch.arange(counts.shape[1]), counts.sum(0).long())
    model = Logits(counts.shape[1])
    model.x.data = word_probabilities(counts).log()
    data = (torch.zeros(len(words), 1, dtype=torch.float64), words)
    dense = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data).to_dense()
    expected = BagOfWordsOperator(word_probabilities(counts)).to_dense()
    torch.testing.assert_close(dense, expected, rtol=1e-10, atol=1e-14)


def test_similarity_is_that_of_gradients_and_the_dense_inverse(counts: Tensor) -> None:
    probabilities, damping = word_probabilities(counts), 1e-3
    logits = probabilities.log().requires_grad_()
    rows = [
        torch.autograd.grad((row / row.sum() * logits.log_softmax(0)).sum(), logits)[0]
        for row in counts  # log p, mean over a document's words
    ]
    gradients = torch.stack(rows)
    matrix = dense_hessian(probabilities) + damping * torch.eye(len(probabilities), dtype=torch.float64)
    expected = gradients @ torch.linalg.solve(matrix, gradients.T)
    torch.testing.assert_close(influence_similarity(counts, damping), expected, rtol=1e-9, atol=1e-12)
    asked = torch.tensor([7, 2])
    some = influence_similarity(counts, damping, queries=asked)
    torch.testing.assert_close(some, expected[asked], rtol=1e-9, atol=1e-12)


def test_limit_has_a_minus_one(counts: Tensor) -> None:
    probabilities = word_probabilities(counts)
    frequencies = counts / 25
    limit = (frequencies / probabilities) @ frequencies.T - 1
    found = influence_similarity(counts, 1e-8 * float(probabilities.min()))
    torch.testing.assert_close(found, limit, rtol=1e-6, atol=1e-6)


def test_tf_idf_by_hand() -> None:
    counts = torch.tensor([[2.0, 0.0, 2.0], [1.0, 3.0, 0.0], [4.0, 0.0, 0.0]], dtype=torch.float64)
    assert document_frequencies(counts).tolist() == pytest.approx([1, 1 / 3, 1 / 3])
    root = tf_idf_similarity(counts)
    assert float(root[0, 1]) == pytest.approx(0.5 * 0.25)
    assert float(root[1, 1]) == pytest.approx(0.25**2 + 0.75**2 * 3)
    log = tf_idf_similarity(counts, idf="log", queries=torch.tensor([0]))
    assert log.shape == (1, 3)
    assert float(log[0, 0]) == pytest.approx(0.5**2 * math.log(3) ** 2)
    assert float(log[0, 2]) == 0


def test_bad_input_says_what_to_change(counts: Tensor) -> None:
    probabilities = word_probabilities(counts)
    with pytest.raises(ValueError, match="cut them to equal length"):
        influence_similarity(torch.cat([counts, 2 * counts]), 0.1)
    with pytest.raises(ValueError, match="drop their columns"):
        word_probabilities(torch.nn.functional.pad(counts, (0, 2)))
    with pytest.raises(ValueError, match="floating-point"):
        word_probabilities(counts.long())
    with pytest.raises(ValueError, match="damping must be positive"):
        damped_inverse_product(probabilities, 0.0, probabilities[:, None])
    with pytest.raises(ValueError, match="with sum 1"):
        BagOfWordsOperator(2 * probabilities)
    with pytest.raises(ValueError, match="'root' or 'log'"):
        tf_idf_similarity(counts, idf="square")  # type: ignore[arg-type]
