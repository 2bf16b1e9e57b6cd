import pytest
import torch
from torch.testing import assert_close

from curvlab.linalg import flatten, flatten_columns, unflatten, unflatten_columns

SHAPES = [(2, 3), (4,), (), (1, 2, 2)]
SIZE = 6 + 4 + 1 + 4


def test_flatten_is_row_major_and_in_order() -> None:
    first = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(flatten([first, torch.tensor(5.0)]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert torch.equal(flatten([first.T]), torch.tensor([1.0, 3.0, 2.0, 4.0]))


def test_unflatten_inverts_flatten(generator: torch.Generator) -> None:
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for back, tensor in zip(unflatten(flatten(tensors), tensors), tensors, strict=True):
        assert torch.equal(back, tensor)


def test_columns_are_flattened_one_by_one(generator: torch.Generator) -> None:
    stacked = [torch.randn(3, *shape, generator=generator) for shape in SHAPES]
    columns = flatten_columns(stacked)
    assert columns.shape == (SIZE, 3)
    for k in range(3):
        assert torch.equal(columns[:, k], flatten([tensor[k] for tensor in stacked]))


def test_unflatten_columns_inverts_flatten_columns(generator: torch.Generator) -> None:
    like = [torch.empty(shape) for shape in SHAPES]
    columns = torch.randn(SIZE, 3, generator=generator)
    pieces = unflatten_columns(columns, like)
    assert [tuple(piece.shape) for piece in pieces] == [(3, *shape) for shape in SHAPES]
    assert_close(flatten_columns(pieces), columns, rtol=0, atol=0)


def test_no_columns() -> None:
    pieces = unflatten_columns(torch.zeros(SIZE, 0), [torch.empty(shape) for shape in SHAPES])
    assert flatten_columns(pieces).shape == (SIZE, 0)


def test_a_vector_of_another_length_is_refused() -> None:
    like = [torch.empty(shape) for shape in SHAPES]
    with pytest.raises((ValueError, RuntimeError), match="size"):
        unflatten(torch.zeros(SIZE + 1), like)
    with pytest.raises((ValueError, RuntimeError), match="size"):
        unflatten_columns(torch.zeros(SIZE + 1, 2), like)
