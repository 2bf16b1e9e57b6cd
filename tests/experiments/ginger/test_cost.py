"""ginger-cost: errors and recursions against dense ones, constants by hand, and the target at smoke scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import HessianOperator
from curvlab.lab import Computed
from curvlab.lab.claims import load_claims
from curvlab.optim import Ginger
from experiments.ginger.cost import TARGET, stream
from experiments.ginger.cost.exactness import algorithm_1, kept_inverse, precision_errors
from experiments.ginger.cost.matrices import approximation_errors, ginger_of, inverse_of, update
from experiments.ginger.cost.operations import gradient_flops, own_flops, polynomial_fit
from experiments.ginger.cost.stream import Stream, coordinates
from experiments.ginger.cost.theory import Path as FollowedPath
from experiments.ginger.cost.theory import SoftmaxRegression, follow, lemma_2, theorem_1
from tests.optim.dense_curvature import moving_average, printed_algorithm, quasi_natural_inverse


def vectors(count: int, size: int, seed: int = 0) -> np.ndarray:
    """Return Gaussians with a common direction, as gradients have."""
    random = np.random.default_rng(seed)
    return random.standard_normal((count, size)) * np.geomspace(2, 0.1, size) + 0.3


def test_coordinates_keep_inner_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 7)
    for count, size in ((5, 40), (12, 6)):
        given = torch.tensor(vectors(count, size))
        found = coordinates(given)
        assert found.shape == (count, min(count, size))
        torch.testing.assert_close(found @ found.T, given @ given.T, rtol=1e-12, atol=1e-12)


def dense_ginger(given: np.ndarray, decay: float, rank: int) -> np.ndarray:
    matrix = np.zeros((given.shape[1],) * 2)
    for d in given:
        values, basis = np.linalg.eigh(decay * matrix + (1 - decay) * np.outer(d, d))
        matrix = (basis[:, -rank:] * values[-rank:]) @ basis[:, -rank:].T
    return matrix


def test_errors_in_coordinates_are_those_of_all_parameters() -> None:
    size, decay, rank, checkpoints = 40, 0.9, 3, (6, 11)
    given, losses = vectors(11, size), vectors(2, size, seed=1)
    small = coordinates(torch.tensor(np.concatenate([given, losses])))
    recorded = Stream("", 0, small[:11], checkpoints, small[11:], size, {})
    rows = approximation_errors(recorded, decay=decay, rank=rank, dampings=[1e-2])
    found = {(row["optimizer"], row["target"]): row for row in rows}
    expected: dict[tuple[str, str], list[np.ndarray]] = {}
    eye = np.eye(size)
    for step, g in zip(checkpoints, losses, strict=True):
        seen, average = given[:step], moving_average(given[:step], decay)
        qng = np.linalg.inv(quasi_natural_inverse(seen, decay=decay, rank=rank)[0])
        ginger, shift = dense_ginger(seen, decay, rank), decay**rank
        for key, target, own in (
            (("Ginger", "common"), shift * eye + average, shift * eye + ginger),
            (("QNG", "common"), shift * eye + average, qng),
            (("Ginger", "own"), 1e-2 * eye + average, 1e-2 * eye + ginger),
            (("QNG", "own"), decay**step * eye + average, qng),
        ):
            exact, inverse = np.linalg.inv(target), np.linalg.inv(own)
            errors = [
                np.linalg.norm(exact - inverse, 2) / np.linalg.norm(exact, 2),
                np.linalg.norm((exact - inverse) @ g) / np.linalg.norm(exact @ g),
            ]
            expected.setdefault(key, []).append(np.array(errors))
    for key, errors in expected.items():
        own = [found[key][name] for name in ("inverse_error", "direction_error")]
        np.testing.assert_allclose(own, np.mean(errors, axis=0), rtol=1e-8)
    assert found["best", "common"]["matrix_error"] < found["Ginger", "common"]["matrix_error"]


def test_checkpoints_before_the_rank_are_refused() -> None:
    recorded = Stream("", 0, torch.eye(4, dtype=torch.float64), (2,), torch.ones(1, 4), 4, {})
    with pytest.raises(ValueError, match=r"first checkpoint is 2: raise stream\.checkpoints"):
        approximation_errors(recorded, decay=0.9, rank=3, dampings=[])


def test_algorithm_1_letter_by_letter() -> None:
    given, settings = vectors(6, 9), {"decay": 0.9, "damping": 1e-2, "rank": 4}
    printed = printed_algorithm(given, **settings)
    for found, expected in zip(algorithm_1(torch.tensor(given), **settings), printed, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_algorithm_1_as_it_is_mended_gives_the_inverse() -> None:
    given, settings = vectors(20, 30), {"decay": 0.9, "damping": 0.5, "rank": 20}
    exact = np.linalg.inv(0.5 * np.eye(30) + moving_average(given, 0.9))
    found = (printed_algorithm(given, **settings, mended=mended)[-1] for mended in (False, True))
    errors = [np.linalg.norm(each - exact, 2) / np.linalg.norm(exact, 2) for each in found]
    assert errors[1] < 1e-12 < 0.1 < errors[0]


def test_keeping_the_inverse_is_keeping_the_matrix_but_for_rounding() -> None:
    given, settings = torch.tensor(vectors(12, 20)), {"decay": 0.9, "damping": 1e-2, "rank": 4}
    ginger = ginger_of(20, **settings)
    for d, (basis, kappa) in zip(given, kept_inverse(given, **settings), strict=True):
        update(ginger, d)
        kept = torch.eye(20, dtype=torch.float64) / 1e-2 - (basis * kappa) @ basis.T
        torch.testing.assert_close(kept, inverse_of(ginger), rtol=1e-8, atol=1e-8)
    errors = precision_errors(given, given[0], decay=0.9, damping=1e-3, rank=4)
    assert errors["matrix"] < 1e-5 < errors["inverse"]


# Lemma 2 and Theorem 1


@pytest.fixture
def problem() -> SoftmaxRegression:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    targets = nn.functional.one_hot(torch.randint(4, (7,), generator=generator), 4).double()
    return SoftmaxRegression(torch.cat([inputs, torch.ones(7, 1, dtype=torch.float64)], 1), targets)


def loss_of(problem: SoftmaxRegression, weights: Tensor, examples: slice = slice(None)) -> Tensor:
    return nn.functional.cross_entropy(problem.inputs[examples] @ weights.T, problem.targets[examples].argmax(1))


def test_constants_bound_curvature_and_gradients(problem: SoftmaxRegression) -> None:
    model = nn.Linear(4, 4, bias=False).double()
    data = problem.inputs, problem.targets.argmax(1)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        weights = 2 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
        model.weight.data = weights
        hessian = HessianOperator(model, nn.CrossEntropyLoss(), data).to_dense()
        assert float(torch.linalg.eigvalsh(hessian)[-1]) <= problem.lipschitz
        residuals = problem.residuals(weights)
        squares = (residuals.square().sum(1) * problem.inputs.square().sum(1)).mean()
        assert float(squares) <= problem.squared_gradient
        weights.requires_grad_(True)
        torch.testing.assert_close(problem.value(weights), loss_of(problem, weights))
        (gradient,) = torch.autograd.grad(loss_of(problem, weights), weights)
        torch.testing.assert_close(problem.gradient(weights), gradient)


def test_both_sides_of_lemma_2_are_averages_over_the_examples(problem: SoftmaxRegression) -> None:
    weights = nn.Parameter(0.5 * torch.ones(4, 4, dtype=torch.float64))
    optimizer = Ginger([weights], 0.3, rank=2, decay=0.9, damping=0.5)
    for d in vectors(5, 16):
        weights.grad = torch.tensor(d).view(4, 4)
        optimizer.update_curvature()
    with torch.no_grad():
        found = lemma_2(problem, weights, optimizer)
    inverse = inverse_dense(optimizer)
    moved, steps = [], []
    for n in range(7):
        (gradient,) = torch.autograd.grad(loss_of(problem, weights, slice(n, n + 1)), weights)
        step = inverse @ gradient.flatten()
        moved.append(float(loss_of(problem, weights.detach() - 0.3 * step.view(4, 4))))
        steps.append(float(step @ step))
    full = float(problem.gradient(weights.detach()).square().sum())
    assert found["left"] == pytest.approx(0.3 * float(torch.linalg.eigvalsh(inverse)[0]) * full)
    assert found["decrease"] == pytest.approx(float(loss_of(problem, weights).detach()) - np.mean(moved))
    factor = problem.lipschitz / 2 * 0.3**2
    assert found["moved"] == pytest.approx(factor * np.mean(steps))
    assert found["noise"] == pytest.approx(factor * problem.squared_gradient / 0.5**2)
    assert found["ratio"] == pytest.approx(found["left"] / (found["decrease"] + found["noise"]))


def inverse_dense(optimizer: Ginger) -> Tensor:
    return torch.stack([optimizer.inverse_product(e) for e in torch.eye(16, dtype=torch.float64)], 1)


def test_a_followed_path_and_its_bound(problem: SoftmaxRegression) -> None:
    settings = {"rank": 2, "decay": 0.9, "damping": 0.5}
    settings |= {"lr": 1.0, "num_steps": 20, "checkpoints": [0, 7]}
    path = follow(problem, **settings, generator=torch.Generator().manual_seed(0))
    assert float(path.losses[0]) == pytest.approx(np.log(4))
    assert path.rates.tolist() == pytest.approx([1 / (t + 1) for t in range(20)])
    assert [row["t"] for row in path.descents] == [0, 7]
    # By hand: two steps, L = M_g² = 1 would make the noise 1/2 / 0.25 (1 + 1/4).
    made_up = FollowedPath(
        losses=torch.tensor([3.0, 2.0, 1.5]),
        squared_gradients=torch.tensor([4.0, 1.0]),
        least_eigenvalues=torch.tensor([0.5, 1.5]),
        rates=torch.tensor([1.0, 0.5]),
        descents=[],
    )
    (row,) = theorem_1(problem, made_up, 0.5, [2])
    noise = 0.5 / 0.25 * 1.25 * problem.lipschitz * problem.squared_gradient
    assert row["bound"] == pytest.approx((1.5 + noise) / 1.5)
    assert (row["squared_gradient"], row["scaled"]) == (1.0, 1.5)


# Cost


def test_products_of_resnet18_by_hand() -> None:
    found = gradient_flops("ResNet-18", 2)
    products = 3 * 64 * 9 * 32**2 + 4 * 64 * 64 * 9 * 32**2 + 512 * 100
    for width, side in ((128, 16), (256, 8), (512, 4)):
        products += (width // 2 * width * 9 + 3 * width * width * 9 + width // 2 * width) * side**2
    assert found["forward"] == 2 * 2 * products
    first = 3 * 64 * 9 * 32**2  # no gradient with respect to the images
    assert found["backward"] == 2 * 2 * (2 * products - first)
    assert found["num_parameters"] == 11_220_132


@pytest.mark.parametrize("rank", [2, 12])
def test_own_products_of_the_optimizers(rank: int) -> None:
    # QNG: five products with the rows. Ginger: eight, and BBᵀ in one of max(τ, 8) updates.
    assert own_flops("QNG", rank)[1] == pytest.approx(10 * rank, rel=1e-3)
    assert own_flops("Ginger", rank)[1] == pytest.approx(16 * rank + 2 * rank**2 / max(rank, 8), rel=1e-3)


def test_a_fit_finds_its_polynomial() -> None:
    x = np.array([1.0, 2, 4, 8, 16])
    found = polynomial_fit(x, 3 + 2 * x + 0.5 * x**2, 2)
    names = ("intercept", "linear", "square", "r_squared")
    assert [found[name] for name in names] == pytest.approx([3, 2, 0.5, 1])
    assert found["share"] == pytest.approx(128 / 163)
    straight = polynomial_fit(x, np.array([1.0, 1, 1, 1, 2]), 1)
    assert straight["r_squared"] < 0.9
    assert np.isnan(straight["square"])


# The target

EXACT = {
    "reproduced": "moving-average cut-optimal qng-moving-average observation-1 observation-1-halved lemma-2 "
    "lemma-1-largest lemma-1-smallest semi-orthogonal theorem-1-bound flops-to-adam flops-linear-in-rank "
    "memory-linear-in-parameters",
    "refuted": "algorithm-1",
    "not reproduced": "inverse-more-accurate flops-per-step flops-of-networks",
    "direction only": "flops-own-forward",
    "out of reach": "printed-beta",
}


@pytest.fixture(scope="module")
def folder(run_smoke) -> Path:
    return run_smoke("ginger/cost")


def test_target_at_smoke_scale(folder: Path, results_of) -> None:
    verdicts = {result.claim.id: result.verdict for result in load_claims(folder)}
    assert {name: word for word, names in EXACT.items() for name in names.split()}.items() <= verdicts.items()
    computed = Computed.of(folder)
    assert set(TARGET.load("draw")(computed)) == {path.name for path in folder.glob("*.png")}
    table = computed["table"]
    common = table[table.target == "common"].groupby(["rank", "optimizer"]).inverse_error.mean().unstack()
    assert (common["best"] <= common["Ginger"]).all()
    assert (common["Ginger"] < common["QNG"]).all()
    flops = computed["flops"].set_index(["network", "optimizer", "rank", "forward"])
    assert flops.paper_to_adam["ResNet-18", "Ginger", 4, "shared"] == pytest.approx(4.08 / 2.36, rel=1e-5)

    tables = {name: computed[name] for name in computed}
    swapped = table.optimizer.replace({"Ginger": "QNG", "QNG": "Ginger"})
    swapped = swapped.where(table.target == "common", table.optimizer)
    changed = results_of("ginger/cost", tables | {"table": table.assign(optimizer=swapped)})
    found = changed["closer-inverse-ffnn-8-digits-200-decay-0.9"]
    assert found.value > 1
    assert "at τ = 4" in found.explanation


def test_claims_on_cost_follow_the_tables(folder: Path, verdicts_of) -> None:
    tables = {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}
    steps = tables["steps"]
    steps["flops_to_adam"] = steps.flops_to_adam.where(steps.forward != "shared", 2.5)
    tables["flops"]["to_adam"] = tables["flops"].to_adam + 0.2
    ginger = (tables["fits"].optimizer == "Ginger") & (tables["fits"].quantity == "flops")
    tables["fits"].loc[ginger, "r_squared"] = [0.999 - 1e-5 * k for k in range(ginger.sum())]
    found = verdicts_of("ginger/cost", tables)
    assert found["operations-to-adam-resnet20"] == "not reproduced"
    assert found["flops-to-adam"] == "not reproduced"
    assert found["operations-linear-in-parameters"] == "reproduced"
