"""Recorded operations: the numbers of the function itself, also after changes and with fewer operations."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import ProximalBregmanObjective
from curvlab.problem import records
from curvlab.problem.simplified import simplified
from curvlab.training import EnsembleLosses
from tests.refusals import refuses

CLASSES = 3
DATA = (
    torch.randn(40, 5, generator=torch.Generator().manual_seed(0)),
    torch.randint(CLASSES, (40,), generator=torch.Generator().manual_seed(1)),
)


class Scaled(nn.Module):
    """A network with a number, a buffer and a frozen layer of its own."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
        self.frozen.requires_grad_(False)
        self.drop, self.scale = nn.Dropout(0.5), 1.0
        self.options = SimpleNamespace(shifts={"all": [0.5]})
        self.register_buffer("offset", torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.frozen(torch.tanh(self.first(inputs))) + self.offset
        return self.scale * self.last(self.drop(hidden) * self.options.shifts["all"][0])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Scaled().eval()


def product(operator: GaussNewtonOperator, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(operator.shape[0], 4, generator=generator)
    return operator.sample(7, generator) @ vectors


def set_scale(model: nn.Module) -> None:
    model.scale = 3.0  # type: ignore[assignment]


def set_option(model: nn.Module) -> None:
    model.options.shifts["all"][0] = -2.0  # type: ignore[union-attr, index]


def replace_buffer(model: nn.Module) -> None:
    model.offset = torch.full((4,), -2.0)


def change_buffer(model: nn.Module) -> None:
    model.offset.mul_(-1)  # type: ignore[operator]


def change_frozen(model: nn.Module) -> None:
    model.frozen.weight.data *= -1  # type: ignore[union-attr, operator]


def train_on(model: nn.Module) -> None:
    with torch.no_grad():
        model.first.weight.add_(1.0)  # type: ignore[union-attr, operator]


def add_hook(model: nn.Module) -> None:
    model.first.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)  # type: ignore[union-attr, operator]


CHANGES = [set_scale, set_option, replace_buffer, change_buffer, change_frozen, train_on, add_hook]


@pytest.mark.parametrize("change", CHANGES)
def test_replayed_products_are_those_of_the_model_as_it_is(
    model: nn.Module, change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    operator, replays = GaussNewtonOperator(model, loss, DATA), []
    made = records._record

    def counted(*given: object) -> object:
        record = made(*given)  # type: ignore[arg-type]
        assert record is not None

        def replay(*tensors: Tensor) -> object:
            replays.append(1)
            return record(*tensors)

        return replay

    monkeypatch.setattr(records, "_record", counted)
    for seed in range(records._CALLS_BEFORE + 3):
        found = product(operator, seed)
    assert len(replays) == 1 + 3  # one to compare
    assert torch.equal(found, product(GaussNewtonOperator(model, loss, DATA), seed))
    before = product(operator, 99)
    change(model)
    after = product(operator, 99)
    assert not torch.allclose(before, after)
    assert torch.equal(after, product(GaussNewtonOperator(model, loss, DATA), 99))


def test_a_loss_of_ones_own_is_read_at_each_product(model: nn.Module) -> None:
    weight = [1.0]
    operator = GaussNewtonOperator(model, lambda outputs, _: weight[0] * outputs.square().mean(), DATA)
    for seed in range(records._CALLS_BEFORE + 2):
        found = product(operator, seed)
    weight[0] = 3.0
    assert_close(product(operator, seed), 3 * found)


def test_replayed_products_refuse_what_products_refuse(model: nn.Module) -> None:
    operator = GaussNewtonOperator(model, nn.CrossEntropyLoss(), DATA)
    for seed in range(records._CALLS_BEFORE + 2):
        product(operator, seed)
    with torch.no_grad():
        model.last.bias.fill_(torch.nan)  # type: ignore[union-attr, operator]
    refuses("NaN or infinity", product, operator, 0)
    model.train()
    refuses(r"call model.eval\(\) first", product, operator, 0)


@pytest.mark.parametrize("weighted", [False, True])
def test_replayed_gradients_of_points_are_those_of_the_first_calls(model: nn.Module, weighted: bool) -> None:
    given = {"points": [1, 7, 9], "damping": 0.1, "epsilon": 1e-3}
    given |= {"weights": torch.linspace(0, 2, 40)} if weighted else {}
    loss = nn.CrossEntropyLoss()
    objective, fresh = (ProximalBregmanObjective(model, loss, DATA, **given) for _ in range(2))  # type: ignore[arg-type]
    displacement = torch.randn(objective.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for _ in range(records._CALLS_BEFORE + 2):
        found = objective.gradient(displacement)
    kept = [record for record in objective._records._found.values() if record is not None]
    assert len(kept) == 2  # of the divergence and of the points' own losses
    assert torch.equal(found, fresh.gradient(displacement))


def ensemble_gradients(model: nn.Module, num_calls: int) -> tuple[EnsembleLosses, list[Tensor]]:
    losses = EnsembleLosses(model, nn.CrossEntropyLoss(), DATA)
    generator = torch.Generator().manual_seed(3)
    positions = losses.start + torch.randn(4, len(losses.start), generator=generator)
    batch = losses.batch(torch.arange(28).view(4, 7))
    for _ in range(num_calls):
        found = losses.losses_and_gradients(positions, batch, shared=False)
    return losses, [found[0], *found[1]]


@pytest.fixture
def no_records() -> None:
    records._shared.cache_clear()


@pytest.mark.usefixtures("no_records")
def test_networks_that_differ_in_weights_share_records_and_others_do_not(model: nn.Module) -> None:
    first, _ = ensemble_gradients(model, records._CALLS_BEFORE + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2 if parameter.requires_grad else 1)
    second, found = ensemble_gradients(model, 2)
    assert first._records._found is second._records._found
    assert [record is not None for record in second._records._confirmed.values()] == [True]
    records._shared.cache_clear()
    _, expected = ensemble_gradients(model, 1)  # so early nothing is recorded
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    change_buffer(model)
    assert ensemble_gradients(model, 1)[0]._records._found is not first._records._found


@pytest.mark.usefixtures("no_records")
def test_a_network_that_gives_other_numbers_does_without_anothers_record(model: nn.Module) -> None:
    first, _ = ensemble_gradients(model, records._CALLS_BEFORE + 1)
    add_hook(model)  # which no description has
    second, found = ensemble_gradients(model, 3)
    assert first._records._found is second._records._found
    assert list(second._records._confirmed.values()) == [None]
    records._shared.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(found, ensemble_gradients(model, 1)[1], strict=True))


# ------------------------------------------------------------------------------------------------ fewer operations
OFFSET = torch.randn(3, generator=torch.Generator().manual_seed(0))


def twice(x: Tensor) -> tuple[Tensor, ...]:
    return ((x.exp() + x.exp()).sum(0),)


def turned_back(x: Tensor) -> tuple[Tensor, ...]:
    return (x.transpose(0, 1).transpose(1, 0) @ x.t().t().transpose(0, 1),)


def turned_otherwise(x: Tensor) -> tuple[Tensor, ...]:
    cube = x.expand(2, *x.shape)
    return (cube.transpose(0, 1).transpose(1, 2) * 1,)


def by_one(x: Tensor) -> tuple[Tensor, ...]:
    return ((x * 1).sin(), (x.bool() * 1.0).cos(), x * 2 * 2.0)


def of_shapes_alone(x: Tensor) -> tuple[Tensor, ...]:
    return (x + torch.arange(3) + torch.ones_like(x).cumsum(0),)


def with_a_tensor_beside(x: Tensor) -> tuple[Tensor, ...]:
    return (x + OFFSET * 2 + OFFSET * 2,)


def drawn(x: Tensor) -> tuple[Tensor, ...]:
    return (x + torch.rand(3) - torch.rand(3),)


def returned_twice(x: Tensor) -> tuple[Tensor, ...]:
    return x.exp(), x.exp(), torch.zeros_like(x)


def changed_in_place(x: Tensor) -> tuple[Tensor, ...]:
    copy = x.exp()
    first = copy.sin()
    copy.add_(1)
    return first, copy.sin()


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (twice, 3),
        (turned_back, 2),
        (turned_otherwise, 4),
        (by_one, 6),
        (of_shapes_alone, 2),
        (with_a_tensor_beside, 3),
        (drawn, 4),
        (returned_twice, 3),
        (changed_in_place, 4),
    ],
)
def test_fewer_operations_give_the_same_bits(function: Callable[..., tuple[Tensor, ...]], most: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    record = make_fx(function)(x)
    reduced = simplified(record)
    calls = [node for node in record.graph.nodes if node.op == "call_function"]
    assert len(calls) <= most
    for scale in (1.0, -3.0):
        torch.manual_seed(2)
        expected = function(scale * x)
        torch.manual_seed(2)
        found = reduced(scale * x)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert len({each.data_ptr() for each in found}) == len(found)
        OFFSET.mul_(-1)  # a tensor beside the arguments is read again


def test_what_is_returned_is_no_constant() -> None:
    x = torch.ones(2)
    reduced = simplified(make_fx(returned_twice)(x))
    reduced(x)[2].add_(1)
    assert torch.equal(reduced(x)[2], torch.zeros(2))
