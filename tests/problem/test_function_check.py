"""Models that are no function of single examples: chance, other examples, state."""

import copy

import pytest
import torch
from curvature_cases import convolutional, mlp, normal
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator

OPERATORS = [GaussNewtonOperator, HessianOperator, FisherOperator]
every_operator = pytest.mark.parametrize("operator", OPERATORS)
CLASSES = torch.tensor([0, 1, 2, 0, 1])


def data(*shape: int) -> tuple[Tensor, Tensor]:
    return normal(*shape)(torch.Generator().manual_seed(0)), CLASSES


def multiply(operator, model: nn.Module, pair: tuple[Tensor, Tensor], num_columns: int = 1) -> Tensor:
    op = operator(model, nn.CrossEntropyLoss(), pair)
    return op @ op.randn(num_columns, torch.Generator().manual_seed(0))


class FunctionalDropout(nn.Module):
    """Dropout by the function, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(x, 0.5, training=self.training))


class DroppingAttention(nn.Module):
    """Dropout that is no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


@every_operator
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        pytest.param(lambda: convolutional(batch_norm=True), (1, 4, 4), id="batch norm"),
        pytest.param(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), (4,), id="dropout"),
        pytest.param(DroppingAttention, (3, 4), id="attention with dropout"),
        pytest.param(FunctionalDropout, (4,), id="functional dropout"),
        pytest.param(lambda: nn.Sequential(nn.Linear(4, 3), nn.RReLU()), (4,), id="random slopes"),
        pytest.param(
            lambda: nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(16, 3)),
            (1, 4, 4),
            id="instance norm with running statistics",
        ),
    ],
)
@pytest.mark.parametrize("num_columns", [1, 3])
def test_train_mode_is_refused_where_it_matters(operator, build, shape: tuple[int, ...], num_columns: int) -> None:
    model = build().double().train()
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        multiply(operator, model, data(*shape), num_columns)
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert multiply(operator, model.eval(), data(*shape)).isfinite().all()


@every_operator
@pytest.mark.parametrize(
    "model",
    [
        mlp(nn.Tanh()),
        nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)),
        nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)),
        nn.Sequential(nn.Linear(4, 3), nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1), nn.Flatten()),
    ],
)
def test_train_mode_is_accepted_where_it_changes_nothing(operator, model: nn.Module) -> None:
    model = model.double()
    training = multiply(operator, model.train(), data(4))
    assert model.training
    assert_close(training, multiply(operator, model.eval(), data(4)))


@every_operator
def test_batch_norm_without_running_statistics_couples_examples_in_every_mode(operator) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).double().eval()
    with pytest.raises(ValueError, match="batch"):
        multiply(operator, model, data(4))


@every_operator
def test_switching_to_train_mode_after_construction_is_noticed(operator) -> None:
    model = convolutional(batch_norm=True).double().eval()
    op = operator(model, nn.CrossEntropyLoss(), data(1, 4, 4))
    model.train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        op @ op.randn(1, torch.Generator())


class Noisy(nn.Module):
    """Random in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.randn_like(x))


@every_operator
def test_a_model_that_draws_in_eval_mode_is_refused(operator) -> None:
    model = Noisy().double().eval()
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"random numbers in eval mode.*must not sample"):
        multiply(operator, model, data(4))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_buffers_that_change_at_each_call_are_noticed_and_left_alone() -> None:
    model = spectral_norm(nn.Linear(4, 3)).double().train()  # a step of the power iteration at each call
    before = copy.deepcopy(model.state_dict())
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data(4), jvp="finite_difference")
    with pytest.raises(ValueError, match=r"buffer '.*_u'.*train mode.*model\.eval\(\)"):
        op @ op.randn(1, torch.Generator())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()
    assert (op @ op.randn(1, torch.Generator())).isfinite().all()
