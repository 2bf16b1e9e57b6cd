"""tr(G)/P without a backward pass, against matrices that autograd or linear algebra gives."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.curvature.examples import quadratic_forms
from curvlab.iterate import Checkpoint
from curvlab.spectrum import Estimate, mean_eigenvalue


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


def dense_gauss_newton(model: nn.Module, inputs: Tensor) -> Tensor:
    """1/n sum Jᵀ (diag p - p pᵀ) J, one autograd row at a time."""
    total = torch.zeros(())
    for example in inputs:
        logits = model(example[None])[0]
        rows = [
            torch.cat([g.flatten() for g in torch.autograd.grad(h, list(model.parameters()), retain_graph=True)])
            for h in logits
        ]
        jacobian, p = torch.stack(rows), logits.detach().softmax(0)
        total = total + jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    return total / len(inputs)


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
    dense = dense_gauss_newton(model, data[0])
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
    expected = float(vector.T @ dense_gauss_newton(model, inputs[indices]) @ vector)
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
    with pytest.raises(ValueError, match="need num_probes >= 1"):
        mean_eigenvalue(operator, num_probes=0)
    with pytest.raises(ValueError, match="pass the vectors as columns"):
        quadratic_forms(operator, torch.ones(operator.shape[0], dtype=torch.float64))


def test_a_killed_estimate_goes_on_with_its_next_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = classifier()
    operator, count = GaussNewtonOperator(model.eval(), nn.CrossEntropyLoss(), data), [0, 0]

    def counted(operator: GaussNewtonOperator, probes: Tensor) -> Tensor:
        count[0] += 1
        if count[0] == count[1]:
            raise KeyboardInterrupt
        return quadratic_forms(operator, probes)

    monkeypatch.setattr("curvlab.spectrum.trace.quadratic_forms", counted)

    def estimate(**settings: object) -> Estimate:
        generator = torch.Generator().manual_seed(0)
        return mean_eigenvalue(operator, num_probes=8, batch_size=5, generator=generator, **settings)

    whole, place = estimate(), Checkpoint(tmp_path / "forms", every=1)
    count[:] = [0, 6]
    with pytest.raises(KeyboardInterrupt):
        estimate(checkpoint=place)
    count[:] = [0, 0]
    assert estimate(checkpoint=place) == whole
    assert count[0] == 3
