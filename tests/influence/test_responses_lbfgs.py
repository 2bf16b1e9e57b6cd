"""L-BFGS for many groups of left-out examples at once, on quadratics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from curvlab.influence import responses as r
from curvlab.iterate import Checkpoint

FP64 = torch.float64


class Quadratic:
    """1/2 (x - minimum)ᵀ diag (x - minimum) for each of K rows."""

    depends_on: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, minimum: Tensor, diagonal: Tensor) -> None:
        self.minimum, self.diagonal = minimum, diagonal

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        gradient = self.diagonal * (displacement - self.minimum)
        return ((displacement - self.minimum) * gradient).sum(1) / 2, gradient


def test_many_small_components_are_one_large_norm() -> None:
    """At the start no component is above a tenth of the norm, and the norm is twice what is asked for."""
    norm = 1e-8
    objective = Quadratic(torch.full((20, 20), 0.99 * norm / 10, dtype=FP64), torch.ones(20))
    start = torch.zeros(20, 20, dtype=FP64)
    assert float(objective(start, start)[1].norm()) > 1.9 * norm
    found = r.FullBatchLBFGS(gradient_norm=norm)(objective, start, 1)
    assert float(objective(found, start)[1].norm()) <= norm


def test_the_minimum_is_that_of_each_row() -> None:
    minimum = torch.randn(3, 50, generator=torch.Generator().manual_seed(0), dtype=FP64)
    objective = Quadratic(minimum, torch.logspace(-1, 1, 50, dtype=FP64))
    torch.testing.assert_close(
        r.FullBatchLBFGS(gradient_norm=1e-8)(objective, 0 * minimum, 1), minimum, rtol=0, atol=1e-7
    )


class Mortal(Quadratic):
    """Counts its evaluations, and dies at one of them."""

    def __init__(self, minimum: Tensor, diagonal: Tensor, *, dies_at: int = 0) -> None:
        super().__init__(minimum, diagonal)
        self.dies_at, self.count = dies_at, 0

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        if self.count == self.dies_at:
            raise KeyboardInterrupt
        return super().__call__(displacement, indices)


@pytest.mark.parametrize("share", [0.7, 0.97])
def test_a_killed_search_goes_on_to_the_same_minimum(tmp_path: Path, share: float) -> None:
    minimum = torch.randn(3, 80, generator=torch.Generator().manual_seed(0), dtype=FP64)
    diagonal = torch.logspace(-1, 1, 80, dtype=FP64)
    whole = Mortal(minimum, diagonal)
    expected = r.FullBatchLBFGS(gradient_norm=1e-8)(whole, 0 * minimum, 1)
    kept = r.FullBatchLBFGS(gradient_norm=1e-8, checkpoint=Checkpoint(tmp_path / "search", every=1))
    dying = Mortal(minimum, diagonal, dies_at=int(share * whole.count))
    with pytest.raises(KeyboardInterrupt):
        kept(dying, 0 * minimum, 1)
    again = Mortal(minimum, diagonal)
    with pytest.raises(ValueError, match=r"belongs to other work \(start differ\)"):
        kept(again, 0 * minimum + 1, 1)
    assert torch.equal(kept(again, 0 * minimum, 1), expected)
    # What is repeated is at most a step: 20 iterations of up to 25 evaluations, and the look before it.
    assert again.count <= whole.count - dying.count + 27
    assert dying.count > 27
