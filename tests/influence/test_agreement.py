from __future__ import annotations

import pytest
import torch
from scipy import stats

from curvlab.influence import agreement


@pytest.fixture
def scores(generator):
    return torch.randn(200, generator=generator, dtype=torch.float64)


def test_pearson_and_slope_match_scipy(scores, generator) -> None:
    y = 0.7 * scores + 0.3 * torch.randn(200, generator=generator, dtype=torch.float64) + 2.0
    result = agreement(scores, y, scale=1.0)
    expected = stats.linregress(scores.numpy(), y.numpy())
    assert result.pearson == pytest.approx(expected.rvalue)
    assert result.slope == pytest.approx(expected.slope)
    assert result.case == "agree"


def test_the_relative_error_is_over_the_first_scores() -> None:
    x, y = torch.tensor([3.0, -4.0]), torch.tensor([3.0, 1e8])
    assert agreement(x, y, scale=1.0).relative_error == pytest.approx((1e8 + 4) / 5)
    assert agreement(y, x, scale=1.0).relative_error == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("factor", "scale", "case"),
    [(1.0, 1.0, "agree"), (3.0, 1.0, "apart"), (1.0, 100.0, "both near zero"), (-1.0, 1.0, "apart")],
)
def test_the_three_cases(scores, factor, scale, case) -> None:
    assert agreement(scores, factor * scores, scale=scale).case == case


def test_overflow_is_apart_not_an_error(scores) -> None:
    y = scores.clone()
    y[3] = torch.inf
    assert agreement(scores, y, scale=1.0).case == "apart"


def test_lengths_must_agree(scores) -> None:
    with pytest.raises(ValueError, match="two vectors of one length"):
        agreement(scores, scores[:-1], scale=1.0)
