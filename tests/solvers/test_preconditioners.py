"""Preconditioners: Nyström, EK-FAC, rows of hard examples."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import (
    BlockConjugateGradient,
    ConjugateGradient,
    Ekfac,
    IndefiniteOperatorError,
    Nystrom,
    Rows,
)
from tests.curvature.curvature_cases import Problem, language_problem, problem
from tests.curvature.curvature_oracles import dense_gauss_newton, gradient
from tests.matrices import with_spectrum
from tests.refusals import refuses

DAMPING = 1e-4


def decaying(size: int, *, seed: int = 0) -> Tensor:
    return with_spectrum(torch.arange(1, size + 1).double() ** -2, seed)


def test_full_rank_is_the_inverse(generator) -> None:
    matrix = decaying(30)
    inverse, num_matvecs = Nystrom(100).build(DenseOperator(matrix) + DAMPING * identity, generator=generator)
    assert num_matvecs == 30
    damped = matrix + DAMPING * torch.eye(30, dtype=torch.float64)
    torch.testing.assert_close(inverse.to_dense(), torch.linalg.inv(damped), rtol=1e-6, atol=1e-6)


def test_matches_the_dense_formula(generator) -> None:
    matrix = decaying(60)
    operator = DenseOperator(matrix) + DAMPING * identity
    inverse, _ = Nystrom(12).build(operator, generator=torch.Generator().manual_seed(3))
    tests = operator.randn(12, torch.Generator().manual_seed(3))
    images = matrix @ tests
    approximation = images @ torch.linalg.solve(tests.T @ images, images.T)  # any basis of the same tests
    values, vectors = torch.linalg.eigh(approximation)
    values, vectors = values.flip(0)[:12], vectors.flip(1)[:, :12]
    tail = 1 / (values[-1] + DAMPING)
    expected = tail * torch.eye(60, dtype=torch.float64) + vectors * (1 / (values + DAMPING) - tail) @ vectors.T
    torch.testing.assert_close(inverse.to_dense(), expected, rtol=1e-6, atol=1e-6 * float(tail))
    assert bool((inverse.eigenvalues <= torch.linalg.eigvalsh(matrix).flip(0)[:12] + 1e-12).all())
    assert inverse.is_psd


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saves_steps_and_counts_its_set_up(generator, dtype: torch.dtype) -> None:
    matrix = decaying(400).to(dtype)
    operator = DenseOperator(matrix) + DAMPING * identity
    b = torch.randn(400, 20, generator=generator, dtype=dtype)
    plain = ConjugateGradient(rtol=1e-3).solve(operator, b)
    solver = ConjugateGradient(rtol=1e-3, preconditioner=Nystrom(60))
    preconditioned = solver.solve(operator, b, generator=generator)
    assert plain.converged
    assert preconditioned.converged
    assert preconditioned.num_matvecs < plain.num_matvecs / 3
    inverse, set_up = Nystrom(60).build(operator, generator=generator)
    reused = ConjugateGradient(rtol=1e-3, preconditioner=inverse).solve(operator, b)
    assert set_up == 60
    assert abs(preconditioned.num_matvecs - set_up - reused.num_matvecs) <= 60  # other random numbers


def test_rank_deficient_operator(generator) -> None:
    factor = torch.randn(50, 5, generator=generator, dtype=torch.float64)
    operator = DenseOperator(factor @ factor.T)
    b = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    solution = ConjugateGradient(rtol=1e-8, preconditioner=Nystrom(10)).solve(operator + DAMPING * identity, b)
    assert solution.converged
    assert solution.num_matvecs <= 10 + 3 * 4
    refuses("no damping: add damping", Nystrom(10).build, DenseOperator(torch.zeros(20, 20)))
    indefinite = DenseOperator(torch.diag(torch.linspace(-1, 1, 20))) + 2.0 * identity
    text = "minus its damping is not positive semi-definite"
    refuses(text, Nystrom(15).build, indefinite, generator=generator, error=IndefiniteOperatorError)


# --- EK-FAC against dense Kronecker factors, built one example and one label at a time in fp64
EKFAC_DAMPING = 0.1


def rows(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of -log p for every label of every example, (N, C, P), and the labels' probabilities, (N, C)."""
    gradients, probabilities = [], []
    for one in inputs:
        log_p = model(one[None]).log_softmax(-1)[0]
        gradients.append(torch.stack([gradient(-value, model) for value in log_p]))
        probabilities.append(log_p.detach().exp())
    return torch.stack(gradients), torch.stack(probabilities)


def test_one_output_layer_is_exact_after_correction(generator) -> None:
    """A linear model of one-hot inputs: G is block-diagonal in the Kronecker basis of its inputs."""
    # Inputs e_i: A = E[a aᵀ] is diagonal and G = ⊕_i p_i S_i; with equal logits S_i = S, so G = A ⊗ S exactly.
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    inputs = torch.eye(4, dtype=torch.float64).repeat_interleave(torch.tensor([2, 4, 6, 8]), 0).repeat(200, 1)
    targets = torch.zeros(len(inputs), dtype=torch.long)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, targets)) + EKFAC_DAMPING * identity
    inverse, num_matvecs = Ekfac().build(op, generator=generator)
    s = torch.eye(3, dtype=torch.float64) / 3 - torch.full((3, 3), 1 / 9, dtype=torch.float64)
    dense = torch.kron(s, torch.diag(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)))
    expected = torch.linalg.inv(dense + EKFAC_DAMPING * torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(inverse.to_dense(), expected, rtol=0, atol=0.03 * float(expected.max()))
    assert num_matvecs == 3


@pytest.mark.parametrize("net", ["mlp", "convolution"])
@pytest.mark.parametrize("eigenvalues", ["corrected", "kronecker"])
def test_blocks_are_those_of_the_definition(net: str, eigenvalues: str, generator) -> None:
    """With many copies of the data the drawn labels average out, and the factors are those of all labels."""
    torch.manual_seed(0)
    if net == "mlp":
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        shapes, inputs = [(4, 3, True), (2, 4, True)], torch.randn(6, 3, generator=generator).double()
    else:
        layers = nn.Conv2d(1, 2, 2, stride=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2, bias=False)
        model = nn.Sequential(*layers).double()
        shapes, inputs = [(2, 4, False), (2, 8, False)], torch.randn(6, 1, 4, 4, generator=generator).double()
    gradients, probabilities = rows(model, inputs)
    copies = 3000
    data = (inputs.repeat(copies, *[1] * (inputs.ndim - 1)), torch.zeros(6 * copies, dtype=torch.long))
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data) + EKFAC_DAMPING * identity
    inverse, _ = Ekfac(eigenvalues=eigenvalues).build(op, generator=generator)
    weights = probabilities[:, :, None] / len(inputs)
    start = 0
    for block, (outputs, width, bias) in zip(inverse.blocks, shapes, strict=True):
        size = outputs * (width + bias)
        own = gradients[:, :, start : start + size]
        matrices = own[:, :, : outputs * width].reshape(*own.shape[:2], outputs, width)
        if bias:
            matrices = torch.cat([matrices, own[:, :, outputs * width :, None]], -1)
        found = 1 / block.inverse - EKFAC_DAMPING
        # The second moments along the basis that was found, from all labels.
        rotated = block.output_basis.T @ matrices @ block.input_basis
        corrected = (weights[..., None] * rotated.square()).sum((0, 1))
        if eigenvalues == "corrected":
            torch.testing.assert_close(found, corrected, rtol=0.1, atol=0.02 * float(corrected.max()))
        else:
            assert float(found.sum()) == pytest.approx(float(corrected.sum()), rel=0.5)
        start += size


@pytest.mark.parametrize("net", ["linear", "convolution"])
def test_fewer_places_than_sides_are_the_same_inverse_by_smaller_bases(net: str, generator) -> None:
    """Against the dense Kronecker product of the same activations and signals."""
    torch.manual_seed(0)
    if net == "linear":
        model, inputs, places = nn.Linear(9, 7, bias=False), torch.randn(4, 9, generator=generator), 4
    else:
        model = nn.Sequential(nn.Conv2d(1, 12, 3, bias=False), nn.Flatten())
        inputs, places = torch.randn(2, 1, 4, 4, generator=generator), 8
    model, inputs = model.double(), inputs.double()
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, torch.zeros(len(inputs), dtype=torch.long)))
    layers = op.layers(max_size=99)
    ((a, g),) = next(iter(op.layer_factors(layers, generator=generator.manual_seed(2))))
    a, g = a.flatten(0, 1), g.flatten(0, 1)
    dense = torch.kron(g.T @ g, a.T @ a / places)
    expected = torch.linalg.inv(dense + EKFAC_DAMPING * torch.eye(len(dense)))
    damped = op + EKFAC_DAMPING * identity
    inverse, _ = Ekfac(eigenvalues="kronecker").build(damped, generator=generator.manual_seed(2))
    torch.testing.assert_close(inverse.to_dense(), expected)
    corrected, _ = Ekfac().build(damped, generator=generator.manual_seed(2))
    for found in (inverse.blocks[0], corrected.blocks[0]):
        assert found.inverse.shape == (min(places, layers[0].shape[0]), min(places, layers[0].shape[1]))
    # What no input reaches is divided by the damping.
    unseen = torch.linalg.qr(a.T, mode="complete").Q[:, places:]
    outputs = layers[0].shape[0]
    vectors = torch.kron(torch.randn(outputs, 1, generator=generator).double(), unseen[:, :1])
    torch.testing.assert_close(corrected @ vectors, vectors / EKFAC_DAMPING)


def test_parameters_outside_of_layers_get_their_mean_diagonal(generator) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    inputs = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, torch.zeros(20, dtype=torch.long)))
    inverse, num_matvecs = Ekfac().build(op + EKFAC_DAMPING * identity, generator=generator)
    assert num_matvecs == 4
    assert bool((inverse.rest[16:24] > 0).all())
    assert bool((inverse.rest[16:24] <= 1 / EKFAC_DAMPING).all())
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
    [(nn.Sequential(nn.LayerNorm(3)), "has no nn.Linear or nn.Conv2d layer"), (Twice(), "applied several times")],
)
def test_models_that_cannot_be_factored(model: nn.Module, message: str) -> None:
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (torch.ones(2, 3), torch.zeros(2, dtype=torch.long)))
    refuses(message, Ekfac().build, op + EKFAC_DAMPING * identity)


def test_needs_a_model_and_damping() -> None:
    other = DenseOperator(torch.eye(3)) + EKFAC_DAMPING * identity
    text = r"needs GaussNewtonOperator.*got DenseOperator, IdentityOperator"
    refuses(text, Ekfac().build, other, error=TypeError)
    model = nn.Linear(3, 2)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (torch.ones(2, 3), torch.zeros(2, dtype=torch.long)))
    refuses("need positive damping", Ekfac().build, op)
    refuses("'corrected' or 'kronecker'", Ekfac, eigenvalues="exact")


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
        op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs.double(), targets))
        inverse, _ = Ekfac().build(op + EKFAC_DAMPING * identity, generator=generator.manual_seed(2))
        built.append(inverse.to_dense())
    torch.testing.assert_close(built[0], built[1])


# --- The rows preconditioner against dense fp64 inverses: blocks of single examples, one autograd row at a time
ROWS_DAMPING = 0.02
CASES = ["mlp_tanh-ce", "conv-ce", "mlp_relu-mse", "linear-bce", "conv-ce_ignore"]
NO_EXACT_TRACES = ["layer_norm-ce", "recurrent-mse"]


def blocks_of(one: Problem) -> Tensor:
    """(N, P, P), summing up to G: example by example."""
    total = dense_gauss_newton(one.model, one.loss, one.inputs, one.targets)
    if isinstance(one.loss, nn.CrossEntropyLoss):
        summed = nn.CrossEntropyLoss(reduction="sum", ignore_index=one.loss.ignore_index)
        kept = [n for n in range(len(one.targets)) if int(one.targets[n]) != one.loss.ignore_index]
    else:
        summed, kept = type(one.loss)(reduction="sum"), list(range(len(one.targets)))
    parts = [one.part(n) for n in kept]
    blocks = torch.stack([dense_gauss_newton(part.model, summed, part.inputs, part.targets) for part in parts])
    return blocks * torch.trace(total) / blocks.diagonal(dim1=1, dim2=2).sum()


def dense_inverse(matrix: Tensor) -> Tensor:
    return torch.linalg.inv(matrix + ROWS_DAMPING * torch.eye(len(matrix), dtype=torch.float64))


EACH = [(name, score) for name in CASES for score in ("outputs", "traces")]


@pytest.mark.parametrize(("name", "score"), EACH + [(name, "outputs") for name in NO_EXACT_TRACES])
def test_all_rows_are_the_inverse(name: str, score: str) -> None:
    one = problem(*name.split("-"))
    inverse, _ = Rows(score=score).build(GaussNewtonOperator(*one) + ROWS_DAMPING * identity)
    expected = dense_inverse(dense_gauss_newton(one.model, one.loss, one.inputs, one.targets))
    torch.testing.assert_close(inverse.to_dense(), expected, rtol=1e-9, atol=1e-9)
    assert inverse.is_psd


@pytest.mark.parametrize("name", ["mlp_tanh-ce", "conv-ce", "layer_norm-ce", "mlp_relu-mse"])
@pytest.mark.parametrize("rank", [None, 2])
def test_some_rows_are_the_longest_of_the_examples_with_most_curvature(name: str, rank: int | None) -> None:
    """Of 3 examples the 3 longest principal rows, and of their sum its `rank` leading eigenvectors."""
    one = problem(*name.split("-"))
    blocks = blocks_of(one)
    if name.endswith("ce"):
        scores = 1 - one.model(one.inputs).detach().softmax(-1).square().sum(1)
        chosen = scores.topk(3).indices
    else:  # all alike, and the first are taken
        chosen = torch.arange(3)
    values, vectors = torch.linalg.eigh(blocks[chosen])
    rows = (values.clamp(min=0).sqrt()[:, None] * vectors).transpose(1, 2).flatten(0, 1)
    rows = rows[rows.norm(dim=1).topk(3).indices]
    expected = rows.T @ rows
    if rank is not None:
        values, vectors = torch.linalg.eigh(expected)
        expected = vectors[:, -rank:] * values[-rank:] @ vectors[:, -rank:].T
    inverse, _ = Rows(num_rows=3, rank=rank).build(GaussNewtonOperator(*one) + ROWS_DAMPING * identity)
    assert inverse.num_example_rows == 3
    torch.testing.assert_close(inverse.to_dense(), dense_inverse(expected), rtol=1e-8, atol=1e-8)


def fitted(num_epochs: int = 400) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A small network on 300 noisy points of three classes, fitted until few points hold the curvature."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(300) % 3
    centres = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    inputs = centres[targets] + 0.8 * torch.randn(300, 6, dtype=torch.float64, generator=generator)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(num_epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, (inputs, targets)


@pytest.mark.parametrize(
    ("solver", "dtype"), [(ConjugateGradient, torch.float64), (BlockConjugateGradient, torch.float32)]
)
def test_takes_fewer_products_the_more_rows(solver: type, dtype: torch.dtype) -> None:
    model, data = fitted()
    op = GaussNewtonOperator(copy.deepcopy(model).to(dtype), nn.CrossEntropyLoss(), data)
    damped = op + 1e-4 * identity
    b = op.randn(6, torch.Generator().manual_seed(1)).to(dtype)
    plain = solver(rtol=1e-3).solve(damped, b)
    counts = []
    for num_rows in (20, 100, 800):
        found = solver(rtol=1e-3, preconditioner=Rows(num_rows)).solve(damped, b)
        assert found.converged
        assert float(found.residual.max()) <= 1e-3
        counts.append(found.num_matvecs)
        tolerance = 2e-3 * float(plain.x.norm()) / 1e-1  # both have a residual of 1e-3
        assert float((found.x - plain.x).norm()) < tolerance
    assert plain.num_matvecs >= counts[0] > counts[1] > counts[2]
    assert counts[2] < plain.num_matvecs / 4


@pytest.mark.parametrize(("num_epochs", "rank"), [(0, None), (20, 5), (400, None), (400, 5)])
def test_never_more_products_than_without(num_epochs: int, rank: int | None) -> None:
    model, data = fitted(num_epochs)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data)
    for damping in (1e-1, 1e-2, 1e-3):
        b = op.randn(4, torch.Generator().manual_seed(1))
        plain = BlockConjugateGradient(rtol=1e-3).solve(op + damping * identity, b)
        inverse, _ = Rows(50, rank=rank).build(op + damping * identity)
        found = BlockConjugateGradient(rtol=1e-3, preconditioner=inverse).solve(op + damping * identity, b)
        assert found.converged
        assert found.num_matvecs <= plain.num_matvecs


def test_memory_is_activations_and_signals() -> None:
    model, data = fitted(0)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data) + ROWS_DAMPING * identity
    inverse, cost = Rows(40).build(op)
    sides = (7 + 16) + (17 + 16) + (17 + 3)
    assert inverse.num_kept <= 40 * sides + 40**2
    assert inverse.num_kept < 40 * op.shape[0]
    assert cost == 1  # a forward of the data, and four of 40 examples
    budget = 10**5
    affordable, _ = Rows(memory_budget=budget).build(op)
    rows = affordable.num_example_rows
    assert 32 * rows**2 + 8 * sides * rows <= budget < 32 * (rows + 1) ** 2 + 8 * sides * (rows + 1)


def test_conditions_no_better_than_the_dtype_tells() -> None:
    """With a damping far below fp32's rounding M stays positive definite."""
    model, data = fitted(100)
    op = GaussNewtonOperator(copy.deepcopy(model).float(), nn.CrossEntropyLoss(), data) + 1e-12 * identity
    inverse, _ = Rows(200).build(op)
    assert inverse.shift > 1e-8
    dense = inverse.to_dense().double()
    assert float(torch.linalg.eigvalsh((dense + dense.T) / 2).min()) > 0


def test_without_curvature_it_is_the_damping() -> None:
    one = problem("linear", "ce")
    data = (one.inputs, torch.full_like(one.targets, -1))
    data[1][0] = 0
    with torch.no_grad():
        one.model.weight.mul_(0)
        one.model.bias.copy_(torch.tensor([2000.0, 0, 0]))
    op = GaussNewtonOperator(one.model, nn.CrossEntropyLoss(ignore_index=-1), data) + ROWS_DAMPING * identity
    inverse, _ = Rows().build(op)
    torch.testing.assert_close(inverse.to_dense(), torch.eye(15, dtype=torch.float64) / ROWS_DAMPING)


def test_what_is_refused() -> None:
    one = problem("mlp_tanh", "ce")
    op = GaussNewtonOperator(*one)
    refuses("positive damping", Rows().build, op)
    refuses("got DenseOperator", Rows().build, DenseOperator(torch.eye(3)), error=TypeError)
    with pytest.raises(ValueError, match="row for each class of each token"):
        Rows().build(GaussNewtonOperator(*language_problem("mean")) + ROWS_DAMPING * identity)
    refuses("does not hold one row", Rows(memory_budget=50).build, op + ROWS_DAMPING * identity)
    refuses("score must be", Rows, score="size")
