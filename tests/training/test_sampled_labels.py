"""The gradient of sampled_label_loss against the definition, draw by draw, and against the Fisher matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator
from curvlab.training import sampled_label_loss

CLASSES = torch.tensor([0, 2, 1, 1, 0])
TOKENS = torch.tensor([[0, 2], [1, -100], [2, 2]])
CASES = {
    "classes": (nn.CrossEntropyLoss(), (5, 4), CLASSES),
    "smoothed classes": (nn.CrossEntropyLoss(label_smoothing=0.3), (5, 4), CLASSES),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), (5, 4), CLASSES),
    "tokens": (nn.CrossEntropyLoss(), (3, 4), TOKENS),
    "gaussian": (nn.MSELoss(), (5, 4), torch.zeros(5, 3)),
    "bernoulli": (nn.BCEWithLogitsLoss(), (5, 4), torch.zeros(5, 3)),
}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Model(nn.Module):
    """Linear; for tokens, two predictions of three classes."""

    def __init__(self, num_predictions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3 * num_predictions, bias=False)
        self.num_predictions = num_predictions

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        return outputs if self.num_predictions == 1 else outputs.unflatten(1, (self.num_predictions, 3))


@pytest.mark.parametrize("name", CASES)
def test_outer_products_average_to_the_fisher_matrix(name: str, generator: torch.Generator) -> None:
    loss, shape, targets = CASES[name]
    model = Model(2 if name == "tokens" else 1).double()
    with torch.no_grad():
        model.linear.weight.copy_(torch.randn(model.linear.weight.shape, generator=generator))
    inputs = torch.randn(shape, dtype=torch.float64, generator=generator)
    targets = targets.double() if targets.is_floating_point() else targets
    expected = FisherOperator(model, loss, (inputs, targets)).to_dense()
    outputs = model(inputs).detach().requires_grad_()
    draws = []
    for _ in range(400):
        value = sampled_label_loss(loss, outputs, targets, generator=generator)
        draws.append(torch.autograd.grad(value, outputs)[0].flatten(1))
    d = torch.einsum("kno,ni->koi", torch.stack(draws), inputs).flatten(1)  # by the weights
    outer = torch.einsum("ki,kj->kij", d, d)
    mean, count = outer.mean(0), len(d)
    standard_error = (outer.var(0) / count).sum().sqrt()
    assert (mean - expected).norm() <= 2.5 * standard_error
    assert standard_error < 0.2 * expected.norm()  # the comparison means something


def test_its_value_is_the_likelihood_of_the_labels_drawn(generator: torch.Generator) -> None:
    outputs = torch.tensor([[50.0, 0.0], [0.0, 50.0], [50.0, 0.0]], requires_grad=True)  # certain labels
    value = sampled_label_loss(nn.CrossEntropyLoss(), outputs, torch.tensor([1, 1, 1]), generator=generator)
    assert float(value.detach()) < 1e-12
    fair = torch.zeros(4, 2, requires_grad=True)
    value = sampled_label_loss(nn.CrossEntropyLoss(), fair, torch.tensor([0, 0, 0, -100]), generator=generator)
    assert float(value.detach()) == pytest.approx(3 * 0.693147 / 3**0.5, rel=1e-5)


def test_a_generator_fixes_the_draw_and_targets_must_fit() -> None:
    outputs, targets = torch.linspace(-1, 1, 15).view(5, 3), CLASSES
    first, again = (
        sampled_label_loss(nn.CrossEntropyLoss(), outputs, targets, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert first == again
    with pytest.raises(ValueError, match="needs integer class indices of shape"):
        sampled_label_loss(nn.CrossEntropyLoss(), outputs, targets[:3], generator=torch.Generator())
