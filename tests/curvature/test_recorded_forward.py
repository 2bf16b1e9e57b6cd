"""A recorded forward: outputs, their derivative, and gradients put where they belong."""

import weakref

import pytest
import torch
from curvature_memory import Memory
from torch import Tensor
from torch.func import jacrev
from torch.testing import assert_close

from curvlab.curvature.linearise import ColumnSums, RecordedForward


def outputs_of(values) -> list[Tensor]:
    weight, bias, _unused = values
    hidden = (weight @ torch.ones(3, dtype=weight.dtype) + bias).tanh()
    return [hidden, hidden.sum().exp()]


@pytest.fixture
def parameters(generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 3), (2,), (4,))]


def jacobian(parameters: list[Tensor], index: int) -> Tensor:
    blocks = jacrev(lambda *values: outputs_of(values)[index], argnums=(0, 1, 2))(*parameters)
    size = outputs_of(parameters)[index].numel()
    return torch.cat([block.reshape(size, -1) for block in blocks], dim=1)


def test_outputs_and_tangents(parameters: list[Tensor], generator: torch.Generator) -> None:
    vector = torch.randn(12, generator=generator, dtype=torch.float64)
    forward = RecordedForward(outputs_of, parameters, vector)
    for index, expected in enumerate(outputs_of(parameters)):
        assert_close(forward.outputs[index], expected)
        assert_close(forward.tangents[index].reshape(-1), jacobian(parameters, index) @ vector)
        assert not forward.outputs[index].requires_grad
    assert RecordedForward(outputs_of, parameters).tangents == [None, None]


@pytest.mark.parametrize("along", [True, False])
def test_gradients_are_added_as_often_as_asked(along: bool, parameters, generator: torch.Generator) -> None:
    vector = torch.randn(12, generator=generator, dtype=torch.float64)
    forward = RecordedForward(outputs_of, parameters, vector if along else None)
    rows = torch.full((2, 12), torch.nan, dtype=torch.float64)
    sums = ColumnSums(rows, first=True, scale=0.25)
    cotangents = [torch.randn(2, generator=generator).double(), torch.tensor(0.3, dtype=torch.float64)]
    doubled = [2 * u for u in cotangents]
    expected = sum(u.reshape(-1) @ jacobian(parameters, index) for index, u in enumerate(cotangents))
    forward.pull_back(cotangents, sums[0], keep=True)
    forward.pull_back(doubled, sums[1], keep=True)
    assert_close(rows, 0.25 * torch.stack([expected, 2 * expected]))  # the unused parameter's zeros included
    forward.pull_back(cotangents, ColumnSums(rows, first=False, scale=0.25)[1])
    assert_close(rows[1], 0.75 * expected)


def test_what_no_parameter_reaches_is_zero(parameters: list[Tensor]) -> None:
    forward = RecordedForward(lambda values: [torch.ones(2)], parameters, torch.ones(12, dtype=torch.float64))
    assert forward.tangents == [None]
    rows = torch.full((1, 12), torch.nan, dtype=torch.float64)
    forward.pull_back([torch.ones(2)], ColumnSums(rows, first=True, scale=1.0))
    assert torch.equal(rows, torch.zeros_like(rows))


def test_tangents_are_not_recorded() -> None:
    """Activations with their tangents are held, 2 a layer; recorded tangents would hold their cosines too, 3."""
    num_layers, size = 20, 2**14

    def many_layers(values) -> list[Tensor]:
        hidden = values[0] * torch.ones(size)
        for _ in range(num_layers):
            hidden = hidden.sin()
        return [hidden]

    rows = torch.zeros(1, 1)
    with Memory() as memory:
        forward = RecordedForward(many_layers, [torch.ones(1)], torch.ones(1))
        forward.pull_back([torch.ones(size)], ColumnSums(rows, first=True, scale=1.0))
    assert num_layers <= memory.peak / (4 * size) < 2.5 * num_layers


def test_is_freed_with_its_last_reference(parameters: list[Tensor]) -> None:
    # The graph, in C++, holds the hooks of gradients: what they hold is out of the garbage collector's reach.
    forward = RecordedForward(outputs_of, parameters, torch.ones(12, dtype=torch.float64))
    forward.pull_back(
        [torch.ones(2).double(), torch.tensor(1.0).double()],
        ColumnSums(torch.empty(1, 12).double(), first=True, scale=1.0),
    )
    alive = weakref.ref(forward)
    del forward
    assert alive() is None
