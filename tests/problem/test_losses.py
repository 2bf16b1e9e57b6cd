"""Closed forms and scales on linear models, where everything is known; wrong losses and targets."""

import re

import pytest
import torch
from curvature_cases import language_problem, problem
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.problem import FunctionLoss, output_loss

OPERATORS = [GaussNewtonOperator, HessianOperator]
X = torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0], [-1.0, 1.0]], dtype=torch.float64)
HALF = torch.full((4, 3), 0.5, dtype=torch.float64)


def linear(num_outputs: int = 3) -> nn.Linear:
    model = nn.Linear(2, num_outputs, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 2 * num_outputs).reshape(num_outputs, 2))
    return model


def test_fishers_of_squared_error_have_the_scale_of_the_loss() -> None:
    # One output of one example: g = 2 (h - y) x / C. With y = h - 1, g gᵀ = 4/C² Σ x xᵀ over all pairs of outputs.
    model, x = linear(), X[:1]
    data = (x, model(x).detach() - 1)
    expected = (2 / 3) ** 2 * torch.kron(torch.ones(3, 3, dtype=torch.float64), torch.outer(x[0], x[0]))
    assert_close(FisherOperator(model, nn.MSELoss(), data, kind="empirical").to_dense(), expected)
    expected = 2 / 3 * torch.kron(torch.eye(3, dtype=torch.float64), torch.outer(x[0], x[0]))
    assert_close(FisherOperator(model, nn.MSELoss(), data, kind="exact").to_dense(), expected)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.MSELoss(reduction="sum")])
def test_outputs_without_an_axis_of_their_own(operator, loss: nn.Module) -> None:
    flat = nn.Sequential(linear(1), nn.Flatten(0))
    op = operator(flat, loss, (X, HALF[:, 0]))
    assert_close(op.to_dense(), operator(linear(1), loss, (X, HALF[:, :1])).to_dense())


@pytest.mark.parametrize("operator", OPERATORS)
def test_squared_error_of_images_averages_over_all_outputs(operator) -> None:
    model = nn.Sequential(linear(6), nn.Unflatten(1, (3, 2)))
    op = operator(model, nn.MSELoss(), (X, torch.zeros(4, 3, 2, dtype=torch.float64)))
    flat = operator(linear(6), nn.MSELoss(), (X, torch.zeros(4, 6, dtype=torch.float64)))
    assert_close(op.to_dense(), flat.to_dense())


@pytest.mark.parametrize("operator", OPERATORS)
def test_ignored_tokens_are_as_if_they_were_not_there(operator) -> None:
    case = language_problem("mean")
    every = torch.randint(6, case.targets.shape, generator=torch.Generator().manual_seed(1))
    short = operator(case.model, case.loss, (case.inputs[:, :2], every[:, :2]))
    ignored = every.clone()
    ignored[:, 2:] = -100  # the model is causal: later tokens change nothing
    assert_close(operator(case.model, case.loss, (case.inputs, ignored)).to_dense(), short.to_dense())


@pytest.mark.parametrize("operator", OPERATORS)
def test_extreme_logits_stay_finite(operator) -> None:
    model = linear()
    with torch.no_grad():
        model.weight.mul_(1e4)
    for loss, targets in ((nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, 0])), (nn.BCEWithLogitsLoss(), HALF)):
        assert operator(model, loss, (X, targets)).to_dense().isfinite().all()


# ---------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.MSELoss(reduction="none"), r"reduction.*mean.*sum"),
        (nn.CrossEntropyLoss(reduction="none"), r"reduction.*mean.*sum"),
    ],
)
def test_unsupported_settings_of_losses_are_refused(loss: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussNewtonOperator(linear(), loss, (X, HALF))


@pytest.mark.parametrize("operator", [*OPERATORS, FisherOperator])
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        pytest.param(nn.MSELoss(), torch.zeros(4).double(), id="broadcast"),
        pytest.param(nn.MSELoss(), torch.zeros(4, 1).double(), id="broadcast column"),
        pytest.param(nn.MSELoss(), torch.zeros(4, 2).double(), id="too few outputs"),
        pytest.param(nn.MSELoss(), torch.zeros(4, 3, dtype=torch.long), id="integer targets"),
        pytest.param(nn.BCEWithLogitsLoss(), torch.zeros(4).double(), id="binary broadcast"),
        pytest.param(nn.CrossEntropyLoss(), torch.zeros(4, 1, dtype=torch.long), id="column of classes"),
        pytest.param(nn.CrossEntropyLoss(), torch.zeros(4, 3).double(), id="class probabilities"),
        pytest.param(nn.CrossEntropyLoss(), torch.zeros(4).double(), id="classes as floats"),
    ],
)
def test_targets_that_do_not_fit_are_refused_with_both_shapes(operator, loss: nn.Module, targets: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"shape \(4.*{re.escape(str(tuple(targets.shape)))}"):
        operator(linear(), loss, (X, targets)) @ torch.zeros(6).double()


@pytest.mark.parametrize("operator", [*OPERATORS, FisherOperator])
@pytest.mark.parametrize("label", [3, -1])
def test_classes_out_of_range_are_refused(operator, label: int) -> None:
    with pytest.raises(ValueError, match=rf"{label}.*3 outputs"):
        operator(linear(), nn.CrossEntropyLoss(), (X, torch.tensor([0, 1, label, 2]))) @ torch.zeros(6).double()


def test_language_model_targets_of_another_length_are_refused() -> None:
    case = language_problem("mean")
    op = GaussNewtonOperator(case.model, case.loss, (case.inputs, case.targets[:, 1:]))
    with pytest.raises(ValueError, match=r"\(5, 4\).*\(5, 3\)"):
        op @ op.randn(1, torch.Generator())


def test_monte_carlo_checks_targets_at_construction() -> None:
    case = problem("linear", "mse")
    with pytest.raises(ValueError, match=r"\(5, 3\).*\(5, 2\)"):
        FisherOperator(
            case.model,
            case.loss,
            (case.inputs, case.targets[:, :2]),
            kind="monte_carlo",
            generator=torch.Generator(),
        )


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss])
def test_a_forward_of_its_own_has_no_closed_form(kind: type[nn.Module]) -> None:
    class Renamed(kind):
        """The same loss under another name."""

    class Scaled(kind):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 3 * super().forward(outputs, targets)

    patched = kind()
    patched.forward = lambda outputs, targets: kind.forward(patched, outputs, targets)
    assert not isinstance(output_loss(Renamed()), FunctionLoss)
    data = (X, torch.tensor([0, 1, 2, 0]) if kind is nn.CrossEntropyLoss else HALF)
    expected = GaussNewtonOperator(linear(), kind(), data).to_dense()
    for loss, factor in ((Scaled(), 3), (patched, 1)):
        assert isinstance(output_loss(loss), FunctionLoss)
        assert_close(GaussNewtonOperator(linear(), loss, data).to_dense(), factor * expected)


@pytest.mark.parametrize("operator", [*OPERATORS, FisherOperator])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("flat", [False, True])
def test_targets_that_are_not_finite_are_reported_with_their_rows(operator, loss, bad: float, flat: bool) -> None:
    targets = HALF[:, :1].clone()
    targets[2, 0] = bad
    model = nn.Sequential(linear(1), nn.Flatten(0)) if flat else linear(1)
    with pytest.raises(ValueError, match=r"targets contain NaN or infinity \(rows \[2\] of a batch of 4\)"):
        operator(model, loss, (X, targets[:, 0] if flat else targets)) @ torch.zeros(2).double()


def test_cross_entropy_of_a_fitted_example_keeps_its_digits() -> None:
    """In fp32 p_y rounds to 1 beyond a margin of 17; the loss and its derivatives are then still known."""
    outputs = torch.tensor([[25.0, 0.0, 1.0], [3.0, 40.0, 2.0]])
    targets = torch.tensor([0, 1])
    loss = output_loss(nn.CrossEntropyLoss())
    others = torch.stack([torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0])]).double()
    margins = torch.tensor([[25.0], [40.0]], dtype=torch.float64)
    odds = (others - margins).exp()  # p_k / p_y
    assert_close(loss.own_loss(outputs, targets).double(), odds.sum(1).log1p(), rtol=1e-5, atol=0)
    leaf = outputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss.own_loss(leaf, targets).sum(), leaf)
    wrong = odds / (1 + odds.sum(1, keepdim=True))
    expected = torch.stack(
        [
            torch.stack([-wrong[0].sum(), wrong[0, 0], wrong[0, 1]]),
            torch.stack([wrong[1, 0], -wrong[1].sum(), wrong[1, 1]]),
        ]
    )
    assert_close(gradient.double(), expected, rtol=1e-5, atol=0)
    tangents = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, -2.0]])
    _, along = torch.func.jvp(lambda h: loss.own_loss(h, targets), (outputs,), (tangents,))
    assert_close(along.double(), (expected * tangents.double()).sum(1), rtol=1e-4, atol=0)
