"""Weights of examples against the sum of single examples' dense matrices."""

import pytest
import torch
from curvature_oracles import dense_gauss_newton, dense_hessian
from loss_cases import CLASSES, WEIGHTS, focal, inputs, network
from torch import nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator

EXAMPLES = torch.tensor([0.0, 2.0, 0.5, 1.0, 3.0, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=WEIGHTS), focal])
@pytest.mark.parametrize(
    ("operator", "dense"), [(GaussNewtonOperator, dense_gauss_newton), (HessianOperator, dense_hessian)]
)
def test_each_example_counts_as_its_weight_says(loss, operator, dense) -> None:
    model, x = network(3), inputs()
    # Of one example alone a class-weighted mean loses its weight, which is put back.
    terms = WEIGHTS[CLASSES] / WEIGHTS[CLASSES].mean() if getattr(loss, "weight", None) is not None else [1.0] * 6
    expected = (
        sum(EXAMPLES[n] * terms[n] * dense(model, loss, x[n : n + 1], CLASSES[n : n + 1]) for n in range(6)) / 6
    )
    for data in ((x, CLASSES), [(x[:4], CLASSES[:4]), (x[4:], CLASSES[4:])]):
        found = operator(model, loss, data, batch_size=3).weighted(EXAMPLES)
        assert_close(found.to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_what_is_no_weighting_is_refused() -> None:
    op = GaussNewtonOperator(network(3), nn.CrossEntropyLoss(), (inputs(), CLASSES))
    with pytest.raises(ValueError, match=r"one weight for each of 6 examples.*\(5,\)"):
        op.weighted(torch.ones(5))
    with pytest.raises(ValueError, match="not negative"):
        op.weighted(-torch.ones(6))
    with pytest.raises(ValueError, match=r"whole data.*not a sample"):
        op.sample(3).weighted(torch.ones(6))


def test_weights_of_zero_leave_nothing() -> None:
    model, data = network(3).float(), (inputs().float(), CLASSES)
    for op in (
        GaussNewtonOperator(model, nn.CrossEntropyLoss(), data),
        FisherOperator(model, nn.CrossEntropyLoss(), data, kind="empirical"),
    ):
        for weights in (torch.zeros(6), torch.full((6,), 1e-60, dtype=torch.float64)):  # 0 in the model's dtype
            assert float(op.weighted(weights).to_dense().abs().max()) == 0
