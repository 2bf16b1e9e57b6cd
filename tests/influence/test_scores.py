from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from curvlab.influence import (
    Influence,
    ProximalNewton,
    ProximalSGD,
    agreement,
    directional_derivatives,
    influence,
    influence_scores,
    loss_response,
    per_example_gradients,
    proximal_bregman_response,
)
from curvlab.solvers import ConjugateGradient, Direct, Lissa, default_solver
from curvlab.training import RunLength, train
from tests.influence.gradients import gradient_rows, ridge
from tests.refusals import refuses

DAMPING = 0.1


def of(problem, **settings) -> Influence:
    settings = ({} if "run" in settings else {"damping": DAMPING}) | settings
    return influence(problem.model, problem.loss, problem.train, problem.test, **settings)


def closed_form(problem, points=slice(None)):
    """-∇l(test)ᵀ (G + damping)⁻¹ ∇l(z) and the displacement behind it, from hand-derived matrices."""
    damped = problem.gram + DAMPING * torch.eye(len(problem.gram), dtype=torch.float64)
    displacement = -torch.linalg.solve(damped, problem.train_gradients[points].T)
    return problem.test_gradients @ displacement, displacement


@pytest.mark.parametrize("solver", [Direct(), ConjugateGradient(rtol=1e-10)], ids=["direct", "cg"])
@pytest.mark.parametrize("num_points", [3, 12], ids=["solved for points", "solved for test"])
def test_scores_match_closed_form(least_squares, solver, num_points) -> None:
    result = of(least_squares, points=range(num_points), solver=solver)
    expected, _ = closed_form(least_squares, slice(num_points))
    torch.testing.assert_close(result.scores, expected, rtol=1e-8, atol=1e-10)
    assert result.solved_for == ("points" if num_points <= 7 else "test")
    assert result.solution.residual.max() < 1e-9


def test_direct_cg_lissa_and_proximal_response_agree(least_squares, generator) -> None:
    """The acceptance test of the whole chain: five routes, one number, to 1e-6."""
    x, y = least_squares.train
    # Every example twice the same: a "batch" is then the full data, and LiSSA deterministic.
    one = (x[:1].repeat(4, 1), y[:1].repeat(4, 1))
    points = (x[:3], y[:3])
    model, loss, test = least_squares.model, least_squares.loss, least_squares.test
    gram = 2 / (1 * 3) * torch.kron(torch.eye(3, dtype=torch.float64), x[:1].T @ x[:1])
    damped = gram + DAMPING * torch.eye(15, dtype=torch.float64)
    displacement = -torch.linalg.solve(damped, least_squares.train_gradients[:3].T)
    expected = least_squares.test_gradients @ displacement
    step_size = 1 / (float(torch.linalg.eigvalsh(gram).max()) + DAMPING)
    lissa = Lissa(step_size=step_size, batch_size=2, num_steps=450)
    for solver in (Direct(), ConjugateGradient(rtol=1e-9), lissa):
        settings = {"candidates": points, "damping": DAMPING, "solver": solver, "generator": generator}
        scores = influence_scores(model, loss, one, test, **settings)
        torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-8)
    for optimizer in (ProximalNewton(rtol=1e-7), ProximalSGD(step_size=step_size, batch_size=2, num_steps=450)):
        settings = {"candidates": points, "damping": DAMPING, "optimizer": optimizer, "generator": generator}
        response = proximal_bregman_response(model, loss, one, epsilon=1e-8, **settings)
        torch.testing.assert_close(response, displacement, rtol=1e-6, atol=1e-6)
        changes = loss_response(model, loss, test, response, epsilon=1e-8)
        torch.testing.assert_close(changes, expected, rtol=1e-5, atol=1e-5)


def test_lissa_on_sampled_batches_approaches_closed_form(least_squares, generator) -> None:
    expected, _ = closed_form(least_squares, slice(3))
    largest = float(torch.linalg.eigvalsh(least_squares.gram).max()) + DAMPING
    lissa = Lissa(step_size=0.1 / largest, batch_size=256, num_steps=800)
    scores = of(least_squares, points=torch.arange(3), solver=lissa, generator=generator).scores
    assert (scores - expected).norm() / expected.norm() < 0.05


def test_measurement_replaces_the_test_loss(least_squares) -> None:
    """A measurement linear in the outputs has a gradient that is known by hand: sum over outputs of x."""
    result = of(least_squares, solver=Direct(), measurement=lambda outputs, targets: outputs.sum(1)).scores
    _, displacement = closed_form(least_squares)
    gradients = least_squares.test[0].repeat(1, 3)
    torch.testing.assert_close(result, gradients @ displacement, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("net", ["mlp", "convolution"])
def test_example_derivatives_match_autograd(net, generator) -> None:
    torch.manual_seed(0)
    if net == "mlp":
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    else:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()
    x = torch.randn(5, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (5,), generator=generator)
    loss = nn.CrossEntropyLoss()
    expected = gradient_rows(model, loss, (x, y))
    torch.testing.assert_close(per_example_gradients(model, loss, (x, y), batch_size=2), expected)
    directions = torch.randn(expected.shape[1], 4, generator=generator, dtype=torch.float64)
    along = directional_derivatives(model, loss, (x, y), directions, batch_size=2)
    torch.testing.assert_close(along, expected @ directions)
    assert all(p.grad is None for p in model.parameters())


def test_sequences_are_averaged_over_their_own_tokens(generator) -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7)).double()
    tokens = torch.randint(7, (2, 4), generator=generator)
    labels = torch.randint(7, (2, 4), generator=generator)
    labels[0, :3] = -100
    gradients = per_example_gradients(model, nn.CrossEntropyLoss(), (tokens, labels))
    logits = model(tokens[:1])[0, 3:]
    expected = torch.autograd.grad(nn.functional.cross_entropy(logits, labels[0, 3:]), list(model.parameters()))
    torch.testing.assert_close(gradients[0], torch.cat([g.flatten() for g in expected]))


def test_default_solver_needs_no_settings(least_squares) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train, least_squares.test)
    result = influence(*arguments, damping=DAMPING)
    expected, _ = closed_form(least_squares)
    assert result.solution.converged
    assert float(result.solution.residual.max()) <= 1e-2
    assert float((result.scores - expected).norm() / expected.norm()) < 0.1
    assert torch.equal(influence_scores(*arguments, damping=DAMPING), result.scores)
    closer = influence(*arguments, damping=DAMPING, rtol=1e-6)
    assert float(closer.solution.residual.max()) <= 1e-6
    assert torch.equal(influence_scores(*arguments, damping=DAMPING, rtol=1e-6), closer.scores)
    assert float((closer.scores - expected).norm() / expected.norm()) < 1e-4
    refuses("give it to the solver", influence, *arguments, damping=DAMPING, rtol=1e-6, solver=Direct())


def test_default_solver_finds_the_few_examples_that_hold_the_curvature(generator: torch.Generator) -> None:
    """A network that is sure of nearly all of its points; products of the default solver without that look."""
    inputs = torch.randn(300, 8, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    with torch.no_grad():
        model[2].weight.mul_(30)
    loss, train, test = nn.CrossEntropyLoss(), (inputs, model(inputs).argmax(1)), (inputs[:4], torch.arange(4) % 3)
    settings = {"damping": 1e-4, "rtol": 1e-4}
    found = influence(model, loss, train, test, **settings)
    plain = default_solver(363, 4, rtol=1e-4)
    without = influence(model, loss, train, test, damping=1e-4, solver=plain)
    assert found.solution.converged
    assert found.solution.num_matvecs < 0.7 * without.solution.num_matvecs
    exact = influence(model, loss, train, test, damping=1e-4, solver=Direct()).scores
    assert float((found.scores - exact).norm() / exact.norm()) < 1e-3


def test_unconverged_scores_warn_with_their_residual(least_squares) -> None:
    with pytest.warns(UserWarning, match="largest relative residual .* Allow more steps"):
        of(least_squares, damping=1e-6, solver=ConjugateGradient(rtol=1e-12, max_steps=1))


def test_measurement_of_wrong_shape_is_refused(least_squares) -> None:
    with pytest.raises(ValueError, match=r"one number for each example, shape \(7,\)"):
        of(least_squares, solver=Direct(), measurement=lambda outputs, targets: outputs)


# ------------------------------------------------------------------------- damping by the run's length
def test_a_run_sets_the_damping(least_squares, generator) -> None:
    """Nothing but what `train` returned: damping = weight decay + 1 / time."""
    arguments = (least_squares.model, least_squares.loss, least_squares.train, least_squares.test)
    history = train(
        least_squares.model,
        least_squares.loss,
        least_squares.train,
        num_epochs=3,
        batch_size=4,
        lr=0.01,
        momentum=0.5,
        weight_decay=0.2,
        generator=generator,
    )
    by_hand = influence(*arguments, damping=0.2 + 1 / RunLength.of(history).time)
    assert torch.equal(influence(*arguments, run=history).scores, by_hand.scores)
    own_loop = RunLength.constant(0.01, 9, momentum=0.5, weight_decay=0.2)
    assert torch.equal(influence_scores(*arguments, run=own_loop), by_hand.scores)


def test_damping_run_and_filter_exclude_each_other(least_squares) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train, least_squares.test)
    run = RunLength.constant(0.1, 10)
    refuses("give either damping, or the run that trained the model", influence, *arguments)
    refuses("give either damping, or the run", influence, *arguments, damping=0.1, run=run)
    refuses("filtered=True needs the run whose filter it is", influence, *arguments, damping=0.1, filtered=True)
    with pytest.raises(ValueError, match="filtered=True has a solver of its own"):
        influence(*arguments, run=run, filtered=True, solver=Direct())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_points", [3, 12], ids=["solved for points", "solved for test"])
def test_class_weights_are_those_of_the_training_loss(reduction: str, num_points: int, generator) -> None:
    """Of a sum an example's term is w_y times its cross-entropy; of a mean that, over the mean weight."""
    weights = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0, 1, 1, 2, 0, 0, 0, 2, 1])
    model = nn.Linear(4, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=generator, dtype=torch.float64))
    p = (x @ model.weight.T).softmax(1).detach()
    own = weights[y] / (weights[y].mean() if reduction == "mean" else 1)
    residuals = p - nn.functional.one_hot(y, 3)
    gradients = (own[:, None, None] * residuals[:, :, None] * x[:, None]).reshape(12, 12)
    curvature = torch.zeros(12, 12, dtype=torch.float64)
    for n in range(12):
        outputs = p[n].diag() - p[n][:, None] * p[n]
        curvature += own[n] * torch.kron(outputs, torch.outer(x[n], x[n])) / (12 if reduction == "mean" else 1)
    inverse = torch.linalg.inv(curvature + 0.1 * torch.eye(12, dtype=torch.float64))
    loss, settings = nn.CrossEntropyLoss(weight=weights, reduction=reduction), {"damping": 0.1, "solver": Direct()}
    found = influence_scores(model, loss, (x, y), (x[:5], y[:5]), points=range(num_points), **settings)
    torch.testing.assert_close(found, -gradients[:5] @ inverse @ gradients[:num_points].T, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------- weights of training examples
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.0, 1.5, 0.7, 0.0, 4.0, 1.0], dtype=torch.float64)


@pytest.fixture
def data(generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def draw(count: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.randn(count, k, generator=generator, dtype=torch.float64) for k in (4, 1))  # type: ignore[return-value]

    return draw(12), draw(5)


@pytest.mark.parametrize("solver", [Direct(), None], ids=["direct", "default"])
@pytest.mark.parametrize("num_points", [3, 12], ids=["solved for points", "solved for test"])
def test_scores_are_the_derivative_of_refitted_weighted_ridge_regression(data, solver, num_points) -> None:
    (x, y), test = data
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(ridge(x, y[:, 0], WEIGHTS, DAMPING)[None])
    settings = {"damping": DAMPING, "solver": solver, "rtol": None if solver else 1e-10, "weights": WEIGHTS}
    found = influence(model, nn.MSELoss(), (x, y), test, points=range(num_points), **settings)

    def test_losses(weights: Tensor) -> Tensor:
        return (test[1][:, 0] - test[0] @ ridge(x, y[:, 0], weights, DAMPING)).square()

    step = 1e-5
    for point in range(num_points):
        change = torch.zeros(12, dtype=torch.float64)
        change[point] = 12 * step  # a weight of `step` on l(z) itself, beside the mean over 12
        slope = (test_losses(WEIGHTS + change) - test_losses(WEIGHTS - change)) / (2 * step)
        torch.testing.assert_close(found.scores[:, point], slope, rtol=1e-6, atol=1e-8)


# ----------------------------------------------------------------------- two sets of scores
@pytest.fixture
def scores(generator):
    return torch.randn(200, generator=generator, dtype=torch.float64)


def test_pearson_and_slope_match_scipy(scores, generator) -> None:
    y = 0.7 * scores + 0.3 * torch.randn(200, generator=generator, dtype=torch.float64) + 2.0
    result = agreement(scores, y, scale=1.0)
    expected = stats.linregress(scores.numpy(), y.numpy())
    assert result.pearson == pytest.approx(expected.rvalue)
    assert result.slope == pytest.approx(expected.slope)
    assert result.case == "agree"


def test_the_relative_error_is_over_the_first_scores() -> None:
    x, y = torch.tensor([3.0, -4.0]), torch.tensor([3.0, 1e8])
    assert agreement(x, y, scale=1.0).relative_error == pytest.approx((1e8 + 4) / 5)
    assert agreement(y, x, scale=1.0).relative_error == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("factor", "scale", "case"),
    [(1.0, 1.0, "agree"), (3.0, 1.0, "apart"), (1.0, 100.0, "both near zero"), (-1.0, 1.0, "apart")],
)
def test_the_three_cases(scores, factor, scale, case) -> None:
    assert agreement(scores, factor * scores, scale=scale).case == case


def test_overflow_is_apart_not_an_error_but_lengths_must_agree(scores) -> None:
    y = scores.clone()
    y[3] = torch.inf
    assert agreement(scores, y, scale=1.0).case == "apart"
    refuses("two vectors of one length", agreement, scores, scores[:-1], scale=1.0)
