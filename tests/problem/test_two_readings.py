"""Logits whose classes may stand last or second: never read in one of the two ways without a word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.influence import influence_scores
from curvlab.training import MeanLoss, evaluate, train

K, N = 3, 4


class Places(nn.Module):
    """(N, 2) -> (N, C, H)."""

    def __init__(self, classes: int, places: int) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(2, classes * places), (classes, places)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).unflatten(1, self.shape)


@pytest.fixture
def square(generator: torch.Generator) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    return Places(K, K).double().eval(), (x, torch.randint(K, (N, K), generator=generator))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5])], ids=["plain", "class weights"])
def test_what_fits_both_is_refused_everywhere(square, weight) -> None:
    model, data = square
    loss = nn.CrossEntropyLoss(weight=weight)
    settings = {"batch_size": N, "lr": 0.1, "generator": torch.Generator()}
    for call in (
        lambda: GaussNewtonOperator(model, loss, data) @ torch.ones(27, dtype=torch.float64),
        lambda: HessianOperator(model, loss, data) @ torch.ones(27, dtype=torch.float64),
        lambda: influence_scores(model, loss, data, data, damping=0.1),
        lambda: MeanLoss(loss)(model(data[0]), data[1]),
        lambda: evaluate(model, loss, data),
        lambda: train(model, loss, data, num_steps=1, **settings),
    ):
        with pytest.raises(ValueError, match=r"read in two ways.*cross_entropy\(outputs.flatten"):
            call()


@pytest.mark.parametrize("last", [True, False], ids=["classes last", "classes second"])
def test_the_losses_that_the_refusal_names_have_their_own_matrix(square, last: bool) -> None:
    model, data = square

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if last:
            return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        return functional.cross_entropy(outputs, targets)

    def of_parameters(values: Tensor) -> Tensor:
        weight, bias = values[:18].view(9, 2), values[18:]
        logits = (data[0] @ weight.T + bias).view(N, K, K)
        axis = 2 if last else 1
        return -logits.log_softmax(axis).gather(axis, data[1].unsqueeze(axis)).mean()

    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    dense = torch.autograd.functional.hessian(of_parameters, values)
    # The model is linear, so that its Gauss-Newton matrix is the Hessian.
    torch.testing.assert_close(GaussNewtonOperator(model, loss, data).to_dense(), dense)
    assert evaluate(model, loss, data).accuracy is None


def test_shapes_that_fit_one_reading_are_read_so(generator) -> None:
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    model = Places(4, K).double().eval()
    vector = torch.ones(36, dtype=torch.float64)
    last, second = torch.randint(K, (N, 4)), torch.randint(4, (N, K))
    assert (GaussNewtonOperator(model, nn.CrossEntropyLoss(), (x, last)) @ vector).isfinite().all()
    with pytest.raises(ValueError, match="classes last"):
        GaussNewtonOperator(model, nn.CrossEntropyLoss(), (x, second)) @ vector
