"""LiSSA: its limit, its settings by formula, and by importance."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator, GaussNewtonOperator
from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.solvers import (
    DivergenceError,
    Lissa,
    LissaHyperparameters,
    lissa_hyperparameters,
    measure_recipe,
)
from tests.curvature.curvature_cases import fitted
from tests.refusals import refuses


class FullBatch(DenseOperator):
    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> LinearOperator:
        return self


class Columnwise(DenseOperator):
    """Diagonal operator whose samples have one entry that is far too large in the first coordinate."""

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> LinearOperator:
        values = self.matrix.diagonal().clone()
        values[0] *= 30
        return DenseOperator(torch.diag(values))


def test_follows_the_closed_form_of_the_mean(examples: Tensor, generator) -> None:
    matrix = examples.mean(0)
    b = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    damping, step_size = 0.2, 0.7 / float(torch.linalg.eigvalsh(matrix).max() + 0.2)
    seen: dict[int, Tensor] = {}
    solver = Lissa(
        step_size, batch_size=1, num_steps=50, callback=lambda state: seen.update({state.num_steps: state.x})
    )
    solver.solve(FullBatch(matrix) + damping * identity, b)
    values, vectors = torch.linalg.eigh(matrix + damping * torch.eye(20, dtype=torch.float64))
    for step in (1, 2, 7, 50):  # u_t = (I - (I - eta A)^t) A⁻¹ b
        expected = vectors @ ((1 - (1 - step_size * values) ** step) / values)[:, None].mul(vectors.T @ b)
        torch.testing.assert_close(seen[step], expected, rtol=1e-10, atol=1e-12)
    assert sorted(seen) == list(range(1, 51))


def test_stochastic_iteration_converges_to_the_truth_with_batch_size(build_examples) -> None:
    matrices = build_examples("decaying", num_examples=200, size=10)
    matrix, damping = matrices.mean(0), 0.3
    operator = DenseOperator(matrices, is_psd=True) + damping * identity
    b = torch.ones(10, dtype=torch.float64)
    truth = torch.linalg.solve(matrix + damping * torch.eye(10, dtype=torch.float64), b)
    step_size = 1 / (float(torch.linalg.eigvalsh(matrix).max()) + damping)
    num_steps = math.ceil(8 / (step_size * damping))
    errors = {}
    for batch_size in (40, 160, 2560):
        squares = []
        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            x = Lissa(step_size, batch_size, num_steps).solve(operator, b, generator=generator).x
            squares.append(float(((x - truth) ** 2).sum() / (truth**2).sum()))
        errors[batch_size] = sum(squares) / len(squares)
    assert 2 < errors[40] / errors[160] < 8  # 1 / |B|, to leading order
    assert 8 < errors[160] / errors[2560] < 32
    assert errors[2560] < 0.05**2


def test_mean_over_runs_is_unbiased(build_examples) -> None:
    matrices = build_examples("isotropic", num_examples=50, size=6)
    operator = DenseOperator(matrices, is_psd=True) + 0.5 * identity
    b = torch.ones(6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    runs = torch.stack([Lissa(0.1, 20, 15).solve(operator, b, generator=generator).x for _ in range(300)], dim=1)
    damped = matrices.mean(0) + 0.5 * torch.eye(6, dtype=torch.float64)
    expected = torch.zeros(6, dtype=torch.float64)
    for _ in range(15):
        expected = expected - 0.1 * (damped @ expected - b)
    deviation = (runs.mean(1) - expected) / (runs.std(1) / 300**0.5)
    assert float(deviation.abs().max()) < 4
    assert float(runs.std(1).min()) > 1e-3  # there was noise to average


def test_right_hand_sides_share_batches(build_examples) -> None:
    operator = DenseOperator(build_examples("decaying", num_examples=50, size=10), is_psd=True) + 0.1 * identity
    b = torch.randn(10, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solver = Lissa(0.1, 20, 30)
    together = solver.solve(operator, b, generator=torch.Generator().manual_seed(0)).x
    alone = [solver.solve(operator, b[:, k], generator=torch.Generator().manual_seed(0)).x for k in range(3)]
    torch.testing.assert_close(together, torch.stack(alone, dim=1), rtol=1e-10, atol=1e-12)
    other = solver.solve(operator, b, generator=torch.Generator().manual_seed(1)).x
    assert float((other - together).norm()) > 1e-3


def test_counts_products_and_states_what_it_does_not_know(build_examples) -> None:
    data_free = Lissa(0.1, 1, 1).solve, DenseOperator(torch.eye(3)), torch.ones(3)
    refuses("no data to sample", *data_free, error=NotImplementedError)
    operator = DenseOperator(build_examples("decaying", num_examples=50, size=10), is_psd=True) + 0.1 * identity
    b = torch.ones(10, 2, dtype=torch.float64)
    assert Lissa(0.1, 20, 30).solve(operator, b).num_matvecs == 2 * 30 + 2
    unchecked = Lissa(0.1, 20, 30, check_residual=False).solve(operator, b)
    assert unchecked.num_matvecs == 2 * 30
    assert bool(unchecked.residual.isnan().all())
    assert not unchecked.converged


def test_too_few_steps_are_not_converged(examples: Tensor) -> None:
    operator = FullBatch(examples.mean(0)) + 0.01 * identity
    solution = Lissa(0.01, 1, 5).solve(operator, torch.ones(20, dtype=torch.float64))
    assert not solution.converged
    assert 0.1 < float(solution.residual) < 1


def test_too_large_a_step_is_reported_with_one_that_works(examples: Tensor) -> None:
    matrix = examples.mean(0)
    operator = FullBatch(matrix) + 0.1 * identity
    largest = float(torch.linalg.eigvalsh(matrix).max()) + 0.1
    b = torch.ones(20, 2, dtype=torch.float64)
    with pytest.raises(DivergenceError, match=r"exceeds what it allows: use step_size = ") as caught:
        Lissa(3 / largest, 1, 500).solve(operator, b)
    assert caught.value.step < 100
    advised = float(str(caught.value).split("use step_size = ")[1].split(" ")[0])
    assert 0.9 / largest < advised < 1.5 / largest
    Lissa(advised, 1, 500).solve(operator, b)


def growth_of_second_moments(matrices: Tensor, *, damping: float, step_size: float, batch_size: int) -> float:
    """Spectral radius of E (I - eta A_t) x (I - eta A_t): E‖u - u*‖² stays bounded if and only if it is < 1."""
    size = matrices.shape[-1]
    eye = torch.eye(size, dtype=torch.float64)
    contractions = eye - step_size * (matrices + damping * eye)  # of single examples
    mean = contractions.mean(0)
    of_one = torch.einsum("nij,nkl->ikjl", contractions, contractions) / len(matrices)
    of_two = torch.einsum("ij,kl->ikjl", mean, mean)
    moments = (of_one / batch_size + (1 - 1 / batch_size) * of_two).reshape(size**2, size**2)
    return float(torch.linalg.eigvals(moments).abs().max())


# Around the exact threshold: the batch size decides, not the step size.
@pytest.mark.parametrize(("kind", "enough"), [("isotropic", 40), ("heavy_tailed", 200)])
@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_divergence_is_noticed_where_it_happens(build_examples, kind: str, enough: int, batch_size) -> None:
    stable, batch_size = batch_size is None, batch_size or enough
    matrices = build_examples(kind, num_examples=300, size=12)
    damping = 0.05
    operator = DenseOperator(matrices, is_psd=True) + damping * identity
    step_size = 1 / (float(torch.linalg.eigvalsh(matrices.mean(0)).max()) + damping)
    growth = growth_of_second_moments(matrices, damping=damping, step_size=step_size, batch_size=batch_size)
    assert (growth < 0.999) == stable
    assert stable or growth > 1.3
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        b = torch.randn(12, 10, generator=generator, dtype=torch.float64)
        solver = Lissa(step_size, batch_size, 400)
        if stable:
            assert float(solver.solve(operator, b, generator=generator).x.norm(dim=0).max()) < 100
        else:
            message = rf"batch_size = {batch_size} is too small.*Try batch_size = {4 * batch_size}"
            refuses(message, solver.solve, operator, b, generator=generator, error=DivergenceError)


def test_names_the_columns_that_diverge() -> None:
    operator = Columnwise(torch.diag(torch.tensor([1.0, 0.5, 0.2]))) + 0.1 * identity
    b = torch.eye(3)[:, [1, 0, 2]]
    with pytest.raises(DivergenceError, match=r"in column 1 \(of 3\)") as caught:
        Lissa(0.8, 10, 200).solve(operator, b)
    assert caught.value.columns == [1]
    assert caught.value.norm > 5


class OneBadExample(DenseOperator):
    """Product with a batch is NaN whenever the bad example is in it; the full product is never asked for."""

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> LinearOperator:
        drawn = torch.randint(50, (batch_size,), generator=generator)
        batch = OneBadExample(self.matrix.clone())
        if bool((drawn == 17).any()):
            batch.matrix.fill_(torch.nan)
        return batch


def test_a_nan_in_one_batch_is_not_called_divergence(generator) -> None:
    operator = OneBadExample(torch.eye(10))
    with pytest.raises(ValueError, match="the product with a batch of OneBadExample is not finite"):
        Lissa(0.1, 1, 300).solve(operator, torch.ones(10), generator=generator)


# ----------------------------------------------------------------------------------------
# Klochkov & Liu (2024), Table 1: parameters, tr/P, lambda_max; step size, batch size, steps.
TABLE_1 = {
    "ResNet-18": (11.69e6, 1.32e-3, 270, 0.003, 100, 150),
    "ResNet-50": (25.56e6, 8.17e-4, 470, 0.002, 5, 200),
    "OPT 1.3B": (1.3e9, 9.28e-6, 780, 0.001, 30, 500),
    "Llama-1 7B": (6.74e9, 5.69e-6, 1600, 0.0005, 50, 1000),
    "Mistral 7B": (7.24e9, 8.18e-5, 5600, 0.0002, 200, 2000),
}


@pytest.mark.parametrize("model", list(TABLE_1))
def test_table_1_up_to_its_rounding(model: str) -> None:
    size, mean_trace, largest, step_size, batch_size, num_steps = TABLE_1[model]
    ours = lissa_hyperparameters(trace=mean_trace * size, largest_eigenvalue=largest, damping=5.0)
    assert ours.step_size == pytest.approx(1 / (largest + 5.0))
    assert 0.75 <= step_size / ours.step_size <= 1.15  # one digit is printed, cut off more often than rounded
    # T follows from the printed step size, up to rounding to 1.5 digits, hence is at least ours or nearly so.
    assert 2 <= step_size * 5.0 * num_steps <= 2.5
    assert 0.88 <= num_steps / ours.num_steps <= 1.6
    if model == "ResNet-50":  # what the table prints is not its own formula (DESIGN section 6)
        assert 80 <= ours.batch_size <= 95
    else:
        assert ours.batch_size == pytest.approx(batch_size, rel=0.15)


def test_exact_values_and_use() -> None:
    of_the_table = lissa_hyperparameters(trace=25e6 * 8.17e-4, largest_eigenvalue=470, damping=5.0)
    assert of_the_table.batch_size == 87  # ResNet-50
    given = {"trace": 10.0, "largest_eigenvalue": 4.0, "damping": 1.0}
    settings = lissa_hyperparameters(**given, constant=7.0, num_time_constants=3.0)
    assert settings == LissaHyperparameters(step_size=0.2, batch_size=18, num_steps=15)
    assert Lissa(**asdict(settings)) == Lissa(0.2, 18, 15)
    per_parameter = {"trace": 1.32e-3, "largest_eigenvalue": 270, "damping": 5.0}
    refuses(r"pass tr\(G\), not tr\(G\)/P", lissa_hyperparameters, **per_parameter)


# --- LiSSA's recipe with importance sampling: the bound in dense fp64, a fitted network, what is refused


def heavy() -> Tensor:
    """200 matrices of rank 1; the first four hold most of the trace, in one direction."""
    factors = 0.3 * torch.randn(200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors[:4, 0] = 8.0
    return factors[:, :, None] * factors[:, None, :]


def test_condition_holds_with_the_recipe_s_constant() -> None:
    """E H̃² - G² ⪯ C tr(G) G, exactly, over all examples; by uniform sampling only with a far larger C."""
    blocks = heavy()
    matrix = blocks.mean(0)
    recipe = measure_recipe(DenseOperator(blocks, is_psd=True), 0.1)
    assert recipe.certified
    assert recipe.constant <= 1.01
    assert recipe.probabilities is not None
    values, vectors = torch.linalg.eigh(matrix)
    whiten = vectors / values.sqrt()

    def smallest_constant(q: Tensor) -> float:
        second = torch.einsum("n,nij,njk->ik", 1 / (200**2 * q), blocks, blocks) - matrix @ matrix
        return float(torch.linalg.eigvalsh(whiten.T @ second @ whiten)[-1] / matrix.trace())

    assert smallest_constant(recipe.probabilities) <= recipe.constant
    assert smallest_constant(torch.full((200,), 1 / 200).double()) > 5
    assert recipe.trace.value == pytest.approx(float(matrix.trace()))
    assert recipe.largest_eigenvalue == pytest.approx(float(values[-1]), rel=0.03)
    ratio = recipe.trace.value / recipe.largest_eigenvalue
    assert recipe.settings.batch_size == math.ceil(2 * recipe.constant * ratio)


def test_converges_on_a_fitted_network_where_uniform_batches_of_the_same_size_diverge() -> None:
    op = GaussNewtonOperator(*fitted())
    dense = op.to_dense()
    damping = 1e-2 * float(torch.linalg.eigvalsh(dense)[-1])
    damped = dense + damping * torch.eye(len(dense)).double()
    b = op.randn(2, torch.Generator().manual_seed(3))
    truth = torch.linalg.solve(damped, b)
    solver = Lissa.auto(op, damping, generator=torch.Generator().manual_seed(0))
    assert solver.recipe is not None
    assert solver.recipe.certified
    solution = solver.solve(op + damping * identity, b, generator=torch.Generator().manual_seed(1))
    error = (solution.x - truth).norm(dim=0) / truth.norm(dim=0)
    assert solution.converged
    assert float(error.max()) < 0.2
    promised = solver.stationary_error(op + damping * identity, solution.x, generator=torch.Generator())
    assert bool((error < promised + 0.1).all())
    spectrum = {"trace": float(dense.trace()), "largest_eigenvalue": float(torch.linalg.eigvalsh(dense)[-1])}
    paper = lissa_hyperparameters(**spectrum, damping=damping, num_time_constants=4)
    assert solver.batch_size <= 1.05 * paper.batch_size + 1  # C = 2, as the paper assumes
    uniform = Lissa(paper.step_size, paper.batch_size, paper.num_steps)
    with pytest.raises(DivergenceError):
        uniform.solve(op + damping * identity, b, generator=torch.Generator().manual_seed(1))
    measured = Lissa.auto(op, damping, sampling="uniform", generator=torch.Generator().manual_seed(0))
    assert measured.probabilities is None
    assert measured.batch_size > 2 * solver.batch_size


def test_sequences_are_drawn_whole() -> None:
    """Traces of sequences are estimated: C is measured, and a tenth of the draws is uniform."""
    torch.manual_seed(0)

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).cumsum(1).tanh())

    model = Causal().double()
    tokens = torch.randint(7, (12, 5), generator=torch.Generator().manual_seed(0))
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (tokens[:, :-1], tokens[:, 1:]))
    recipe = measure_recipe(op, 0.1, generator=torch.Generator().manual_seed(1))
    assert not recipe.certified
    assert recipe.probabilities is not None
    assert recipe.probabilities.shape == (12,)
    assert float(recipe.probabilities.min()) >= 0.1 / 12
    assert recipe.num_sampled_matvecs > 0


def test_what_is_refused() -> None:
    one = model, loss, data = tuple(fitted())
    refuses("sampling='uniform'", Lissa.auto, 1.0 * GaussNewtonOperator(*one), 0.1, error=TypeError)
    fisher = FisherOperator(model, loss, data, kind="empirical")
    refuses("pass a GaussNewtonOperator", Lissa.auto, fisher, 0.1, error=TypeError)
    refuses("without damping", Lissa.auto, GaussNewtonOperator(model, loss, data) + 0.1 * identity, 0.1)
    with pytest.raises(ValueError, match="must be 'importance' or 'uniform'"):
        Lissa.auto(GaussNewtonOperator(model, loss, data), 0.1, sampling="other")
