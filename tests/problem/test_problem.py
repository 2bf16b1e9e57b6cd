"""Bad input at the one door: each is refused by a text that says what to change; what can be run is run."""

import pytest
import torch
from curvature_oracles import dense_gauss_newton, dense_hessian
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.influence import influence_scores
from curvlab.linalg import identity
from curvlab.problem import Problem

LOSS = nn.CrossEntropyLoss()
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % 2
BATCHES = [(X[:5], Y[:5]), (X[5:], Y[5:])]


def linear(**settings: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64, **settings)


def operator(data: object = (X, Y)) -> GaussNewtonOperator:
    return GaussNewtonOperator(linear(), LOSS, data)


REFUSED = {
    "a loss class": (
        lambda: Problem.of(linear(), nn.CrossEntropyLoss, (X, Y)),
        r"pass an instance.*CrossEntropyLoss\(\)",
    ),
    "a class of another loss": (
        lambda: Problem.of(linear(), nn.HuberLoss, (X, Y)),
        r"an instance of it, HuberLoss\(\)",
    ),
    "a function for a model": (
        lambda: Problem.of(lambda x: x, LOSS, (X, Y)),
        "the model is a function: pass an nn.Module",
    ),
    "no values": (lambda: Problem.of(linear(device="meta"), LOSS, (X, Y)), "on the meta device.*load_state_dict"),
    "no data": (lambda: Problem.of(linear(), LOSS, (X[:0], Y[:0])), "data is empty"),
    "no test data": (
        lambda: influence_scores(linear(), LOSS, (X, Y), (X[:0], Y[:0]), damping=0.1),
        "test is empty: at least one example",
    ),
    "no batch of test data": (
        lambda: Problem.of(linear(), LOSS, (X, Y)).with_data([]).gradient(),
        "test is empty",
    ),
    "an index too large": (lambda: operator().part(torch.tensor([3, 9])), "example 9 does not exist: data has 8"),
    "an index below 0": (lambda: operator().part(torch.tensor([-1])), "example -1 does not exist"),
    "an index below 0 of batches": (
        lambda: operator(BATCHES).part(torch.tensor([-1])),
        "example -1 does not exist",
    ),
    "weights in a list": (lambda: operator().weighted([1.0] * 8), r"weights are a tensor, \(8,\), got list"),
    "damping as text": (
        lambda: operator() + "0.1" * identity,
        "multiplied by numbers, such as the damping.*'0.1'",
    ),
    "infinite damping": (
        lambda: operator() + float("inf") * identity,
        "finite numbers, such as the damping, got inf",
    ),
    "a factor that is no number": (lambda: float("nan") * operator(), "finite numbers.*got nan"),
    "integer inputs": (
        lambda: operator((X.long(), Y)) @ torch.ones(8).double(),
        r"inputs are torch.int64.*\.float\(\)",
    ),
    "inputs by name for nn.Sequential": (
        lambda: Problem.of(nn.Sequential(linear()), LOSS, ({"x": X, "z": X}, Y)).gradient(),
        r"nn.Sequential hands all of \['x', 'z'\].*wrap it in a module",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        call()


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
