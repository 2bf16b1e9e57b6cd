"""Units of work on a network of tanh in double precision, against retraining and matrices written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.lab import all_targets, load_config, runs, task_settings
from experiments.pbrf.networks import Network, load_network
from experiments.pbrf.responses import OWN_LENGTH, Decomposition, constant_loss, lissa_name

TASK = "mlp_4_diabetes_60"
SADDLE = {"hessian": {"_target_": "experiments.pbrf.solvers.BunchKaufman"}}


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Decomposition]]:
    """Return a function that makes a decomposition of two points, or of groups, with changed settings."""
    target, root = all_targets()["pbrf/tab4"], tmp_path_factory.mktemp("responses")
    folders = [f"results.root={root / 'results'}", f"store.root={root / 'store'}"]
    cfg = load_config(target, ["preset=smoke", "tracker=none", "progress=false", *folders])
    with runs.start(cfg, key=target.key, title="") as run:

        def make(fraction: float | None = None, **changed: object) -> Decomposition:
            settings = task_settings(cfg)[TASK]
            settings.update(changed)
            return Decomposition(load_network(run, TASK, settings, 0), 2, fraction)

        yield make


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


def test_influence_is_that_of_the_dense_hessian_in_double_precision(at) -> None:
    points = at(dtype="float32", influence=SADDLE)
    network = points.network
    assert next(network.model.parameters()).dtype == torch.float32
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


def test_lissa_is_the_recursion_on_the_dense_matrix(at) -> None:
    points = at()
    network, (hessian, gradients) = points.network, dense_hessian(points.network)
    shifted = hessian + network.settings.damping * torch.eye(len(hessian), dtype=torch.float64)
    b = gradients[points.points].T / len(gradients)
    found, u = points.truncated("hessian"), torch.zeros_like(b)
    for _ in range(network.settings.lissa.num_steps):
        u = b / 25 + u - shifted @ u / 25

    def test_losses(vector: Tensor) -> Tensor:
        inputs, targets = network.test
        w, b, v, c = vector.split([4 * inputs.shape[1], 4, 4, 1])
        outputs = torch.tanh(inputs @ w.reshape(4, -1).T + b) @ v[:, None] + c
        return (outputs - targets).square().mean(1)

    theta = torch.cat([parameter.detach().flatten() for parameter in network.model.parameters()])
    expected = torch.autograd.functional.jacobian(test_losses, theta) @ u
    assert_close(found[lissa_name(25)]["predicted"], expected, rtol=1e-6, atol=1e-9)
    assert found[lissa_name(25)]["solver"].shape == found[lissa_name(25)]["moved"].shape == (2, 2)
    # The PBRF's steps: K/2 epochs of two batches at a tenth of 0.1. So short a descent is that times the gradient.
    length = network.length("proximal_bregman")
    assert length == pytest.approx(5 * 2 * 0.01)
    values, vectors = torch.linalg.eigh(shifted)
    flow = vectors @ ((-torch.expm1(-length * values) / values)[:, None] * (vectors.T @ b))
    expected = torch.autograd.functional.jacobian(test_losses, theta) @ flow
    assert_close(found[OWN_LENGTH]["predicted"], expected, rtol=1e-6, atol=1e-9)
    assert at(lissa=None).truncated("hessian") == {}


def test_sampled_lissa_is_near_that_of_the_whole_matrix(at) -> None:
    settings = {"num_steps": 40, "num_repeats": 4, "rtol": 1e-4, "max_steps": 60}
    whole, sampled = (at(lissa=settings | {"batch_size": size}).truncated("gauss_newton") for size in (None, 30))
    name = lissa_name(50)
    difference = (whole[name]["predicted"] - sampled[name]["predicted"]).norm()
    assert 0 < float(difference / whole[name]["predicted"].norm()) < 0.2


def test_groups_are_left_out_of_retraining(at) -> None:
    found = at(0.7)
    network = found.network
    inputs, targets = network.train
    moved = found.displacement("warm")
    start = [parameter.detach().clone() for parameter in network.model.parameters()]
    for group, own in zip(found.groups, moved, strict=True):
        with torch.no_grad():
            for parameter, value in zip(network.model.parameters(), start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.SGD(network.model.parameters(), lr=network.lr)
        for epoch in network.batches[network.num_epochs :]:
            for batch in epoch:
                kept = batch[~torch.isin(batch, group)]
                optimizer.zero_grad()
                error = (network.model(inputs[kept]) - targets[kept].reshape(len(kept), -1)).square().sum()
                (error / len(batch)).backward()
                optimizer.step()
        end = torch.cat([parameter.detach().flatten() for parameter in network.model.parameters()])
        assert_close(own, end - torch.cat([value.flatten() for value in start]), rtol=1e-8, atol=1e-10)


def test_groups_are_random_fractions_and_nested(at) -> None:
    small, large = at(0.1).groups, at(0.7).groups
    assert [len(group) for group in small + large] == [6, 6, 42, 42]
    for inner, outer in zip(small, large, strict=True):
        assert set(inner.tolist()) < set(outer.tolist())
        assert len(set(outer.tolist())) == 42
    assert set(large[0].tolist()) != set(large[1].tolist())
    assert at(0.1).key != at(0.7).key != at(None).key


def test_cold_and_warm_optimum_are_computed_once_for_all_dampings(at) -> None:
    one, other = at(), at(damping=0.1)
    found, misses = [one.displacement(name) for name in ("cold", "warm")], one.network.run.store.misses
    for name, own in zip(("cold", "warm"), found, strict=True):
        assert torch.equal(own, other.displacement(name))
    assert one.network.run.store.misses == misses
    assert not torch.equal(one.displacement("proximal"), other.displacement("proximal"))


# ------------------------------------------------------------------ the best constant outputs, against L-BFGS
GENERATOR = torch.Generator().manual_seed(0)
CLASSES = torch.randint(3, (40,), generator=GENERATOR)
TOKENS = torch.where(
    torch.rand(8, 5, generator=GENERATOR) < 0.2, -100, torch.randint(3, (8, 5), generator=GENERATOR)
)
PIXELS = torch.rand(40, 6, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "targets", "outputs"),
    [
        (nn.CrossEntropyLoss(), CLASSES, 3),
        (nn.CrossEntropyLoss(), TOKENS, 3),
        (nn.BCEWithLogitsLoss(), PIXELS, 6),
        (nn.BCEWithLogitsLoss(), (PIXELS[:, :1] > 0.3).double(), 1),
        (nn.MSELoss(), 3 * PIXELS[:, :2], 2),
    ],
)
def test_no_constant_does_better(loss: nn.Module, targets: Tensor, outputs: int) -> None:
    constant = torch.zeros(outputs, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([constant], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        flat = targets.flatten() if isinstance(loss, nn.CrossEntropyLoss) else targets
        value = loss(constant.expand(len(flat), outputs), flat)
        value.backward()
        return value

    optimizer.step(closure)
    assert constant_loss(loss, targets) == pytest.approx(float(closure()), rel=1e-8)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(TypeError, match="not known for L1Loss"):
        constant_loss(nn.L1Loss(), PIXELS)
