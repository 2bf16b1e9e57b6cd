"""What pbrf's targets share: minima, networks, solvers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence.retraining import SharedBatches
from curvlab.lab import start, task_settings
from curvlab.lab.tables import read_table
from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.solvers import Direct
from experiments.pbrf import networks
from experiments.pbrf.minima import MAX_DISTANCE, Bounded, num_steps
from experiments.pbrf.networks import _learning_rate, _validated, load_network
from experiments.pbrf.responses import CHUNK, over_all
from experiments.pbrf.solvers import BunchKaufman, RepeatedLissa, descent, matrix_functions, series
from tests.matrices import with_spectrum
from tests.refusals import refuses


class Quadratics:
    """½ uᵀ diag(curvature) u - uᵀ1 for each of K rows: curvatures (K, P), negative ones have no minimum."""

    def __init__(self, curvature: Tensor) -> None:
        self.curvature = curvature

    @property
    def depends_on(self) -> Mapping[str, Any]:
        return {}

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        weight = indices.double().mean() * 2 / 1199  # a mean over examples: 1 over all of 0 to 1199
        values = (0.5 * self.curvature * displacement.square() - displacement).sum(1)
        return weight * values, weight * (self.curvature * displacement - 1)


def test_a_point_that_leaves_stops_no_other() -> None:
    curvature = torch.tensor([[1.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    bounded = Bounded(Quadratics(curvature), torch.tensor([10.0, 10.0]))
    minimizer = SharedBatches([torch.arange(1200)] * 200, lr=0.1, momentum=0.9)
    end = minimizer(bounded, torch.zeros(2, 2, dtype=torch.float64), 1200)
    assert_close(end[0], 1 / curvature[0], rtol=1e-3, atol=0)
    assert 10 < end[1].norm() < 100  # let go beyond the bound; momentum carries it a little further
    values, gradients = bounded(end, torch.arange(1200))
    assert values[1] == 0
    assert_close(gradients[1], torch.zeros(2, dtype=torch.float64))


def test_chunks_add_up_to_all_examples() -> None:
    objective, place = Quadratics(torch.ones(3, 4, dtype=torch.float64)), torch.randn(3, 4).double()
    everything = torch.arange(1200)
    assert len(everything) > 2 * CHUNK
    for found, expected in zip(over_all(objective, place, everything), objective(place, everything), strict=True):
        assert_close(found, expected)


def test_steps_give_the_horizon() -> None:
    steps = num_steps(0.1, 0.001, horizon=0.5, momentum=0.9)
    assert steps == 500
    # Along a direction without curvature but λ, descent with momentum has gone about 1 - exp(-horizon) of the way.
    damping = torch.tensor([[0.001]], dtype=torch.float64)
    descent = SharedBatches([torch.arange(1200)] * steps, lr=0.1, momentum=0.9)
    end = descent(Quadratics(damping), torch.zeros(1, 1, dtype=torch.float64), 1200)
    assert float(end) * 0.001 == pytest.approx(1 - np.exp(-0.5), rel=0.03)


def test_small_weights_agree_with_influence(run_smoke) -> None:
    """Of a network of tanh, at smoke scale: to first order (Eq. 46), with the Gauss-Newton matrix alone."""
    folder: Path = run_smoke("pbrf/tab6")
    found = read_table(folder, "correlations").query("way == 'over_test' and coefficient == 'pearson'")
    assert found[found.estimate == "exact"].groupby("response").value.min().small_weight > 0.999
    points = read_table(folder, "points")
    assert (points["small_weight gradient norm"] <= 0.05).all()
    assert (points["carried_on distance"] <= 2 * MAX_DISTANCE).all()
    assert (points["carried_on fall"] > 0).all()
    networks = read_table(folder, "networks")
    assert (networks["gauss_newton residual"] < 1e-5).all()


# --- The learning rate of a base network, from a list: by what it is chosen
@dataclass(frozen=True)
class Stub:
    """As much of a network as the choice reads."""

    train: tuple[torch.Tensor, torch.Tensor]
    model: nn.Module
    loss: nn.Module
    lr: float = math.nan
    end: nn.Module = field(default_factory=lambda: nn.Linear(3, 2))
    label: str = "stub"
    key: dict[str, str] = field(default_factory=lambda: {"seed_name": "stub"})
    run: Any = field(default_factory=lambda: SimpleNamespace(progress=lambda items, about: items))

    def generator(self, stream: str) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def end_of_base_run(self, unfinished: Path) -> torch.Tensor:
        return parameters_to_vector(self.end.parameters())


def network() -> Stub:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(1))
    return Stub((x, (x[:, 0] > 0).long()), nn.Linear(3, 2), nn.CrossEntropyLoss())


def test_accuracy_and_loss_may_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {1.0: (0.3, 0.8), 0.1: (0.5, 0.9), 0.01: (0.4, 0.9), 0.001: (math.inf, 0.0)}

    def validated(own: Stub, held_out: tuple[torch.Tensor, torch.Tensor], **key: Any) -> dict[str, float]:
        assert (len(own.train[1]), len(held_out[1])) == (90, 10)
        assert key == {"lr": own.lr}  # beside the network's: a unit of its own for each rate
        return dict(zip(("loss", "accuracy"), found[own.lr], strict=True))

    monkeypatch.setattr(networks, "_validated", validated)
    chosen = {
        by: _learning_rate.__wrapped__(network(), grid=list(found), select_by=by) for by in ("loss", "accuracy")
    }
    assert chosen["loss"]["lr"] == 1.0
    assert chosen["accuracy"]["lr"] == 0.01  # of the two, the one with the lower loss
    assert chosen["loss"]["losses"] == [0.3, 0.5, 0.4, math.inf]


def test_loss_and_accuracy_are_those_of_the_end(tmp_path: Path) -> None:
    own = network()
    x, y = own.train
    with torch.no_grad():
        outputs = own.end(x)
        expected = (float(nn.functional.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).float().mean()))
    found = _validated.__wrapped__(own, (x, y), checkpoint=tmp_path)
    assert (found["loss"], found["accuracy"]) == pytest.approx(expected, rel=1e-5)


def test_a_decayed_rate_stays_decayed_in_retrainings() -> None:
    training = {"optimizer": "sgd", "momentum": 0.9, "decay_epochs": [2, 3], "decay_factor": 0.5}
    base = SimpleNamespace(
        settings=SimpleNamespace(training=OmegaConf.create(training), bregman_lr_divisor=10),
        batches=[[torch.arange(4)] * 5] * 6,  # K + K/2 epochs of five steps
        num_epochs=4,
        lr=0.1,
        described="",
        run=SimpleNamespace(bar=lambda text: False),
    )
    base._schedule = lambda first: networks.Network._schedule(base, first)  # type: ignore[arg-type]
    cold, warm = (networks.Network.minimizer(base, name) for name in ("cold", "warm"))  # type: ignore[arg-type]
    assert [cold.schedule(step, 30) for step in (0, 9, 10, 14, 15, 29)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [warm.schedule(step, 10) for step in (0, 9)] == [0.25, 0.25]


def test_an_unknown_measure_is_refused(config_of) -> None:
    cfg = config_of("pbrf/tab4")
    ((name, settings),) = task_settings(cfg).items()
    settings.training = {**settings.training, "lr": [0.1, 0.01], "select_by": "perplexity"}
    refused = pytest.raises(ValueError, match="choose one of loss, accuracy")
    with start(cfg, key="pbrf/tab4", title="") as run, refused:
        load_network(run, name, settings, 0)


# --- The solvers of influence: a saddle, LiSSA sampled, and functions of a matrix against recursions written out
# ------------------------------------------------------------------ Bunch-Kaufman
def test_indefinite_is_solved_and_its_negative_eigenvalues_are_counted(generator) -> None:
    eigenvalues = torch.cat([torch.linspace(-3, -1e-6, 17), torch.linspace(1e-7, 50, 26)]).double()
    matrix = with_spectrum(eigenvalues, generator)
    b = torch.randn(43, 3, generator=generator, dtype=torch.float64)
    solution = BunchKaufman().solve(DenseOperator(matrix), b)
    torch.testing.assert_close(solution.x, torch.linalg.solve(matrix, b), rtol=1e-5, atol=1e-5)
    assert solution.residual.max() < 1e-7  # condition number 5e8
    assert solution.converged
    assert solution.num_negative == 17
    assert solution.num_matvecs == 43  # the columns of the matrix
    assert BunchKaufman().solve(DenseOperator(matrix), b[:, 0]).x.shape == (43,)


def test_blocks_of_two_are_counted_once() -> None:
    matrix = torch.tensor([[0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    solution = BunchKaufman().solve(DenseOperator(matrix), torch.ones(3, dtype=torch.float64))
    assert solution.num_negative == 2  # eigenvalues -2, -1, 2
    torch.testing.assert_close(solution.x, torch.tensor([0.5, 0.5, -1.0], dtype=torch.float64))


def test_singular_is_refused(generator) -> None:
    factor = torch.randn(10, 7, generator=generator, dtype=torch.float64)
    operator = DenseOperator(factor @ factor.T)
    with pytest.raises(ValueError, match=r"DenseOperator is singular to rounding: a pivot of .*Add damping"):
        BunchKaufman().solve(operator, torch.ones(10, dtype=torch.float64))
    assert BunchKaufman().solve(operator + 0.1 * identity, torch.ones(10, dtype=torch.float64)).num_negative == 0


def test_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dense \(30, 30\) matrix, more than max_size = 20: use MinimumResidual"):
        BunchKaufman(max_size=20).solve(DenseOperator(torch.eye(30)), torch.ones(30))


# ------------------------------------------------------------------ LiSSA, sampled
def problem() -> tuple[LinearOperator, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(200, 4, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double().eval()
    operator = GaussNewtonOperator(model, nn.MSELoss(), (x, x[:, :1])) + 0.1 * identity
    return operator, torch.randn(4, 2, generator=generator, dtype=torch.float64)


def test_the_smallest_scale_that_does_not_diverge_is_taken() -> None:
    operator, b = problem()  # λmax is about 8: 1/2 diverges, 1/30 does not
    solver = RepeatedLissa(batch_size=100, num_steps=250, num_repeats=2, scales=(2, 30, 500))
    found = solver.solve(operator, b, generator=torch.Generator().manual_seed(1))
    exact = Direct().solve(operator, b).x
    assert float((found.x - exact).norm() / exact.norm()) < 0.1
    truth = ((b - operator @ found.x).norm(dim=0) / b.norm(dim=0)).tolist()
    assert found.residual.tolist() == pytest.approx(truth)
    assert found.converged
    assert found.num_matvecs == 2 * 250 * 2 + 2


def test_where_all_scales_diverge_it_is_nan() -> None:
    operator, b = problem()
    found = RepeatedLissa(batch_size=100, num_steps=250, scales=(1, 2)).solve(operator, b)
    assert found.x.isnan().all()
    assert found.residual.shape == (2,)
    assert not found.converged
    refuses("scales is empty", RepeatedLissa(batch_size=100, num_steps=250, scales=()).solve, operator, b)


# ------------------------------------------------------------------ functions of a matrix
def recursion(matrix: Tensor, b: Tensor, scale: float, num_steps: int) -> Tensor:
    """Eq. 48 from t = 0, term by term: u <- v/σ + (I - A/σ) u."""
    u = torch.zeros_like(b)
    for _ in range(num_steps):
        u = b / scale + u - matrix @ u / scale
    return u


def test_the_series_is_the_recursion_and_the_descent_its_limit(generator) -> None:
    eigenvalues = torch.cat([torch.linspace(-0.004, -0.001, 5), torch.linspace(0.001, 18, 30)]).double()
    matrix = with_spectrum(eigenvalues, generator)
    b = torch.randn(35, 3, generator=generator, dtype=torch.float64)
    functions = {f"{scale}": series(scale, 500) for scale in (5, 10, 50)} | {"flow": descent(10.0)}
    found = matrix_functions(DenseOperator(matrix), b, functions, rtol=1e-8, max_steps=100)
    for scale in (10, 50):
        expected = recursion(matrix, b, scale, 500)
        torch.testing.assert_close(found.values[f"{scale}"], expected, rtol=1e-7, atol=1e-7)
    # Gradient descent in tiny steps, of the same length.
    torch.testing.assert_close(found.values["flow"], recursion(matrix, b, 2e3, 20_000), rtol=2e-2, atol=1e-3)
    assert not torch.isfinite(found.values["5"]).all() or found.values["5"].norm() > 1e100  # 18 > 2 · 5
    assert found.num_matvecs <= 35 + 3
    singular = torch.zeros(2, dtype=torch.float64)
    assert series(10, 500)(singular).tolist() == [50.0, 50.0]
    assert descent(7.0)(singular).tolist() == [7.0, 7.0]


def test_the_space_grows_until_nothing_changes(generator) -> None:
    matrix = with_spectrum(torch.logspace(-3, 1, 200), generator)
    b = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    found = matrix_functions(DenseOperator(matrix), b, {"flow": descent(3.0)}, rtol=1e-6, max_steps=100)
    values, vectors = torch.linalg.eigh(matrix)
    exact = vectors @ (descent(3.0)(values)[:, None] * (vectors.T @ b))
    assert float((found.values["flow"] - exact).norm() / exact.norm()) < 1e-6
    assert found.change["flow"] <= 1e-6
    assert found.num_matvecs < 100
    few = matrix_functions(DenseOperator(matrix), b, {"flow": descent(3.0)}, rtol=1e-6, max_steps=2)
    assert 1e-6 < few.change["flow"] < math.inf
