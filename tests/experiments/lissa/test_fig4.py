"""lissa-fig4 and lissa-thm1: traces and moments against dense matrices and enumerations, at smoke scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from experiments.lissa.fig4 import sampling_gap, slopes, token_gap
from experiments.lissa.thm1.error_bounds import (
    SecondMoments,
    bounds,
    condition_constant,
    condition_eigenvalue,
    sufficient_threshold,
)
from experiments.lissa.thm1.factored_problems import (
    FactoredProblem,
    ImportanceProblem,
    TrialOperator,
    lissa_errors,
    network_problem,
    rare_problem,
    signs_problem,
)


# --- lissa-fig4 end to end at smoke scale; the traces against dense matrices
def small_task(run, *, length: int | None) -> SimpleNamespace:
    torch.manual_seed(0)
    shape = (12,) if length is None else (12, length)
    model = nn.Linear(4, 3).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(2 * torch.randn_like(parameter))
    inputs = 2 * torch.randn(*shape, 4, dtype=torch.float64)
    if length is not None:
        inputs = inputs + 3 * torch.randn(12, 1, 4, dtype=torch.float64)  # tokens of a sequence are alike
    own = {"label": "linear", "is_language": length is not None, "key": {"model": "linear"}, "num_train": 12}
    own |= {"train": (inputs, torch.randint(3, shape)), "num_parameters": 15, "generator": run.generator}
    return SimpleNamespace(model=model, loss=nn.CrossEntropyLoss(), **own)


def matrices(task: SimpleNamespace) -> Tensor:
    """Gauss-Newton matrix of every single prediction, (N, P, P) or (N, T, P, P), from its definition."""
    inputs = task.train[0]
    probabilities = task.model(inputs).softmax(-1).detach()
    middle = torch.diag_embed(probabilities) - probabilities[..., :, None] * probabilities[..., None, :]
    eye = torch.eye(3, dtype=torch.float64)
    weight = torch.einsum("ab,...c->...abc", eye, inputs).flatten(-2)  # logits by the weight, (..., 3, 12)
    jacobian = torch.cat([weight, eye.expand(*inputs.shape[:-1], 3, 3)], dim=-1)
    return jacobian.mT @ middle @ jacobian


def gap(of_one: Tensor, batch_size: int) -> float:
    """tr(E G̃² - G²)/P for batches with replacement from (N, P, P)."""
    mean = of_one.mean(0)
    return float((of_one @ of_one).mean(0).trace() - (mean @ mean).trace()) / batch_size / len(mean)


@pytest.mark.parametrize(("length", "batch_size"), [(None, 5), (6, 1), (6, 5)])
def test_gap_is_that_of_dense_matrices(stub_run, length: int | None, batch_size: int) -> None:
    task = small_task(stub_run, length=length)
    of_one = matrices(task) if length is None else matrices(task).mean(1)
    found = sampling_gap(stub_run, task, batch_size=batch_size, num_realizations=600)
    assert abs(found["value"] - gap(of_one, batch_size)) < 4 * found["stderr"]
    assert found["stderr"] < 0.15 * found["value"]


def test_independent_tokens_vary_less_than_tokens_of_a_sequence(stub_run) -> None:
    task = small_task(stub_run, length=6)
    found = token_gap(stub_run, task, token_batch=3, num_realizations=600)
    single = gap(matrices(task).flatten(0, 1), 3)
    assert abs(found["value"] - single) < 4 * found["stderr"]
    assert gap(matrices(task).mean(1), 1) * 6 > 1.5 * 3 * single  # at equal numbers of tokens


def test_results_are_complete(smoke_result) -> None:
    folder: Path = smoke_result("lissa/fig4")
    table = read_table(folder, "table")
    counts = {"mlp-8-digits-200": 3, "opt-1-16-documentation-120": 4}
    assert table.groupby("task", sort=False).size().to_dict() == counts
    assert table[table.task == "opt-1-16-documentation-120"].batch_size.tolist() == [128, 256, 512, 2]  # tokens
    of_mlp = {"slope", "trace-mlp-8-digits-200", "directions-mlp-8-digits-200"}
    claims = {result.claim.id for result in load_claims(folder)}
    assert claims >= of_mlp | {"incoherence-opt-1-16-documentation-120"}


def made_up(slope: float, constant: float) -> pd.DataFrame:
    sizes = np.array([4.0, 16, 64, 256])
    left = constant * 10 * sizes**slope
    return pd.DataFrame(
        {
            "task": "a", "sampling": "examples", "batch_size": sizes, "unit": "images", "left": left,
            "left_stderr": 0.02 * left, "right": 10 / sizes, "right_stderr": 0.1 / sizes,
            "realizations": 300,
        }
    )  # fmt: skip


def test_slopes_are_least_squares() -> None:
    fitted = slopes(made_up(-1.0, 1.5)).iloc[0]
    assert fitted.slope == pytest.approx(-1, abs=1e-9)
    assert fitted.constant == pytest.approx(1.5)
    logs = np.log([4.0, 16, 64, 256])
    assert fitted.slope_stderr == pytest.approx(0.02 / math.sqrt(((logs - logs.mean()) ** 2).sum()))


# --- lissa-thm1: exact moments against enumeration of all batches, bounds, and the target at smoke scale
DAMPING, STEP_SIZE = 0.2, 0.3


@pytest.fixture
def problem() -> FactoredProblem:
    """Three examples of rank two, which do not commute with their mean."""
    factors = torch.tensor([[[1.0, 0.0], [0.5, 0.3]], [[0.2, 0.1], [1.5, 0.0]], [[-0.7, 0.4], [0.3, 0.2]]])
    return FactoredProblem("tiny", factors.double(), torch.tensor([1.0, -2.0], dtype=torch.float64))


def all_batches(problem: FactoredProblem) -> Tensor:
    """Return the curvature of each of the 9 equally likely batches of two, (9, P, P)."""
    each = problem.factors @ problem.factors.mT
    return torch.stack([(each[i] + each[j]) / 2 for i in range(3) for j in range(3)])


@pytest.mark.parametrize("start", [None, torch.tensor([3.0, 1.0], dtype=torch.float64)])
def test_second_moments_are_the_average_over_all_batches(problem: FactoredProblem, start: Tensor | None) -> None:
    found = SecondMoments(problem, DAMPING, step_size=STEP_SIZE).errors(2, 4, start=start)
    eye = torch.eye(2, dtype=torch.float64)
    damped = all_batches(problem) + DAMPING * eye
    solution = torch.linalg.solve(damped.mean(0), problem.gradient)
    paths = (torch.zeros(2, dtype=torch.float64) if start is None else start)[None]
    for step in range(5):
        assert float(found[step]) == pytest.approx(float((paths - solution).square().sum(1).mean()), rel=1e-11)
        moved = paths[:, None] - STEP_SIZE * (torch.einsum("bij,pj->pbi", damped, paths) - problem.gradient)
        paths = moved.flatten(0, 1)


def test_bounds_are_those_of_the_definitions(problem: FactoredProblem) -> None:
    batches = all_batches(problem)
    mean, eye = batches.mean(0), torch.eye(2, dtype=torch.float64)
    gap = (batches @ batches).mean(0) - mean @ mean
    solution = torch.linalg.solve(mean + DAMPING * eye, problem.gradient)
    found = bounds(problem, DAMPING, step_size=STEP_SIZE, batch_size=2)
    left = torch.linalg.matrix_power(eye - STEP_SIZE * (mean + DAMPING * eye), 2) + STEP_SIZE**2 * gap
    assert found.delta == pytest.approx(1 - float(torch.linalg.eigvalsh(left)[-1]), rel=1e-11)
    noise = ((mean - batches) @ solution).square().sum(1).mean()
    assert found.sampling_error == pytest.approx(float(noise), rel=1e-11)
    printed = STEP_SIZE**2 * float(mean.trace()) / 2 * float(problem.gradient @ solution)
    assert found.printed(10**6) == pytest.approx(printed, rel=1e-11)
    square = float(solution @ solution)
    assert found.theorem(0) == pytest.approx(3 * square + STEP_SIZE**2 * float(noise) / found.delta, rel=1e-11)
    constant = condition_constant(problem)
    worst = torch.linalg.eigvals(torch.linalg.solve(mean, 2 * gap)).real.max() / mean.trace()
    assert constant == pytest.approx(float(worst), rel=1e-9)


def test_thresholds_separate_convergence_from_divergence(problem: FactoredProblem) -> None:
    step_size = 1 / (problem.largest + 0.01)
    moments = SecondMoments(problem, 0.01, step_size=step_size)
    exact = moments.exact_threshold(rtol=1e-8)
    stationary = moments.stationary_error(1.05 * exact, rtol=1e-8)
    assert float(moments.errors(1.05 * exact, 3000)[-1]) == pytest.approx(stationary, rel=1e-3)
    assert float(moments.errors(0.95 * exact, 3000)[-1]) > 1e6
    assert moments.stationary_error(0.95 * exact) == math.inf
    limit = sufficient_threshold(problem, 0.01, step_size=step_size)
    assert limit > exact
    assert condition_eigenvalue(problem, 0.01, step_size=step_size, batch_size=limit) == pytest.approx(1)


def test_importance_makes_the_constant_one(problem: FactoredProblem) -> None:
    """Moments of one draw by enumeration; C by generalised eigenvalues; the threshold by the dense recursion."""
    weighted = ImportanceProblem(problem.name, problem.factors, problem.gradient)
    each = problem.factors @ problem.factors.mT
    q = each.diagonal(dim1=1, dim2=2).sum(1) / each.diagonal(dim1=1, dim2=2).sum()
    draws = each / (3 * q)[:, None, None]
    mean = (q[:, None, None] * draws).sum(0)
    torch.testing.assert_close(mean, weighted.dense)
    second = (q[:, None, None] * draws @ draws).sum(0)
    torch.testing.assert_close(weighted.sampling_gap, second - mean @ mean)
    root = torch.linalg.cholesky(mean)
    whitened = torch.linalg.solve(root, torch.linalg.solve(root, second - mean @ mean).T)
    expected = float(torch.linalg.eigvalsh(whitened)[-1] / mean.trace())
    assert condition_constant(weighted) == pytest.approx(expected)
    assert expected < 1
    moments = SecondMoments(weighted, DAMPING, step_size=STEP_SIZE)
    threshold = moments.exact_threshold(rtol=1e-8)
    contraction = torch.eye(2).double() - STEP_SIZE * (mean + DAMPING * torch.eye(2).double())
    noise = sum(qi * torch.kron(draw - mean, draw - mean) for qi, draw in zip(q, draws, strict=True))
    recursion = torch.kron(contraction, contraction) + STEP_SIZE**2 / threshold * noise
    assert float(torch.linalg.eigvals(recursion).abs().max()) == pytest.approx(1, abs=1e-5)


def test_network_problem_has_the_gauss_newton_matrix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = torch.randn(7, 3, dtype=torch.float64), torch.randint(3, (7,))
    size = sum(parameter.numel() for parameter in model.parameters())
    found = network_problem("net", model, data[0], torch.ones(size, dtype=torch.float64))
    dense = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data).to_dense()
    torch.testing.assert_close(found.dense, dense, rtol=1e-10, atol=1e-12)
    one = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (data[0][2:3], data[1][2:3])).to_dense()
    torch.testing.assert_close(found.factors[2] @ found.factors[2].T, one, rtol=1e-10, atol=1e-12)


def test_trials_of_lissa_agree_with_the_exact_moments(problem: FactoredProblem) -> None:
    shown = [1, 3, 8]
    settings = {"damping": DAMPING, "step_size": STEP_SIZE, "batch_size": 2, "shown": shown}
    errors = lissa_errors(problem, 6400, **settings, generator=torch.Generator().manual_seed(0))
    squares, projections = errors.square().sum(1), -(errors * problem.solution(DAMPING)[:, None]).sum(1)
    exact = SecondMoments(problem, DAMPING, step_size=STEP_SIZE).errors(2, 8)[shown]
    assert squares.shape == (3, 6400)
    assert float(((squares.mean(1) - exact) / (squares.std(1) / 80 + 1e-14)).abs().max()) < 4
    eye = torch.eye(2, dtype=torch.float64)
    contraction = eye - STEP_SIZE * (problem.dense + DAMPING * eye)
    first = problem.solution(DAMPING)
    for index, step in enumerate(shown):
        expected = first @ torch.linalg.matrix_power(contraction, step) @ first
        spread = projections[index].std() / 80 + 1e-14
        assert float((projections[index].mean() - expected).abs() / spread) < 4


def test_trials_have_batches_of_their_own(problem: FactoredProblem) -> None:
    batches = TrialOperator(problem, 5).sample(4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(batches.drawn.sum(0), torch.ones(5, dtype=torch.float64))
    each, vectors = problem.factors @ problem.factors.mT, torch.randn(2, 5, dtype=torch.float64)
    for k in range(5):
        matrix = (batches.drawn[:, k, None, None] * each).sum(0)
        torch.testing.assert_close((batches @ vectors)[:, k], matrix @ vectors[:, k])
    with pytest.raises(ValueError, match="5 batches were drawn"):
        batches @ vectors[:, :2]


def test_the_theorem_fails_from_beyond_the_solution() -> None:
    """One scalar recursion by hand: m <- (1 - x)² m + 2 η² s e u* + η² s u*², s = 0.1 · 0.9, x = η (0.1 + λ)."""
    case, damping, start = rare_problem(10), 1e-3, 4.0
    solution = 0.1 / 0.101
    mean, square, found = start - solution, (start - solution) ** 2, []
    for _ in range(40):
        square = 0.899**2 * square + 0.09 * (square + 2 * mean * solution + solution**2)
        mean *= 0.899
        found.append(square)
    own = bounds(case, damping, step_size=1.0, batch_size=1)
    from_start = torch.tensor([start], dtype=torch.float64)
    exact = SecondMoments(case, damping, step_size=1.0).errors(1, 40, start=from_start)
    assert exact[1:].tolist() == pytest.approx(found, rel=1e-11)
    first = (start - solution) ** 2
    ratios = [value / own.theorem(t, start_error=first) for t, value in enumerate(found, 1)]
    assert max(ratios) == pytest.approx(1.185, abs=0.005)
    assert all(value <= own.corrected(t, start_error=first) for t, value in enumerate(found, 1))


def test_bounds_say_nothing_where_no_delta_exists() -> None:
    case = signs_problem("power", 20, 100, torch.Generator().manual_seed(0))
    own = bounds(case, 0.01, step_size=1 / (case.largest + 0.01), batch_size=1)
    assert own.delta < 0
    assert math.isnan(own.theorem(5))
    assert math.isnan(own.corrected(5))


def test_verdicts_at_smoke_scale(smoke_result: Callable[[str], Path]) -> None:
    folder = smoke_result("lissa/thm1")
    verdicts = {result.claim.id: result.verdict for result in load_claims(folder)}
    hold = dict.fromkeys(("mean-bound", "second-moment-bound", "single-update", "batch-requirement"), "reproduced")
    fail = dict.fromkeys(("printed-bound", "printed-bound-uniform"), "not reproduced")
    assert (hold | fail | {"second-moment-bound-any-start": "refuted"}).items() <= verdicts.items()
