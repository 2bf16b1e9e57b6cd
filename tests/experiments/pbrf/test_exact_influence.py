"""Influence with the exact Hessian of a network in single precision, against torch's dense one in double."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from curvlab.lab import all_targets, load_config, runs, task_settings
from experiments.pbrf.exact_influence import ExactDecomposition
from experiments.pbrf.networks import Network, load_network

EXACT = "influence.hessian._target_=experiments.pbrf.bunch_kaufman.BunchKaufman"


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.chdir(Path(__file__).parents[3])
    folders = [f"store.root={tmp_path / 'store'}", f"results.root={tmp_path / 'results'}"]
    single = ["tasks.mlp_4_diabetes_60.dtype=float32", EXACT]
    cfg = load_config(
        all_targets()["pbrf/tab4"], ["preset=smoke", "tracker=none", "progress=false", *folders, *single]
    )
    with runs.start(cfg, key="pbrf/tab4", title="") as run:
        ((name, task),) = task_settings(cfg).items()
        yield load_network(run, name, task, seed=0)


def dense_hessian(network: Network) -> tuple[Tensor, Tensor]:
    """The Hessian of the cost without L2 at θ^s, (P, P), and every example's gradient, (N, P), in double."""
    inputs, targets = (t.double() for t in network.train)
    theta = torch.cat([parameter.detach().flatten() for parameter in network.model.parameters()]).double()

    def losses(vector: Tensor) -> Tensor:
        hidden = 4
        w, b, v, c = vector.split([hidden * inputs.shape[1], hidden, hidden, 1])
        outputs = torch.tanh(inputs @ w.reshape(hidden, -1).T + b) @ v[:, None] + c
        return (outputs - targets).square().mean(1)

    hessian = torch.autograd.functional.hessian(lambda vector: losses(vector).mean(), theta)
    return hessian, torch.autograd.functional.jacobian(losses, theta)


def test_it_is_that_of_the_dense_hessian_in_double_precision(network: Network) -> None:
    assert next(network.model.parameters()).dtype == torch.float32
    points = ExactDecomposition(network, 4)
    found, residual = points.influence("hessian")
    hessian, gradients = dense_hessian(network)
    l2 = network.settings.training.weight_decay
    shifted = hessian + (network.settings.damping + l2) * torch.eye(len(hessian), dtype=torch.float64)
    wanted = torch.linalg.solve(shifted, gradients[points.points].T).T / len(gradients)  # +1/N H⁻¹ ∇l, Eq. 19
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    assert residual < 1e-10
    below = int((torch.linalg.eigvalsh(shifted) < 0).sum())
    assert below > 0  # a saddle: what the solver is for
    assert points.hessian_spectrum()["num_below"] == below


def test_another_solver_and_the_gauss_newton_matrix_are_left_alone(network: Network) -> None:
    points = ExactDecomposition(network, 4)
    stopped = points.with_solver(
        "hessian", {"_target_": "curvlab.solvers.MinimumResidual", "rtol": 1e-2, "max_steps": 3}
    )  # type: ignore[arg-type]
    assert stopped.influence("hessian")[1] > 1e-2
    assert not torch.allclose(stopped.influence("hessian")[0], points.influence("hessian")[0], rtol=0.1)
    assert torch.equal(stopped.influence("gauss_newton")[0], points.influence("gauss_newton")[0])
