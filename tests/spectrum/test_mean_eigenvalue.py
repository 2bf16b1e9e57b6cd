"""Means of eigenvalues by random forms, and eigenvalues of sketches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.curvature.examples import quadratic_forms
from curvlab.linalg import DenseOperator
from curvlab.spectrum import mean_eigenvalue, sketch_eigenvalues
from tests.curvature.curvature_oracles import dense_gauss_newton
from tests.matrices import with_spectrum
from tests.refusals import refuses


def linear_model_with(eigenvalues: Tensor, *, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Least squares: G = 2/n XᵀX with these eigenvalues and random eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    size = len(eigenvalues)
    left, right = (
        torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0] for _ in range(2)
    )
    inputs = left * (eigenvalues.double() * size / 2).sqrt() @ right.T
    return nn.Linear(size, 1, bias=False).double(), (inputs, torch.zeros(size, 1, dtype=torch.float64))


def classifier() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return model, (inputs, torch.randint(3, (20,), generator=generator))


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
@pytest.mark.parametrize("spectrum", ["flat", "nearly flat", "decaying"])
def test_intervals_cover_the_mean_eigenvalue(spectrum: str, distribution: str) -> None:
    eigenvalues = {
        "flat": torch.full((40,), 2.0),
        "nearly flat": torch.linspace(1.0, 2.0, 40),
        "decaying": torch.arange(1, 41).double() ** -1.5,
    }[spectrum]
    model, data = linear_model_with(eigenvalues)
    operator, truth = GaussNewtonOperator(model, nn.MSELoss(), data), float(eigenvalues.double().mean())
    generator = torch.Generator().manual_seed(4)
    covered, values = 0, []
    for _ in range(100):
        estimate = mean_eigenvalue(operator, num_probes=20, distribution=distribution, generator=generator)
        assert estimate.num_matvecs == 20
        values.append(estimate.value)
        covered += abs(estimate.value - truth) <= 2.093 * estimate.stderr + 1e-12  # t, 19 degrees of freedom
    exact = spectrum == "flat" and distribution == "rademacher"
    assert 88 <= covered <= (100 if exact else 99)
    spread = float(torch.tensor(values, dtype=torch.float64).std())
    assert abs(sum(values) / 100 - truth) <= 4 * spread / 100**0.5 + 1e-12  # unbiased


def test_intervals_cover_it_with_a_batch_for_each_probe() -> None:
    # The rows of X are scaled unevenly, so batches differ: most of the error is sampling.
    model, (inputs, targets) = linear_model_with(torch.arange(1, 41).double() ** -1.5)
    inputs = inputs * torch.linspace(0.2, 1.8, 40, dtype=torch.float64)[:, None]
    truth = float((2 * inputs.T @ inputs / 40).trace()) / 40
    operator = GaussNewtonOperator(model, nn.MSELoss(), (inputs, targets))
    generator = torch.Generator().manual_seed(4)
    estimates = [mean_eigenvalue(operator, num_probes=20, batch_size=10, generator=generator) for _ in range(100)]
    covered = sum(abs(estimate.value - truth) <= 2.093 * estimate.stderr for estimate in estimates)
    assert 88 <= covered <= 99


@pytest.mark.parametrize("columns", ["vmap", "loop"])
def test_forms_are_those_of_the_dense_matrix(columns: str) -> None:
    model, data = classifier()
    dense = dense_gauss_newton(model, nn.CrossEntropyLoss(), *data)
    vectors = torch.randn(len(dense), 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    operator = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data, batch_size=7, columns=columns)
    expected = (vectors * (dense @ vectors)).sum(0)
    torch.testing.assert_close(quadratic_forms(operator, vectors), expected, rtol=1e-12, atol=0)
    by_differences = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data, jvp="finite_difference")
    torch.testing.assert_close(quadratic_forms(by_differences, vectors), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(
        quadratic_forms(by_differences, 0 * vectors), torch.zeros(5, dtype=torch.float64), rtol=0, atol=0
    )


def test_one_batch_has_the_scale_of_the_whole() -> None:
    model, (inputs, targets) = classifier()
    operator = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, targets))
    vector = torch.ones(operator.shape[0], 1, dtype=torch.float64)
    indices = torch.randint(20, (6,), generator=torch.Generator().manual_seed(2))
    expected = float(
        vector.T @ dense_gauss_newton(model, nn.CrossEntropyLoss(), inputs[indices], targets[indices]) @ vector
    )
    sampled = operator.sample(6, torch.Generator().manual_seed(2))
    assert float(quadratic_forms(sampled, vector)) == pytest.approx(expected, rel=1e-12)


class ForwardOnly(torch.autograd.Function):
    """The identity, whose backward pass is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def jvp(ctx: object, tangent: Tensor) -> Tensor:
        return tangent.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise AssertionError("a backward pass was made")


class WithoutBackward(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return ForwardOnly.apply(self.model(inputs))


def test_there_is_no_backward_pass() -> None:
    model, data = classifier()
    loss = nn.CrossEntropyLoss()
    guarded = GaussNewtonOperator(WithoutBackward(copy.deepcopy(model)), loss, data)
    with pytest.raises(AssertionError, match="a backward pass was made"):
        guarded @ torch.ones(guarded.shape[0], dtype=torch.float64)
    plain = GaussNewtonOperator(model, loss, data)
    estimates = [
        mean_eigenvalue(operator, num_probes=8, generator=torch.Generator().manual_seed(0))
        for operator in (guarded, plain)
    ]
    assert estimates[0].value == pytest.approx(estimates[1].value, rel=1e-12)


def test_refusals() -> None:
    model, data = classifier()
    operator = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data)
    with pytest.raises(TypeError, match=r"got HessianOperator: use curvlab.spectrum.hutchinson_trace"):
        mean_eigenvalue(HessianOperator(model, nn.CrossEntropyLoss(), data), num_probes=3)
    with pytest.raises(ValueError, match="pass the vectors as columns"):
        quadratic_forms(operator, torch.ones(operator.shape[0], dtype=torch.float64))


# ----------------------------------------------------------------------------------------
def spiked(size: int = 120) -> Tensor:
    return with_spectrum(torch.cat([torch.tensor([10.0, 5.0]), torch.full((size - 2,), 0.1)]))


def repeated(matrix: Tensor, num: int, **settings) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    results = [sketch_eigenvalues(DenseOperator(matrix), 2, generator=generator, **settings) for _ in range(num)]
    return torch.stack([r.values for r in results]), torch.stack([r.stderr for r in results])


def test_corrected_values_and_their_spread() -> None:
    values, stderr = repeated(spiked(), 100, sketch_size=100)
    spread = values.std(0)
    # First-order bias is gone; what is left is the push of the second eigenvalue on the first and back.
    assert abs(float(values[:, 0].mean()) - 10.0) < 0.25
    assert abs(float(values[:, 1].mean()) - 5.0) < 0.25
    torch.testing.assert_close(stderr.mean(0), spread, rtol=0.25, atol=0)
    assert float(stderr[:, 0].mean()) == pytest.approx(10 * (2 / 100) ** 0.5, rel=0.1)


def test_uncorrected_sketch_is_biased_by_the_trace() -> None:
    matrix = torch.diag(torch.cat([torch.tensor([10.0]), torch.full((199,), 1.0)]).double())
    result = sketch_eigenvalues(DenseOperator(matrix), sketch_size=100, generator=torch.Generator().manual_seed(0))
    raw = torch.linalg.eigvalsh(result.sketch).max()
    assert float(raw - result.values[0]) == pytest.approx(float(result.sketch.trace()) / 100)
    assert float(result.bias[0]) == pytest.approx(float(raw - result.values[0]))
    assert float(result.sketch.trace()) == pytest.approx(209, rel=0.1)


def test_per_tensor_sketch_has_the_smaller_variance() -> None:
    # The paper's claim for inner products, seen in the largest eigenvalue: mass spread over L = 6 tensors.
    dense, _ = repeated(spiked(), 60, sketch_size=30)
    concatenated, stderr = repeated(spiked(), 60, sketch_size=30, tensor_sizes=[20] * 6)
    assert float(concatenated[:, 0].mean()) == pytest.approx(10.0, abs=0.4)
    ratio = float(concatenated[:, 0].var() / dense[:, 0].var())
    assert 0.08 < ratio < 0.4  # 1/6 for equal masses
    assert float(stderr[:, 0].mean()) == pytest.approx(float(concatenated[:, 0].std()), rel=0.3)


@pytest.mark.parametrize("sizes", [None, [20, 60, 40]])
@pytest.mark.parametrize("num_vectors", [0, 7, 12, 1000])
def test_row_by_row_is_phi_a_phi_whatever_the_budget(sizes: list[int] | None, num_vectors: int) -> None:
    """Against a dense Φ, each row from its own seed: one product at a time, several, or all."""
    operator = DenseOperator(spiked())
    seed = int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(5)))
    draws = [torch.Generator().manual_seed(seed + row) for row in range(10)]
    phi = torch.cat([torch.randn(1, 120, generator=draw, dtype=torch.float64) for draw in draws]) / 10**0.5
    if sizes is not None:
        phi = torch.block_diag(*phi.split(sizes, dim=1))
    result = sketch_eigenvalues(
        operator,
        sketch_size=10,
        tensor_sizes=sizes,
        chunk_size=1,
        memory_budget=max(1, num_vectors * 120 * 8),
        generator=torch.Generator().manual_seed(5),
    )
    assert_close(result.sketch, phi @ operator.matrix @ phi.T, rtol=1e-10, atol=1e-12)
    assert result.num_matvecs == len(phi)


def test_chunks_that_do_not_fit_are_drawn_row_by_row_and_others_stay_as_they_are() -> None:
    operator = DenseOperator(spiked())

    def sketch(chunk_size: int, num_vectors: float) -> Tensor:
        budget, generator = num_vectors * 120 * 8, torch.Generator().manual_seed(5)
        return sketch_eigenvalues(
            operator, sketch_size=10, chunk_size=chunk_size, memory_budget=budget, generator=generator
        ).sketch

    assert_close(sketch(5, 29.0), sketch(1, 29.0), rtol=1e-12, atol=1e-14)  # 6 * 5 vectors are needed
    unlimited = sketch_eigenvalues(
        operator, sketch_size=10, chunk_size=5, generator=torch.Generator().manual_seed(5)
    )
    assert torch.equal(sketch(5, 30.0), unlimited.sketch)
    assert not torch.allclose(sketch(5, 30.0), sketch(1, 30.0))


def test_bad_settings() -> None:
    operator = DenseOperator(torch.eye(10))
    refuses("add up to 10, got a sum of 9", sketch_eigenvalues, operator, sketch_size=4, tensor_sizes=[4, 5])
    refuses("between 1 and the sketch's 4 rows", sketch_eigenvalues, operator, 5, sketch_size=4)
