import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab.curvature.linearise import ColumnSums, tangents_of

SHAPES = [(2, 3), (), (0, 4), (5,)]
LIKE = [torch.zeros(shape) for shape in SHAPES]


def pieces(num_columns: int, generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(num_columns, *shape, generator=generator) for shape in SHAPES]


def flat(columns: list[Tensor]) -> Tensor:
    return torch.cat([piece.reshape(len(piece), piece[0].numel()) for piece in columns], dim=1)


def test_the_first_batch_fills_and_others_add(generator: torch.Generator) -> None:
    rows = torch.full((3, 12), torch.nan)
    first, second = pieces(3, generator), pieces(3, generator)
    ColumnSums(rows, first=True, scale=0.5).add(first)
    ColumnSums(rows, first=False, scale=0.5).add(second)
    assert_close(rows, 0.5 * (flat(first) + flat(second)))


def test_columns_are_parts(generator: torch.Generator) -> None:
    rows = torch.full((3, 12), torch.nan)
    sums, columns = ColumnSums(rows, first=True, scale=1.0), pieces(3, generator)
    sums.block(slice(0, 2)).add([piece[:2] for piece in columns])
    sums[2].add([piece[2:] for piece in columns])
    assert_close(rows, flat(columns))


def test_zero_is_written_once_and_added_for_nothing() -> None:
    rows = torch.full((1, 12), torch.nan)
    ColumnSums(rows, first=True, scale=1.0).add_zero()
    assert torch.equal(rows, torch.zeros(1, 12))
    rows.fill_(2.0)
    ColumnSums(rows, first=False, scale=1.0).add_zero()
    assert torch.equal(rows, torch.full((1, 12), 2.0))


def test_tangents_are_the_vectors_own_memory(generator: torch.Generator) -> None:
    rows = torch.randn(3, 12, generator=generator)
    for vectors in (rows, rows[1]):
        tangents = tangents_of(vectors, LIKE)
        assert [t.shape for t in tangents] == [(*vectors.shape[:-1], *shape) for shape in SHAPES]
        assert all(t.storage_offset() == 0 for t in tangents)
        tangents[3].mul_(2)
        assert_close(vectors[..., 7:], tangents[3])
    rows[2] = 1.0
    assert torch.equal(tangents_of(rows, LIKE)[0][2], torch.ones(2, 3))
