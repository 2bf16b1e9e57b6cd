"""EK-FAC against dense Kronecker factors, built one example and one label at a time in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Ekfac

DAMPING = 0.1


def rows(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of -log p for every label of every example, (N, C, P), and the labels' probabilities, (N, C)."""
    gradients, probabilities = [], []
    for one in inputs:
        log_p = model(one[None]).log_softmax(-1)[0]
        own = [
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(-value, list(model.parameters()), retain_graph=True)]
            )
            for value in log_p
        ]
        gradients.append(torch.stack(own))
        probabilities.append(log_p.detach().exp())
    return torch.stack(gradients), torch.stack(probabilities)


def test_one_output_layer_is_exact_after_correction(generator) -> None:
    """A linear model of one-hot inputs: G is block-diagonal in the Kronecker basis of its inputs."""
    # Inputs e_i: A = E[a aᵀ] is diagonal and G = ⊕_i p_i S_i; with equal logits S_i = S, so G = A ⊗ S exactly.
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    inputs = torch.eye(4, dtype=torch.float64).repeat_interleave(torch.tensor([2, 4, 6, 8]), 0).repeat(200, 1)
    targets = torch.zeros(len(inputs), dtype=torch.long)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, targets)) + DAMPING * identity
    inverse, num_matvecs = Ekfac().build(op, generator=generator)
    s = torch.eye(3, dtype=torch.float64) / 3 - torch.full((3, 3), 1 / 9, dtype=torch.float64)
    dense = torch.kron(s, torch.diag(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)))
    expected = torch.linalg.inv(dense + DAMPING * torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(inverse.to_dense(), expected, rtol=0, atol=0.03 * float(expected.max()))
    assert num_matvecs == 3


@pytest.mark.parametrize("net", ["mlp", "convolution"])
@pytest.mark.parametrize("eigenvalues", ["corrected", "kronecker"])
def test_blocks_are_those_of_the_definition(net: str, eigenvalues: str, generator) -> None:
    """With many copies of the data the drawn labels average out, and the factors are those of all labels."""
    torch.manual_seed(0)
    if net == "mlp":
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        shapes = [(4, 3, True), (2, 4, True)]
        inputs = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    else:
        model = nn.Sequential(
            nn.Conv2d(1, 2, 2, stride=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2, bias=False)
        ).double()
        shapes = [(2, 4, False), (2, 8, False)]
        inputs = torch.randn(6, 1, 4, 4, generator=generator, dtype=torch.float64)
    gradients, probabilities = rows(model, inputs)
    copies = 3000
    data = (inputs.repeat(copies, *[1] * (inputs.ndim - 1)), torch.zeros(6 * copies, dtype=torch.long))
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data) + DAMPING * identity
    inverse, _ = Ekfac(eigenvalues=eigenvalues).build(op, generator=generator)
    weights = probabilities[:, :, None] / len(inputs)
    start = 0
    for block, (outputs, width, bias) in zip(inverse.blocks, shapes, strict=True):
        size = outputs * (width + bias)
        own = gradients[:, :, start : start + size]
        matrices = own[:, :, : outputs * width].reshape(*own.shape[:2], outputs, width)
        if bias:
            matrices = torch.cat([matrices, own[:, :, outputs * width :, None]], -1)
        found = 1 / block.inverse - DAMPING
        # The second moments along the basis that was found, from all labels.
        rotated = block.output_basis.T @ matrices @ block.input_basis
        corrected = (weights[..., None] * rotated.square()).sum((0, 1))
        if eigenvalues == "corrected":
            torch.testing.assert_close(found, corrected, rtol=0.1, atol=0.02 * float(corrected.max()))
        else:
            assert float(found.sum()) == pytest.approx(float(corrected.sum()), rel=0.5)
        start += size


def test_parameters_outside_of_layers_get_their_mean_diagonal(generator) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    inputs = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, torch.zeros(20, dtype=torch.long)))
    inverse, num_matvecs = Ekfac().build(op + DAMPING * identity, generator=generator)
    assert num_matvecs == 4
    assert bool((inverse.rest[16:24] > 0).all())
    assert bool((inverse.rest[16:24] <= 1 / DAMPING).all())
    dense = inverse.to_dense()
    torch.testing.assert_close(dense[16:24, 16:24], torch.diag(inverse.rest[16:24]))
    assert float(dense[:16, 16:].abs().max()) == 0


@pytest.mark.parametrize("solver", [ConjugateGradient, BlockConjugateGradient])
def test_preconditions_a_badly_scaled_model(solver, generator) -> None:
    # With equal logits the Gauss-Newton matrix is a Kronecker product, up to the labels that are drawn.
    model = nn.Linear(10, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    inputs = torch.randn(800, 10, generator=generator, dtype=torch.float64) * torch.logspace(0, 2, 10).double()
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, torch.zeros(800, dtype=torch.long)))
    b = torch.randn(op.shape[0], 2, generator=generator, dtype=torch.float64)
    damped = op + 1e-3 * identity
    plain = solver(rtol=1e-6).solve(damped, b)
    helped = solver(rtol=1e-6, preconditioner=Ekfac()).solve(damped, b, generator=generator)
    assert helped.converged
    assert helped.num_matvecs < 0.7 * plain.num_matvecs
    truth = torch.linalg.solve(damped.to_dense(), b)
    torch.testing.assert_close(helped.x, truth, rtol=1e-3, atol=1e-3 * float(truth.abs().max()))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.layer(inputs).tanh())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.LayerNorm(3)), "has no nn.Linear or nn.Conv2d layer"),
        (Twice(), "applied several times"),
    ],
)
def test_models_that_cannot_be_factored(model: nn.Module, message: str) -> None:
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (torch.ones(2, 3), torch.zeros(2, dtype=torch.long)))
    with pytest.raises(ValueError, match=message):
        Ekfac().build(op + DAMPING * identity)


def test_needs_a_model_and_damping() -> None:
    with pytest.raises(TypeError, match=r"needs GaussNewtonOperator.*got DenseOperator, IdentityOperator"):
        Ekfac().build(DenseOperator(torch.eye(3)) + DAMPING * identity)
    model = nn.Linear(3, 2)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (torch.ones(2, 3), torch.zeros(2, dtype=torch.long)))
    with pytest.raises(ValueError, match="need positive damping"):
        Ekfac().build(op)
    with pytest.raises(ValueError, match="'corrected' or 'kronecker'"):
        Ekfac(eigenvalues="exact")


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv2d(2, 3, 2)], ids=lambda layer: type(layer).__name__)
def test_activations_in_place_change_nothing(layer: nn.Module, generator) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(8, 6) if isinstance(layer, nn.Linear) else torch.randn(8, 2, 4, 4)
    targets = torch.arange(8) % 3
    built = []
    for inplace in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(layer, nn.ReLU(inplace=inplace), nn.Flatten(), nn.LazyLinear(3)).double()
        model(inputs.double())
        op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs.double(), targets)) + DAMPING * identity
        inverse, _ = Ekfac().build(op, generator=generator.manual_seed(2))
        built.append(inverse.to_dense())
    torch.testing.assert_close(built[0], built[1])
