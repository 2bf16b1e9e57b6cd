"""Problems, their parameters, the losses."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.lab.models import MLP, ResNet20, resnet18
from curvlab.linalg import identity
from curvlab.problem import FunctionLoss, Problem, freeze, mean_gradient, only_parameters, output_loss
from tests.curvature.curvature_cases import language_problem, problem
from tests.curvature.curvature_oracles import dense_gauss_newton, dense_hessian
from tests.refusals import refuses

LOSS = nn.CrossEntropyLoss()
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % 2
BATCHES = [(X[:5], Y[:5]), (X[5:], Y[5:])]


def linear(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64, **settings)


def operator(data: object = (X, Y)) -> GaussNewtonOperator:
    return GaussNewtonOperator(linear(), LOSS, data)


def of(loss: object, data: object = (X, Y)) -> Problem:
    return Problem.of(linear(), loss, data)


REFUSED = {
    "a class of another loss": (lambda: of(nn.HuberLoss), r"an instance of it, HuberLoss\(\)"),
    "not opened": (lambda: Problem(linear(), LOSS, (X, Y)), r"open it by Problem\.of\(model, loss, data\)"),
    "no batch of test data": (lambda: of(LOSS).with_data([]).gradient(), "test is empty"),
    "an index too large": (lambda: operator().part(torch.tensor([3, 9])), "example 9 does not exist: data has 8"),
    "an index below 0": (lambda: operator().part(torch.tensor([-1])), "example -1 does not exist"),
    "index below 0 of batches": (lambda: operator(BATCHES).part(torch.tensor([-1])), "example -1 does not exist"),
    "weights in a list": (lambda: operator().weighted([1.0] * 8), r"weights are a tensor, \(8,\), got list"),
    "damping as text": (
        lambda: operator() + "0.1" * identity,
        "multiplied by numbers, such as the damping.*'0.1'",
    ),
    "infinite damping": (lambda: operator() + math.inf * identity, "finite numbers, such as the damping, got inf"),
    "a factor that is no number": (lambda: float("nan") * operator(), "finite numbers.*got nan"),
    "a loss of every example": (lambda: of(nn.CrossEntropyLoss(reduction="none")), r"reduction.*mean.*sum"),
    "squares": (lambda: of(nn.MSELoss(reduction="none"), (X, X[:, :2])), r"reduction.*mean.*sum"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(what: str) -> None:
    call, message = REFUSED[what]
    refuses(message, call, error=(TypeError, ValueError, IndexError))


@pytest.mark.parametrize(
    "data", [({"x": X}, Y), {"x": X, "labels": Y}, [{"x": X[:3], "label": Y[:3]}, {"x": X[3:], "label": Y[3:]}]]
)
def test_sequential_models_take_batches_with_one_named_input(data: object) -> None:
    found = GaussNewtonOperator(nn.Sequential(linear()), LOSS, data)
    assert_close(found.to_dense(), operator().to_dense())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(3, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_have_forward_mode(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(kind).eval(), torch.randn(8, 4, 3)
    vectors = torch.eye(sum(p.numel() for p in model.parameters()))[:, ::5]
    for build, oracle in ((GaussNewtonOperator, dense_gauss_newton), (HessianOperator, dense_hessian)):
        product = build(model, LOSS, (x, Y)) @ vectors
        dense = oracle(model.double(), LOSS, x.double(), Y) @ vectors.double()
        assert_close(product.double(), dense, rtol=1e-3, atol=1e-5)
        model.float()


# ------------- Parameters chosen by kind or by name: frozen, or blocks of the whole matrix
@pytest.mark.parametrize(
    ("normalization", "biases", "expected"),
    [(True, True, 268_336), (True, False, 268_346), (False, True, 269_024), (False, False, 269_722)],
)
def test_resnet20(normalization: bool, biases: bool, expected: int) -> None:
    model = ResNet20((3, 32, 32), 10)
    assert freeze(model, normalization=normalization, biases=biases) == expected
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert ("bn1.weight" in trainable) is not normalization
    assert ("bn1.bias" in trainable) is (not normalization and not biases)
    assert ("linear.bias" in trainable) is not biases
    assert "linear.weight" in trainable


def test_frozen_stays_frozen_and_outputs_do_not_change() -> None:
    model = MLP((3,), 2, hidden_sizes=[4])
    model.layers[1].weight.requires_grad_(False)
    inputs = torch.randn(2, 3)
    before = model(inputs)
    assert freeze(model, normalization=True, biases=True) == 4 * 2
    assert torch.equal(model(inputs), before)


def test_attention_and_layer_norm() -> None:
    class OtherRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)
    model = nn.Sequential(layer, OtherRMSNorm(), nn.GroupNorm(2, 8))
    matrices = 3 * 8 * 8 + 8 * 8 + 2 * 8 * 16
    assert freeze(model, normalization=True, biases=False) == matrices + 3 * 8 + 8 + 16 + 8
    assert freeze(model, normalization=False, biases=True) == matrices
    assert freeze(resnet18((3, 64, 64), 1000), normalization=True, biases=True) == 11_689_512 - 9_600 - 1_000


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def test_the_matrix_of_some_parameters_is_a_block_of_the_whole(network: nn.Sequential) -> None:
    data = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 3
    whole, gradient = GaussNewtonOperator(network, LOSS, data).to_dense(), mean_gradient(network, LOSS, data)
    with only_parameters(network, "0.bias", "2.*") as size:
        op = GaussNewtonOperator(network, LOSS, data)
        assert_close(mean_gradient(network, LOSS, data), gradient[12:])
    assert size == 4 + 12 + 3
    assert_close(op.to_dense(), whole[12:, 12:])  # also after the block
    assert GaussNewtonOperator(network, LOSS, data).shape == whole.shape


def test_flags_are_put_back_and_frozen_parameters_may_be_chosen(network: nn.Sequential) -> None:
    network[0].weight.requires_grad_(False)
    with only_parameters(network, "0.weight") as size:
        assert size == 12
        assert [p.requires_grad for p in network.parameters()] == [True, False, False, False]
    assert [p.requires_grad for p in network.parameters()] == [False, True, True, True]


def test_patterns_that_choose_nothing_are_refused(network: nn.Sequential) -> None:
    with (
        pytest.raises(ValueError, match=r"matches '2\.wieght': names are like 2\.weight"),
        only_parameters(network, "2.*", "2.wieght"),
    ):
        pass
    with pytest.raises(ValueError, match="no pattern"), only_parameters(network):
        pass
    assert all(p.requires_grad for p in network.parameters())


# --- Closed forms and scales on linear models, where everything is known; wrong losses and targets
OPERATORS = [GaussNewtonOperator, HessianOperator]
INPUTS = torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0], [-1.0, 1.0]], dtype=torch.float64)
HALF = torch.full((4, 3), 0.5, dtype=torch.float64)


def linear_head(num_outputs: int = 3) -> nn.Linear:
    model = nn.Linear(2, num_outputs, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 2 * num_outputs).reshape(num_outputs, 2))
    return model


def test_fishers_of_squared_error_have_the_scale_of_the_loss() -> None:
    # One output of one example: g = 2 (h - y) x / C. With y = h - 1, g gᵀ = 4/C² Σ x xᵀ over all pairs of outputs.
    model, x = linear_head(), INPUTS[:1]
    data = (x, model(x).detach() - 1)
    expected = (2 / 3) ** 2 * torch.kron(torch.ones(3, 3, dtype=torch.float64), torch.outer(x[0], x[0]))
    assert_close(FisherOperator(model, nn.MSELoss(), data, kind="empirical").to_dense(), expected)
    expected = 2 / 3 * torch.kron(torch.eye(3, dtype=torch.float64), torch.outer(x[0], x[0]))
    assert_close(FisherOperator(model, nn.MSELoss(), data, kind="exact").to_dense(), expected)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.MSELoss(reduction="sum")])
def test_outputs_without_an_axis_of_their_own(operator, loss: nn.Module) -> None:
    flat = nn.Sequential(linear_head(1), nn.Flatten(0))
    op = operator(flat, loss, (INPUTS, HALF[:, 0]))
    assert_close(op.to_dense(), operator(linear_head(1), loss, (INPUTS, HALF[:, :1])).to_dense())


@pytest.mark.parametrize("operator", OPERATORS)
def test_squared_error_of_images_averages_over_all_outputs(operator) -> None:
    model = nn.Sequential(linear_head(6), nn.Unflatten(1, (3, 2)))
    op = operator(model, nn.MSELoss(), (INPUTS, torch.zeros(4, 3, 2, dtype=torch.float64)))
    flat = operator(linear_head(6), nn.MSELoss(), (INPUTS, torch.zeros(4, 6, dtype=torch.float64)))
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
    model = linear_head()
    with torch.no_grad():
        model.weight.mul_(1e4)
    for loss, targets in ((nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, 0])), (nn.BCEWithLogitsLoss(), HALF)):
        assert operator(model, loss, (INPUTS, targets)).to_dense().isfinite().all()


# ---------------------------------------------------------------------------------- what is refused
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
        operator(linear_head(), loss, (INPUTS, targets)) @ torch.zeros(6).double()


def test_targets_of_another_length_are_refused_by_monte_carlo_at_construction() -> None:
    case = language_problem("mean")
    op = GaussNewtonOperator(case.model, case.loss, (case.inputs, case.targets[:, 1:]))
    refuses(r"\(5, 4\).*\(5, 3\)", op.matmat, op.randn(1, torch.Generator()))
    case = problem("linear", "mse")
    short = (case.inputs, case.targets[:, :2])
    settings = {"kind": "monte_carlo", "generator": torch.Generator()}
    refuses(r"\(5, 3\).*\(5, 2\)", FisherOperator, case.model, case.loss, short, **settings)


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
    data = (INPUTS, torch.tensor([0, 1, 2, 0]) if kind is nn.CrossEntropyLoss else HALF)
    expected = GaussNewtonOperator(linear_head(), kind(), data).to_dense()
    for loss, factor in ((Scaled(), 3), (patched, 1)):
        assert isinstance(output_loss(loss), FunctionLoss)
        assert_close(GaussNewtonOperator(linear_head(), loss, data).to_dense(), factor * expected)


@pytest.mark.parametrize("operator", [*OPERATORS, FisherOperator])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("flat", [False, True])
def test_targets_that_are_not_finite_are_reported_with_their_rows(operator, loss, bad: float, flat: bool) -> None:
    targets = HALF[:, :1].clone()
    targets[2, 0] = bad
    model = nn.Sequential(linear_head(1), nn.Flatten(0)) if flat else linear_head(1)
    with pytest.raises(ValueError, match=r"targets contain NaN or infinity \(rows \[2\] of a batch of 4\)"):
        operator(model, loss, (INPUTS, targets[:, 0] if flat else targets)) @ torch.zeros(2).double()


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
    own = -wrong.sum(1)
    expected = torch.stack([own[0], wrong[0, 0], wrong[0, 1], wrong[1, 0], own[1], wrong[1, 1]]).view(2, 3)
    assert_close(gradient.double(), expected, rtol=1e-5, atol=0)
    tangents = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, -2.0]])
    _, along = torch.func.jvp(lambda h: loss.own_loss(h, targets), (outputs,), (tangents,))
    assert_close(along.double(), (expected * tangents.double()).sum(1), rtol=1e-4, atol=0)


def test_weights_cached_by_torch_are_made_anew_of_the_given_values() -> None:
    model = nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)).double()
    problem = Problem.of(model, nn.CrossEntropyLoss(), (torch.randn(6, 4), torch.arange(6) % 3))
    expected = problem.gradient()
    with nn.utils.parametrize.cached():
        weight = model.weight
        assert_close(problem.gradient(), expected)
        assert model.weight is weight  # the user's cache is as it was
