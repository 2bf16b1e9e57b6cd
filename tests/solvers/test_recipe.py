import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import (
    ConjugateGradient,
    Lissa,
    lissa_hyperparameters,
    measure_constant,
    measure_recipe,
)
from tests.refusals import refuses


def exact_constant(matrices: Tensor) -> float:
    """sup_v [E‖G_i v‖² - ‖G v‖²] / (tr vᵀGv), a generalised eigenvalue."""
    mean = matrices.mean(0)
    gap = (matrices @ matrices).mean(0) - mean @ mean
    values, vectors = torch.linalg.eigh(mean)
    root = vectors * values.clamp(min=1e-12) ** -0.5 @ vectors.T
    return float(torch.linalg.eigvalsh(root @ gap @ root).max() / mean.trace())


def heavy(size: int = 15, num_examples: int = 400, tail: float = 0.45) -> Tensor:
    """Few examples with much curvature, as in an overfitted network: C far above the paper's 2."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(num_examples, size, generator=generator, dtype=torch.float64)
    factors = factors * torch.arange(1, size + 1).double() ** -0.5
    factors = factors * torch.rand(num_examples, 1, generator=generator, dtype=torch.float64) ** -tail
    return factors[:, :, None] * factors[:, None, :]


def test_constant_in_given_directions(generator) -> None:
    matrices = heavy()
    mean = matrices.mean(0)
    directions = torch.randn(15, 3, generator=generator, dtype=torch.float64)
    measured = measure_constant(
        DenseOperator(matrices, is_psd=True),
        directions,
        trace=float(mean.trace()),
        num_batches=3000,
        batch_size=4,
        generator=generator,
    )
    spread = ((matrices @ directions) ** 2).sum(1).mean(0) - ((mean @ directions) ** 2).sum(0)
    expected = spread / (mean.trace() * (directions * (mean @ directions)).sum(0))
    torch.testing.assert_close(measured, expected, rtol=0.25, atol=0)


def test_recipe_finds_the_spectrum_and_a_fair_share_of_the_constant(generator) -> None:
    matrices = heavy()
    truth = exact_constant(matrices)
    assert truth > 4  # twice the paper's assumption
    recipe = measure_recipe(DenseOperator(matrices, is_psd=True), 0.1, sampling="uniform", generator=generator)
    assert recipe.largest_eigenvalue == pytest.approx(
        float(torch.linalg.eigvalsh(matrices.mean(0)).max()), rel=0.03
    )
    assert recipe.trace.value == pytest.approx(float(matrices.mean(0).trace()), rel=0.15)
    assert 0.4 * truth < recipe.constant < 1.3 * truth
    assert recipe.settings == lissa_hyperparameters(
        trace=recipe.trace.value,
        largest_eigenvalue=recipe.largest_eigenvalue,
        damping=0.1,
        constant=2 * recipe.constant,
        num_time_constants=4,
    )


@pytest.mark.filterwarnings("ignore:LiSSA")
@pytest.mark.parametrize("seed", range(3))
def test_auto_converges_to_what_it_promises(seed: int) -> None:
    matrices = heavy()
    operator, damping = DenseOperator(matrices, is_psd=True), 0.05
    generator = torch.Generator().manual_seed(seed)
    b = torch.randn(15, 4, generator=generator, dtype=torch.float64)
    solver = Lissa.auto(operator, damping, sampling="uniform", generator=generator)
    solution = solver.solve(operator + damping * identity, b, generator=generator)
    truth = ConjugateGradient(rtol=1e-10).solve(operator + damping * identity, b).x
    error = (solution.x - truth).norm(dim=0) / truth.norm(dim=0)
    assert float(error.max()) < 0.2
    assert solution.converged
    assert solver.recipe is not None
    assert solution.num_matvecs == solver.recipe.num_matvecs + 4 * solver.num_steps + 4
    assert solution.error is not None
    assert bool((error < solution.error).all())
    assert float(solution.error.max()) < 0.2
    promised = solver.stationary_error(operator + damping * identity, solution.x, generator=generator)
    assert bool((error < promised + 0.15).all())  # 0.15: what is left of the start


@pytest.mark.filterwarnings("ignore:LiSSA")
def test_auto_measures_at_a_stated_price_and_goes_on_until_its_promise_is_met(generator) -> None:
    matrices, damping = heavy(tail=0.3), 0.1
    matrices = matrices[matrices.diagonal(dim1=1, dim2=2).sum(1).argsort()][:396]  # none of them rules the mean
    operator = DenseOperator(matrices, is_psd=True)
    b = torch.randn(15, 3, generator=generator, dtype=torch.float64)
    solver = Lissa.auto(operator, damping, sampling="uniform", error_rtol=0.05, generator=generator)
    recipe = solver.recipe
    assert recipe is not None
    assert not recipe.problems
    assert recipe.num_sampled_examples <= 10 * 396
    assert recipe.num_matvecs - recipe.num_sampled_matvecs <= 28
    dear = Lissa.auto(DenseOperator(heavy(), is_psd=True), 0.1, sampling="uniform", generator=0).recipe
    assert dear is not None
    assert 0.5 * exact_constant(heavy()) < dear.constant < 1.5 * exact_constant(heavy())  # one example in 400
    assert "costs as much as all 400" in dear.problems[0]
    assert recipe.largest_eigenvalue == pytest.approx(
        float(torch.linalg.eigvalsh(matrices.mean(0)).max()), rel=0.1
    )
    damped = operator + damping * identity
    once = replace(solver, max_steps=None).solve(damped, b, generator=torch.Generator().manual_seed(0))
    assert not once.converged  # num_steps are not enough for five per cent
    solution = solver.solve(damped, b, generator=torch.Generator().manual_seed(0))
    truth = torch.linalg.solve(matrices.mean(0) + damping * torch.eye(15, dtype=torch.float64), b)
    assert solution.converged
    assert float(((solution.x - truth).norm(dim=0) / truth.norm(dim=0)).max()) < 0.05
    assert solution.history is not None
    assert solver.max_steps is not None
    assert solver.num_steps < len(solution.history) <= solver.max_steps
    assert solution.num_matvecs == recipe.num_matvecs + 3 * len(solution.history) + 3


def test_an_error_out_of_reach_is_named_before_anything_is_run(generator) -> None:
    operator = DenseOperator(heavy(num_examples=20), is_psd=True)
    with pytest.warns(UserWarning, match="use ConjugateGradient") as caught:
        solver = Lissa.auto(operator, 0.1, sampling="uniform", error_rtol=1e-3, generator=generator)
    assert solver.recipe is not None
    assert len(solver.recipe.problems) == len(caught) == 2
    assert "an error of 0.001 may take" in solver.recipe.problems[0]
    assert "costs as much as all 20" in solver.recipe.problems[1]
    assert str(solver.recipe).count("costs as much as all 20") == 1
    with pytest.raises(ValueError, match=r"max_steps must be at least num_steps = 6, got 3"):
        Lissa(0.1, 20, 6, average_last=2, error_rtol=0.1, max_steps=3)


def test_auto_warns_where_conjugate_gradients_would_take_fewer_products(generator) -> None:
    matrices, damping = heavy(tail=0.2), 3e-4
    operator = DenseOperator(matrices, is_psd=True)
    with pytest.warns(UserWarning, match=r"where ConjugateGradient takes about \d+: use that"):
        solver = Lissa.auto(operator, damping, sampling="uniform", generator=generator)
    assert solver.recipe is not None
    own, told = map(int, re.findall(r"as (\d+) products at least.*about (\d+)", solver.recipe.problems[-1])[0])
    assert own == pytest.approx(solver.num_steps * solver.batch_size / 400, abs=0.5)
    steps: list[int] = []
    b = torch.randn(15, 1, generator=generator, dtype=torch.float64)
    truth = torch.linalg.solve(matrices.mean(0) + damping * torch.eye(15, dtype=torch.float64), b)
    for taken in range(1, 20):
        x = ConjugateGradient(rtol=1e-12, max_steps=taken).solve(operator + damping * identity, b).x
        steps += [taken] if float((x - truth).norm() / truth.norm()) < 0.2 else []
    assert steps[0] <= told < own


def test_stationary_error_bounds_the_noise() -> None:
    matrices = heavy()
    damping = 0.2
    operator = DenseOperator(matrices, is_psd=True) + damping * identity
    damped = matrices.mean(0) + damping * torch.eye(15, dtype=torch.float64)
    b = torch.ones(15, dtype=torch.float64)
    truth = torch.linalg.solve(damped, b)
    solver = Lissa(0.3 / float(torch.linalg.eigvalsh(damped).max()), batch_size=100, num_steps=300)
    generator = torch.Generator().manual_seed(0)
    squares = [
        float(((solver.solve(operator, b, generator=generator).x - truth) ** 2).sum() / (truth**2).sum())
        for _ in range(40)
    ]
    bound = float(solver.stationary_error(operator, truth, num_batches=2000, generator=generator))
    error = (sum(squares) / 40) ** 0.5
    assert 0.2 * bound < error < bound
    both = solver.stationary_error(operator, torch.stack([truth, torch.zeros_like(truth)], 1), num_batches=4)
    assert float(both[1]) == 0
    # The formula itself, with the exact variance of one batch.
    spread = ((matrices @ truth) ** 2).sum(1).mean() - ((matrices.mean(0) @ truth) ** 2).sum()
    exact = (solver.step_size * spread / 100 / (2 * damping)).sqrt() / truth.norm()
    assert bound == pytest.approx(float(exact), rel=0.15)


def test_error_estimate_without_noise_bounds_what_is_left() -> None:
    """Batches equal to the whole: the error of the mean of iterates is a geometric sum, written out here."""
    damping, step_size, num_steps, averaged = 0.1, 0.5, 60, 20
    matrix = torch.diag(torch.tensor([0.0, 0.05, 1.0], dtype=torch.float64))
    operator = DenseOperator(matrix[None].repeat(3, 1, 1), is_psd=True) + damping * identity
    b = torch.eye(3, dtype=torch.float64)
    solver = Lissa(step_size, 1, num_steps, average_last=averaged, error_rtol=0.2)
    solution = solver.solve(operator, b, generator=torch.Generator().manual_seed(0))
    decays = 1 - step_size * (matrix.diagonal() + damping)
    powers = torch.arange(num_steps - averaged + 1, num_steps + 1).double()
    left = (decays[:, None] ** powers).mean(1)  # of the error at the start, in each eigenvector
    torch.testing.assert_close(solution.x.diagonal(), (1 - left) / (matrix.diagonal() + damping))
    assert solution.error is not None
    relative = left / (1 - left)
    assert bool((relative <= solution.error * 1.0001).all())
    assert float(solution.error[0]) == pytest.approx(1.5 * float(relative[0]), rel=0.05)  # the slowest
    assert solution.converged == bool((solution.error <= 0.2).all())
    assert not Lissa(step_size, 1, 15, average_last=5, error_rtol=0.2).solve(operator, b).converged


def test_averaging_lowers_the_residual(generator) -> None:
    operator = DenseOperator(heavy(), is_psd=True) + 0.1 * identity
    b = torch.randn(15, 3, generator=generator, dtype=torch.float64)
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    last = Lissa(0.03, 100, 2000).solve(operator, b, generator=seeds[0])
    averaged = Lissa(0.03, 100, 2000, average_last=1000).solve(operator, b, generator=seeds[1])
    assert bool((averaged.residual < 0.5 * last.residual).all())
    iterates: list[Tensor] = []
    Lissa(0.1, 20, 6, callback=lambda state: iterates.append(state.x)).solve(
        operator, b, generator=torch.Generator().manual_seed(0)
    )
    mean = Lissa(0.1, 20, 6, average_last=4).solve(operator, b, generator=torch.Generator().manual_seed(0)).x
    torch.testing.assert_close(mean, torch.stack(iterates[2:]).mean(0))
    refuses("average_last must be between 0 and num_steps = 6", Lissa, 0.1, 20, 6, average_last=7)


def test_constant_needs_directions_of_the_right_length() -> None:
    with pytest.raises(ValueError, match="acts on vectors of length 15"):
        measure_constant(DenseOperator(heavy(), is_psd=True), torch.ones(3, 1, dtype=torch.float64), trace=1.0)
