import math

import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.solvers import DivergenceError, Lissa


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
@pytest.mark.parametrize(
    ("kind", "batch_size", "stable"),
    [
        ("isotropic", 1, False),
        ("isotropic", 2, False),
        ("isotropic", 40, True),
        ("heavy_tailed", 1, False),
        ("heavy_tailed", 2, False),
        ("heavy_tailed", 200, True),
    ],
)
def test_divergence_is_noticed_where_it_happens(build_examples, kind: str, batch_size: int, stable: bool) -> None:
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
            with pytest.raises(DivergenceError, match=message):
                solver.solve(operator, b, generator=generator)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_size": 0.0, "batch_size": 1, "num_steps": 1}, "step_size must be positive"),
        ({"step_size": 0.1, "batch_size": 0, "num_steps": 1}, "batch_size and num_steps"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lissa(**settings)


def test_operator_without_data_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="no data to sample"):
        Lissa(0.1, 1, 1).solve(DenseOperator(torch.eye(3)), torch.ones(3))
