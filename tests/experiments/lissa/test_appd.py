"""lissa-appd: documents of equal length, printed formulas, rankings, and the target at smoke scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from curvlab.lab.data import DataNotFoundError
from experiments.lissa.bag_of_words import (
    drawn_from_the_model,
    equal_documents,
    inverse_factored,
    inverse_printed,
    load_articles,
    per_query,
    rank_one_term,
    tokenize,
)

TEXTS = ["The cat saw the dog.", "A dog, the DOG and <unk> 42 cats saw it", "the cat"]


def test_words_are_lower_case_and_have_two_letters() -> None:
    assert tokenize(TEXTS) == [
        ["the", "cat", "saw", "the", "dog"],
        ["dog", "the", "dog", "and", "cats", "saw", "it"],
        ["the", "cat"],
    ]


def test_joined_text_is_cut_into_pieces_of_equal_length() -> None:
    found = equal_documents(tokenize(TEXTS), length=3, max_words=4, join=True)
    assert found.words == ("the", "dog", "cat", "saw")  # 4, 3, 2 and 2 times, ties by alphabet
    assert found.counts.tolist() == [[1, 0, 1, 1], [1, 2, 0, 0], [1, 1, 0, 1]]


def test_separate_documents_are_cut_and_short_ones_left_out() -> None:
    found = equal_documents(tokenize(TEXTS), length=4, max_words=4, join=False)
    assert found.words == ("the", "dog", "cat", "saw")
    assert found.counts.tolist() == [[2, 0, 1, 1], [1, 2, 0, 1]]


def test_rare_vocabulary_keeps_its_bound() -> None:
    shares = 1 / torch.arange(1.0, 401.0)
    drawn = torch.multinomial(shares, 4800, replacement=True, generator=torch.Generator().manual_seed(0))
    texts = [[f"word{place}" for place in row] for row in drawn.reshape(80, 60).tolist()]
    found = equal_documents(texts, length=20, max_words=100, join=True, max_expected=0.6)
    assert len(found.words) == 100
    assert 0.3 < float((found.counts.sum(0) / len(found.counts)).max()) <= 0.6
    assert set(found.counts.sum(1).tolist()) == {20.0}
    everything = equal_documents(texts, length=20, max_words=100, join=True)
    assert float((everything.counts.sum(0) / len(everything.counts)).max()) > 0.6


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter length"):
        equal_documents(tokenize(TEXTS), length=50, max_words=4, join=True)


def test_drawn_documents_follow_the_model() -> None:
    real = equal_documents([["a", "a", "a", "b"] * 50, ["c", "a"] * 100], length=100, max_words=3, join=False)
    big = drawn_from_the_model(
        type(real)(real.counts.repeat(200, 1), real.words), torch.Generator().manual_seed(0)
    )
    assert set(big.counts.sum(1).tolist()) == {100.0}
    shares = big.counts.sum(0) / big.counts.sum()
    torch.testing.assert_close(shares, real.counts.sum(0) / real.counts.sum(), rtol=0, atol=0.01)


def test_articles_are_read_and_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"corpora\.articles=null"):
        load_articles(tmp_path)
    (tmp_path / "xsum").mkdir()
    lines = [json.dumps({"document": text, "summary": ""}) for text in TEXTS]
    (tmp_path / "xsum" / "test.jsonl").write_text("\n".join(lines) + "\n")
    assert load_articles(tmp_path, num_train=2).train == tuple(TEXTS[:2])


def test_printed_inverse_has_the_wrong_sign() -> None:
    probabilities, damping = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 0.1
    matrix = torch.diag(probabilities + damping) - torch.outer(probabilities, probabilities)
    inverse = torch.linalg.inv(matrix)
    torch.testing.assert_close(inverse_factored(probabilities, damping), inverse, rtol=1e-12, atol=1e-12)
    printed = inverse_printed(probabilities, damping)
    assert float((printed - inverse).abs().max()) > 1
    gradients = torch.tensor([[0.5, -0.3, -0.2], [-0.5, 0.7, -0.2]], dtype=torch.float64)
    term = rank_one_term(probabilities, damping, gradients)
    difference = gradients @ (inverse - printed) @ gradients.T
    torch.testing.assert_close(2 * term, difference, rtol=1e-10, atol=1e-14)


def test_ranking_leaves_out_the_query_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(9, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    left.fill_diagonal_(1e6)
    found = per_query(left, right, top=3)
    others = [j for j in range(9) if j != 4]
    one, two = left[4][others], right[4][others]
    assert float(found["spearman"][4]) == pytest.approx(spearmanr(one, two).statistic)
    best = set(one.argsort()[-3:].tolist()) & set(two.argsort()[-3:].tolist())
    assert float(found["overlap"][4]) == pytest.approx(len(best) / 3)
    same = per_query(left, 2 * left + 1, top=3)
    assert all(torch.allclose(values, torch.ones(9, dtype=torch.float64)) for values in same.values())
    with pytest.raises(ValueError, match="top must be between 1 and 8"):
        per_query(left, right, top=9)
    with pytest.raises(ValueError, match="two square matrices"):
        per_query(left, right[:3], top=1)
