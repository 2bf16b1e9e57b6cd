"""Responses to leaving examples out: closed forms on ridge regression, Eq. 46 on an MLP, groups one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab.influence import ProximalBregmanObjective, ProximalNewton
from curvlab.influence import retraining as r
from curvlab.iterate import Checkpoint
from curvlab.solvers import Direct
from curvlab.training import shuffled_batches, train_ensemble
from tests.refusals import refuses, stopped

FP64 = torch.float64
L2, DAMPING = 0.05, 0.3
TO_THE_END = r.FullBatchLBFGS(gradient_norm=1e-10)


# ------------------------------------------------------------- ridge regression, all by hand
class Ridge:
    """1/N sum_i (xᵢᵀθ - tᵢ)² + l2/2 ‖θ‖² at some θ^s that is no optimum."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(12, 4, generator=generator, dtype=FP64)
        self.t = torch.randn(12, 1, generator=generator, dtype=FP64)
        self.base = torch.randn(4, generator=generator, dtype=FP64)
        self.model = nn.Linear(4, 1, bias=False).double()
        with torch.no_grad():
            self.model.weight.copy_(self.base)
        self.groups = [torch.tensor([3]), torch.tensor([7]), torch.tensor([0, 5, 11])]
        self.left_out = r.LeftOut(self.model, nn.MSELoss(), (self.x, self.t), self.groups, damping=DAMPING, l2=L2)
        self.gram = 2 / 12 * self.x.T @ self.x
        self.eye = torch.eye(4, dtype=FP64)

    def kept(self, group: Tensor) -> tuple[Tensor, Tensor]:
        keep = torch.ones(12, dtype=torch.bool)
        keep[group] = False
        return self.x[keep], self.t[keep, 0]

    def normal_equations(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and b with gradient Aθ - b of the cost without the group, still divided by 12."""
        x, t = self.kept(group)
        return 2 / 12 * x.T @ x + L2 * self.eye, 2 / 12 * x.T @ t

    def own_gradient(self, group: Tensor) -> Tensor:
        """Return 1/12 of the sum of the group's gradients at θ^s."""
        x, t = self.x[group], self.t[group, 0]
        return 2 / 12 * x.T @ (x @ self.base - t)


@pytest.fixture(scope="module")
def ridge() -> Ridge:
    return Ridge()


def closed_form(ridge: Ridge, name: str, group: Tensor) -> Tensor:
    a, b = ridge.normal_equations(group)
    if name in ("cold", "warm"):
        return torch.linalg.solve(a, b)
    if name == "proximal":
        return torch.linalg.solve(a + DAMPING * ridge.eye, b + DAMPING * ridge.base)
    if name == "proximal_bregman":  # gradient: gram u + (λ + l2) u - own gradient at θ^s + u
        x = ridge.x[group]
        curvature = ridge.gram + (DAMPING + L2) * ridge.eye - 2 / 12 * x.T @ x
        return ridge.base + torch.linalg.solve(curvature, ridge.own_gradient(group))
    return ridge.base + torch.linalg.solve(ridge.gram + (DAMPING + L2) * ridge.eye, ridge.own_gradient(group))


def computed(ridge: Ridge, name: str) -> Tensor:
    left_out = ridge.left_out
    if name == "cold":
        return r.cold_optimum(left_out, TO_THE_END, initial=torch.zeros(4))
    if name == "influence":
        return r.influence_estimate(left_out, Direct())[0]
    return FUNCTIONS[name](left_out, TO_THE_END)


FUNCTIONS: dict[str, Any] = {
    "cold": r.cold_optimum,
    "warm": r.warm_optimum,
    "proximal": r.proximal_warm_optimum,
    "proximal_bregman": r.proximal_bregman_warm_optimum,
    "linearised": r.linearised_proximal_bregman_warm_optimum,
}
NAMES = ["cold", "warm", "proximal", "proximal_bregman", "linearised", "influence"]


@pytest.mark.parametrize("name", NAMES)
def test_each_response_is_its_closed_form_on_ridge_regression(ridge: Ridge, name: str) -> None:
    expected = torch.stack([closed_form(ridge, name, group) for group in ridge.groups]) - ridge.base
    torch.testing.assert_close(computed(ridge, name), expected, rtol=1e-6, atol=1e-7)


def test_two_stage_is_the_difference_of_two_optima_on_ridge_regression(ridge: Ridge) -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    left_out = replace(ridge.left_out, groups=[*ridge.groups, nothing])
    warm = r.warm_optimum(left_out, TO_THE_END)
    full = closed_form(ridge, "warm", nothing)
    expected = torch.stack([closed_form(ridge, "warm", group) - full for group in ridge.groups])
    torch.testing.assert_close(r.two_stage_optimum(warm[:-1], warm[-1]), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_descent_on_full_batches_arrives_at_the_same_place(ridge: Ridge, optimizer: str) -> None:
    batches = [torch.arange(12)] * (100 if optimizer == "sgd" else 400)
    minimizer = r.SharedBatches(batches, lr=0.3 if optimizer == "sgd" else 0.01, optimizer=optimizer)
    found = r.proximal_bregman_warm_optimum(ridge.left_out, minimizer)
    expected = torch.stack([closed_form(ridge, "proximal_bregman", group) for group in ridge.groups]) - ridge.base
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_without_the_half_of_eq_39_the_minimiser_would_be_that_of_twice_the_matrix(ridge: Ridge) -> None:
    """The misprint is visible: (2 G + λ)⁻¹ is not what Eq. 46 says, and not what ours gives."""
    found = computed(ridge, "linearised")[0]
    doubled = torch.linalg.solve(2 * ridge.gram + (DAMPING + L2) * ridge.eye, ridge.own_gradient(ridge.groups[0]))
    assert (found - doubled).norm() > 0.1 * found.norm()


# ------------------------------------------------------------------------ networks
def network(kind: str = "classes", num_examples: int = 30) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    inputs = torch.randn(num_examples, 5).double()
    if kind == "classes":
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        return model.eval(), nn.CrossEntropyLoss(), (inputs, torch.randint(3, (num_examples,)))
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    return model.eval(), nn.MSELoss(), (inputs, torch.randn(num_examples, 2).double())


@pytest.mark.parametrize("kind", ["classes", "squares"])
def test_linearised_response_by_optimisation_is_the_influence_estimate(kind: str) -> None:
    """Eq. 46, on an MLP that has not been trained at all."""
    model, loss, data = network(kind)
    groups = [torch.tensor([k]) for k in range(5)] + [torch.arange(10, 16)]
    left_out = r.LeftOut(model, loss, data, groups, damping=5e-2, l2=1e-3)
    by_optimisation = r.linearised_proximal_bregman_warm_optimum(left_out, r.FullBatchLBFGS(gradient_norm=1e-10))
    estimate, solution = r.influence_estimate(left_out, Direct())
    assert solution.converged
    torch.testing.assert_close(by_optimisation, estimate, rtol=1e-5, atol=1e-8)


def test_proximal_bregman_response_is_that_of_newton() -> None:
    """An independent implementation of the same objective, scaled by ε = -1/N, minimised by Newton's method."""
    model, loss, data = network()
    points = torch.tensor([4, 9, 20])
    left_out = r.LeftOut(model, loss, data, list(points[:, None]), damping=0.5)
    found = r.proximal_bregman_warm_optimum(left_out, r.FullBatchLBFGS(gradient_norm=1e-9))
    epsilon = -1 / left_out.num_examples
    selected = (data[0][points], data[1][points])
    objective = ProximalBregmanObjective(model, loss, data, candidates=selected, damping=0.5, epsilon=epsilon)
    response = ProximalNewton(rtol=1e-7, curvature_dtype=FP64).minimize(objective)
    assert response.converged
    torch.testing.assert_close(found, epsilon * response.displacement.T, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
def test_first_order_change_of_the_proximal_optimum(curvature: str) -> None:
    """At a minimum of J + λ/2‖·‖² the Hessian estimate is the derivative of the minimiser; G is not."""
    model, loss, data = network("squares")
    start = r.LeftOut(model, loss, data, [torch.zeros(0, dtype=torch.long)], damping=1e-2)
    with torch.no_grad():  # to the optimum of the cost with L2: then θ^s is stationary
        moved = r.warm_optimum(replace(start, l2=0.1), r.FullBatchLBFGS(gradient_norm=1e-10))[0]
        torch.nn.utils.vector_to_parameters(start.base + moved, model.parameters())
    left_out = r.LeftOut(model, loss, data, [torch.tensor([2])], damping=1e-2, l2=0.1)
    exact = r.proximal_warm_optimum(left_out, r.FullBatchLBFGS(gradient_norm=1e-10))
    estimate, _ = r.influence_estimate(left_out, Direct(), curvature=curvature)
    error = float((estimate - exact).norm() / exact.norm())
    assert error < 0.2 if curvature == "hessian" else error > 0.2, error


def test_the_bregman_objective_has_no_lower_bound_where_outputs_grow_as_a_cube() -> None:
    """Three layers: the example's own term is linear in its outputs, the proximity term only a square."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(3)]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    data = (torch.ones(1, 1).double(), torch.zeros(1, 1).double())
    cost = r.ProximalBregmanCost(r.LeftOut(model, nn.MSELoss(), data, [torch.tensor([0])], damping=1.0))
    values = [float(cost(torch.full((1, 3), t).double(), torch.tensor([0]))[0][0]) for t in (0.0, 10.0, 100.0)]
    # (1 + t)³ outputs: divergence minus loss is -1 - 2 ((1 + t)³ - 1), the proximity term 3/2 t²
    expected = [-1 - 2 * ((1 + t) ** 3 - 1) + 1.5 * t**2 for t in (0.0, 10.0, 100.0)]
    assert values == pytest.approx(expected)
    assert values[2] < values[1] < values[0]


OBJECTIVES = [r.DownweightedCost, r.ProximalCost, r.ProximalBregmanCost, r.LinearisedProximalBregmanCost]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("group_size", [1, 15])
def test_batches_are_unbiased_and_gradients_are_derivatives(objective: Any, group_size: int) -> None:
    """The mean over all single-example batches is the whole; gradients against central differences of values."""
    model, loss, data = network(num_examples=20)
    groups = [torch.arange(group_size), torch.arange(group_size) + 5]
    cost = objective(r.LeftOut(model, loss, data, groups, damping=0.1, l2=0.01))
    generator = torch.Generator().manual_seed(3)
    u = 0.3 * torch.randn(2, len(cost.left_out.base), generator=generator, dtype=FP64)
    value, gradient = cost(u, torch.arange(20))
    singles = [cost(u, torch.tensor([i])) for i in range(20)]
    torch.testing.assert_close(torch.stack([v for v, _ in singles]).mean(0), value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.stack([g for _, g in singles]).mean(0), gradient, rtol=1e-9, atol=1e-12)
    direction = torch.randn(u.shape, generator=generator, dtype=FP64)
    ends = [cost(u + sign * 1e-5 * direction, torch.arange(20))[0] for sign in (1, -1)]
    torch.testing.assert_close((ends[0] - ends[1]) / 2e-5, (gradient * direction).sum(1), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES[:5])
def test_all_groups_at_once_are_the_groups_one_by_one(name: str) -> None:
    model, loss, data = network()
    groups = [torch.tensor([k]) for k in range(5)] + [torch.tensor([7, 8])]
    batches = shuffled_batches(30, batch_size=8, num_epochs=4, generator=torch.Generator().manual_seed(0))
    minimizer = r.SharedBatches(batches, lr=0.1, momentum=0.9)

    def response(groups: list[Tensor]) -> Tensor:
        left_out = r.LeftOut(model, loss, data, groups, damping=0.05, l2=0.01)
        if name == "cold":
            return r.cold_optimum(left_out, minimizer, initial=torch.zeros_like(left_out.base) + 0.1)
        return FUNCTIONS[name](left_out, minimizer)

    together = response(groups)
    for k, group in enumerate(groups):
        torch.testing.assert_close(together[k], response([group])[0], rtol=1e-5, atol=1e-10)


def test_single_precision_is_enough_for_displacements() -> None:
    """Responses are displacements: in float32 they keep their digits although θ^s + u does not show them."""
    model, loss, (inputs, targets) = network()
    batches = shuffled_batches(30, batch_size=8, num_epochs=10, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, FP64):
        left_out = r.LeftOut(model.to(dtype), loss, (inputs.to(dtype), targets), [torch.tensor([3])], damping=0.05)
        found.append(r.proximal_bregman_warm_optimum(left_out, r.SharedBatches(batches, lr=1e-3)).double())
    assert float(found[1].abs().max()) < 3e-3  # small beside the weights
    assert float((found[0] - found[1]).norm()) < 1e-4 * float(found[1].norm())


@pytest.mark.parametrize("name", NAMES[:5])
def test_a_retraining_goes_on_where_it_was_killed(tmp_path: Path, name: str) -> None:
    model, loss, data = network()
    left_out = r.LeftOut(model, loss, data, [torch.tensor([1]), torch.tensor([2])], damping=0.05)
    batches = shuffled_batches(30, batch_size=8, num_epochs=4, generator=torch.Generator().manual_seed(0))
    minimizer = r.SharedBatches(batches, lr=0.1, momentum=0.9)
    settings = {"initial": left_out.base} if name == "cold" else {}
    undisturbed = FUNCTIONS[name](left_out, minimizer, **settings)
    saving = replace(minimizer, checkpoint=Checkpoint(tmp_path / "unfinished.pt", every=4))
    stopped(9, lambda **at: FUNCTIONS[name](left_out, replace(saving, **at), **settings))
    with pytest.raises(ValueError, match=r"belongs to other work \(damping differ"):
        FUNCTIONS[name](replace(left_out, damping=1.0), saving, **settings)
    other = FUNCTIONS["warm" if name == "proximal" else "proximal"]
    refuses(r"belongs to other work \(objective differ", other, left_out, saving)
    if name == "cold":
        with pytest.raises(ValueError, match=r"belongs to other work \(origin differ"):
            r.cold_optimum(left_out, saving, initial=left_out.base + 0.1)
    steps: list[int] = []
    remember = replace(saving, callback=lambda state: steps.append(state.num_steps))
    found = FUNCTIONS[name](left_out, remember, **settings)
    assert torch.equal(found, undisturbed)
    assert steps[0] == 9  # eight were kept


def test_warm_optimum_is_what_train_ensemble_gives() -> None:
    model, loss, data = network()
    left_out = r.LeftOut(model, loss, data, [torch.tensor([1]), torch.tensor([2])], damping=1.0, l2=0.01)
    batches = shuffled_batches(30, batch_size=8, num_epochs=4, generator=torch.Generator().manual_seed(0))
    found = r.warm_optimum(left_out, r.SharedBatches(batches, lr=0.1, momentum=0.5))
    settings = {"num_epochs": 4, "batch_size": 8, "lr": 0.1, "momentum": 0.5, "weight_decay": 0.01, "generator": 0}
    expected = train_ensemble(model, loss, data, example_weights=left_out.weights, batches=batches, **settings)
    torch.testing.assert_close(left_out.base + found, expected.parameters, rtol=1e-10, atol=1e-12)


def test_gaps_of_a_linear_model_are_norms_of_the_inputs_times_the_displacement(ridge: Ridge) -> None:
    generator = torch.Generator().manual_seed(1)
    first, second, third = (torch.randn(2, 4, generator=generator, dtype=FP64) for _ in range(3))
    found = r.output_gaps(ridge.model, (ridge.x, ridge.t), {"a": first, "b": second, "c": third}, batch_size=5)
    assert list(found) == ["a-b", "b-c"]
    expected = ((first - second) @ ridge.x.T).norm(dim=1)
    torch.testing.assert_close(found["a-b"].total, expected)
    torch.testing.assert_close(found["a-b"].per_example, expected / 12**0.5)


# ------------------------------------------------------------- L-BFGS for many groups, on quadratics
class Quadratic:
    """1/2 (x - minimum)ᵀ diag (x - minimum) for each of K rows; counts evaluations, and dies at one of them."""

    depends_on: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, minimum: Tensor, diagonal: Tensor, *, dies_at: int = 0) -> None:
        self.minimum, self.diagonal, self.dies_at, self.count = minimum, diagonal, dies_at, 0

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        if self.count == self.dies_at:
            raise KeyboardInterrupt
        gradient = self.diagonal * (displacement - self.minimum)
        return ((displacement - self.minimum) * gradient).sum(1) / 2, gradient


def test_many_small_components_are_one_large_norm() -> None:
    """At the start no component is above a tenth of the norm, and the norm is twice what is asked for."""
    norm = 1e-8
    objective = Quadratic(torch.full((20, 20), 0.99 * norm / 10, dtype=FP64), torch.ones(20))
    start = torch.zeros(20, 20, dtype=FP64)
    assert float(objective(start, start)[1].norm()) > 1.9 * norm
    found = r.FullBatchLBFGS(gradient_norm=norm)(objective, start, 1)
    assert float(objective(found, start)[1].norm()) <= norm


@pytest.mark.parametrize("share", [0.7, 0.97])
def test_a_killed_search_goes_on_to_the_same_minimum(tmp_path: Path, share: float) -> None:
    minimum = torch.randn(3, 80, generator=torch.Generator().manual_seed(0), dtype=FP64)
    diagonal = torch.logspace(-1, 1, 80, dtype=FP64)
    whole = Quadratic(minimum, diagonal)
    expected = r.FullBatchLBFGS(gradient_norm=1e-8)(whole, 0 * minimum, 1)
    torch.testing.assert_close(expected, minimum, rtol=0, atol=1e-7)
    kept = r.FullBatchLBFGS(gradient_norm=1e-8, checkpoint=Checkpoint(tmp_path / "search", every=1))
    dying = Quadratic(minimum, diagonal, dies_at=int(share * whole.count))
    with pytest.raises(KeyboardInterrupt):
        kept(dying, 0 * minimum, 1)
    again = Quadratic(minimum, diagonal)
    refuses(r"belongs to other work \(start differs?\)", kept, again, 0 * minimum + 1, 1)
    assert torch.equal(kept(again, 0 * minimum, 1), expected)
    # What is repeated is at most a step: 20 iterations of up to 25 evaluations, and the look before it.
    assert again.count <= whole.count - dying.count + 27
    assert dying.count > 27


# ------------------------------------------------------------------------ refusals
def test_points_curvatures_responses_and_steps_that_do_not_fit_are_refused(ridge: Ridge) -> None:
    with pytest.raises(ValueError, match=r"indices from 0 to 29, got shape \(1,\) with values up to 30"):
        r.LeftOut(*network(), groups=[torch.tensor([30])], damping=0.1)
    with pytest.raises(ValueError, match="unknown curvature 'fisher': choose gauss_newton or hessian"):
        r.influence_estimate(ridge.left_out, Direct(), curvature="fisher")
    with pytest.raises(ValueError, match="need two or more responses of one number of groups, got 1"):
        r.output_gaps(ridge.model, (ridge.x, ridge.t), {"a": torch.zeros(2, 4)})
    with pytest.raises(ArithmeticError, match=r"L-BFGS ended at a gradient norm of .*, not 1e-14: allow more"):
        r.warm_optimum(ridge.left_out, r.FullBatchLBFGS(gradient_norm=1e-14, max_steps=1))
