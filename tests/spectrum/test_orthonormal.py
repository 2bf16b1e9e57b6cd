import pytest
import torch

from curvlab.linalg import DenseOperator, orthonormalise


@pytest.mark.parametrize("width", [1, 5, 32, 33, 80])
@pytest.mark.parametrize("num_fixed", [0, 10])
def test_factorisation(width: int, num_fixed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    operator = DenseOperator(torch.eye(120, dtype=torch.float64))
    fixed, _ = torch.linalg.qr(torch.randn(120, num_fixed, generator=generator, dtype=torch.float64))
    candidates = torch.randn(120, width, generator=generator, dtype=torch.float64)
    basis, factor = orthonormalise(operator, candidates, against=fixed)
    both = torch.cat([fixed, basis], dim=1)
    torch.testing.assert_close(
        both.T @ both, torch.eye(num_fixed + width, dtype=torch.float64), atol=1e-13, rtol=0
    )
    rest = candidates - fixed @ (fixed.T @ candidates)
    torch.testing.assert_close(basis @ factor, rest, atol=1e-12, rtol=0)
    assert bool((factor.tril(-1) == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthonormal_although_columns_nearly_depend_on_one_another(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    operator = DenseOperator(torch.eye(200, dtype=dtype))
    decay = torch.logspace(0, -18, 60, dtype=torch.float64)
    left, _ = torch.linalg.qr(torch.randn(200, 60, generator=generator, dtype=torch.float64))
    candidates = ((left * decay) @ torch.randn(60, 60, generator=generator, dtype=torch.float64)).to(dtype)
    basis, factor = orthonormalise(operator, candidates)
    rounding = torch.finfo(dtype).eps
    gram = basis.T @ basis
    assert float((gram - torch.eye(basis.shape[1], dtype=dtype)).abs().max()) < 50 * rounding
    assert float((basis.double() @ factor - candidates.double()).norm()) < 2000 * rounding * float(
        candidates.norm()
    )
    assert 15 < basis.shape[1] < 60  # what is only rounding was dropped


def test_vanished_columns_are_dropped_or_filled() -> None:
    generator = torch.Generator().manual_seed(0)
    operator = DenseOperator(torch.eye(6, dtype=torch.float64))
    one = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    candidates = torch.cat([one, 2 * one, -one], dim=1)
    basis, factor = orthonormalise(operator, candidates)
    assert basis.shape == (6, 1)
    torch.testing.assert_close(basis @ factor, candidates)
    filled, factor = orthonormalise(operator, candidates, fill=True, generator=generator)
    torch.testing.assert_close(filled.T @ filled, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(filled @ factor, candidates)
    rest, _ = orthonormalise(operator, torch.ones(6, 9, dtype=torch.float64), against=filled, fill=True)
    assert rest.shape == (6, 3)  # no more room
