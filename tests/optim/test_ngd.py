"""NGD against the recursion of Povey, Zhang & Khudanpur (2015) in NumPy, and what it promises beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvlab.optim import NGD, DivergedError
from tests.refusals import refuses

FEW_ROWS = [(12,), (12,), (2, 30), (9, 1)]


def zeros(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def test_few_rows_start_at_the_mean_square_of_the_first_gradient(generator: torch.Generator) -> None:
    parameters = zeros(FEW_ROWS)
    optimizer = NGD(parameters, lr=1.0, rank=5)
    oracles = [Recursion(shape, rank=5, period=4, rescale=True, **SETTINGS) for shape in FEW_ROWS]
    for step in range(50):
        gradients = [colored(shape, generator) for shape in FEW_ROWS]
        for oracle, gradient, found in zip(
            oracles, gradients, outputs(parameters, optimizer, gradients), strict=True
        ):
            if step == 0:
                scale_start(oracle, gradient.numpy())
            expected = oracle(gradient.numpy())
            assert np.linalg.norm(found.numpy() - expected) <= 1e-6 * np.linalg.norm(expected)


def scale_start(oracle: Recursion, gradient: np.ndarray) -> None:
    for k, axis in oracle.axes.items():
        if gradient.size // axis.dim < axis.rank:  # the axes before change the gradient's direction, not its norm
            axis.rho = np.square(gradient).mean()
            axis.D = np.full(axis.rank, axis.rho)
        assert k < gradient.ndim


def test_few_rows_do_not_depend_on_rounding_or_on_the_gradients_unit(generator: torch.Generator) -> None:
    plain, nudged, scaled = zeros([(30,), (30,), (30,)])
    optimizers = [NGD([parameter], lr=1.0) for parameter in (plain, nudged, scaled)]
    for _ in range(30):
        g = colored((30,), generator)
        nudge = 1 + 1e-13 * torch.randn(30, dtype=torch.float64, generator=generator)
        (a,), (b,), (c,) = (
            outputs([parameter], optimizer, [gradient])
            for parameter, optimizer, gradient in zip(
                (plain, nudged, scaled), optimizers, (g, g * nudge, 1e4 * g), strict=True
            )
        )
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(1e4 * a, c, rtol=1e-7, atol=1e-3)


def test_a_first_gradient_of_zero_is_no_start(generator: torch.Generator) -> None:
    late, prompt = zeros([(30,), (30,)])
    first, second = NGD([late], lr=1.0, update_period=1), NGD([prompt], lr=1.0, update_period=1)
    for _ in range(3):
        assert outputs([late], first, [torch.zeros(30, dtype=torch.float64)])[0].norm() == 0
    for step in range(40):
        g = colored((30,), generator)
        (a,), (b,) = outputs([late], first, [g]), outputs([prompt], second, [g])
        if step == 39:  # the start is forgotten as (1 - eta)^t
            assert (a - b).norm() < 0.1 * b.norm()


def test_full_rank_without_smoothing_gives_the_inverse_fisher_direction(generator: torch.Generator) -> None:
    dim = 6
    spectrum = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.25, 0.1], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator)).Q
    root = basis * spectrum.sqrt()
    (parameter,) = zeros([(dim,)])
    optimizer = NGD([parameter], lr=1.0, alpha=0.0, rank=dim - 1, update_period=1)
    for step in range(600):
        optimizer.param_groups[0]["eta"] = 1 / (step + 2)  # the mean of all outer products so far
        outputs([parameter], optimizer, [root @ torch.randn(dim, dtype=torch.float64, generator=generator)])
    optimizer.param_groups[0]["update_period"] = 10**9  # what follows looks at the estimate, and leaves it alone
    inverse = (basis / spectrum) @ basis.T
    for _ in range(5):
        g = torch.randn(dim, dtype=torch.float64, generator=generator)
        (found,) = outputs([parameter], optimizer, [g])
        expected = inverse @ g
        assert torch.cosine_similarity(found, expected, dim=0) > 0.98
        assert torch.cosine_similarity(g, expected, dim=0) < 0.9  # SGD's direction is another
    axis = optimizer.state[parameter]
    F = fisher(axis["factor_0"], axis["eigenvalues_0"], axis["rho_0"], alpha=0.0)
    g = torch.randn(dim, dtype=torch.float64, generator=generator)
    expected = torch.linalg.solve(F, g)
    (found,) = outputs([parameter], optimizer, [g])
    torch.testing.assert_close(found, expected * g.norm() / expected.norm(), rtol=1e-8, atol=1e-10)


def fisher(W: Tensor, D: Tensor, rho: Tensor, *, alpha: float) -> Tensor:
    """RᵀDR + βI from the state."""
    dim = W.shape[1]
    beta = rho * (1 + alpha) + alpha * D.sum() / dim
    R = W * (beta / D + 1).sqrt()[:, None]
    return R.T @ torch.diag(D) @ R + beta * torch.eye(dim, dtype=W.dtype)


def test_large_alpha_is_sgd(generator: torch.Generator) -> None:
    parameters = zeros([(6, 5), (7,)])
    optimizer = NGD(parameters, lr=1.0, alpha=1e9, rescale=False)
    for _ in range(12):
        gradients = [colored((6, 5), generator), colored((7,), generator)]
        for gradient, found in zip(gradients, outputs(parameters, optimizer, gradients), strict=True):
            torch.testing.assert_close(found, gradient, rtol=1e-7, atol=1e-7)


def test_together_is_alone(generator: torch.Generator) -> None:
    """Groups with settings of their own, gradients that are missing, two precisions, an empty parameter."""
    shapes, of_two, double = [(6, 5), (6, 5), (6, 5), (6, 5), (8, 8)], {"lr": 0.3, "alpha": 0.1}, torch.float64
    together, alone = (zeros(shapes[:4]) + zeros(shapes[4:], torch.float32) for _ in range(2))
    (empty,) = zeros([(0, 8)])
    batched = NGD([{"params": together[:1], **of_two}, {"params": [*together[1:], empty]}], lr=1.0)
    separate = [
        NGD([parameter], **({"lr": 1.0} | (of_two if i == 0 else {}))) for i, parameter in enumerate(alone)
    ]
    for step in range(20):
        empty.grad = torch.zeros(0, 8, dtype=double)
        for index, (shape, parameter) in enumerate(zip(shapes, together, strict=True)):
            parameter.grad = None if index == step % 6 else colored(shape, generator).to(parameter.dtype)
            if parameter.grad is not None:
                outputs(alone[index : index + 1], separate[index], [parameter.grad])
        batched.step()
    for expected, found in zip(alone, together, strict=True):
        accuracy = 1e-9 if found.dtype == double else 1e-4
        torch.testing.assert_close(found, expected, rtol=accuracy, atol=accuracy / 1000)


def test_ranks_that_do_not_fit_are_reduced() -> None:
    parameters = zeros([(3, 200), (2,), (1,)])
    optimizer = NGD(parameters, lr=1.0, rank=7)
    outputs(parameters, optimizer, [torch.ones(parameter.shape) for parameter in parameters])
    ranks = [
        {name: len(value) for name, value in optimizer.state[parameter].items() if "eigen" in name}
        for parameter in parameters
    ]
    assert ranks == [{"eigenvalues_0": 2, "eigenvalues_1": 7}, {"eigenvalues_0": 1}, {}]
    (default,) = zeros([(300, 5)])
    outputs([default], ngd := NGD([default], lr=1.0), [torch.ones(300, 5)])
    assert [len(ngd.state[default][f"eigenvalues_{axis}"]) for axis in range(2)] == [80, 3]


def test_single_precision_follows_double(generator: torch.Generator) -> None:
    shapes = [(16, 8, 3, 3), (40, 60), (60,)]
    exact, rounded = zeros(shapes), zeros(shapes, torch.float32)
    in_double, in_single = NGD(exact, lr=1.0, alpha=0.1), NGD(rounded, lr=1.0, alpha=0.1)
    for _ in range(16):
        gradients = [1e-3 * colored(shape, generator) for shape in shapes]
        for parameter in rounded:
            parameter.data.zero_()
        pairs = zip(outputs(exact, in_double, gradients), outputs(rounded, in_single, gradients), strict=True)
        for expected, found in pairs:
            assert (found.double() - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_survives_gradients_of_low_rank_and_sudden_growth(dtype: torch.dtype, generator: torch.Generator) -> None:
    # Directions that no gradient has shown are left to rounding; they must stay harmless.
    parameters = zeros([(40, 60)], dtype)
    optimizer = NGD(parameters, lr=1.0, alpha=0.01, rescale=False)
    for step in range(60):
        left = torch.randn(40, 2, dtype=torch.float64, generator=generator)
        gradient = (
            (1e3 if step > 30 else 1e-3) * left @ torch.randn(2, 60, dtype=torch.float64, generator=generator)
        )
        parameters[0].data.zero_()
        (found,) = outputs(parameters, optimizer, [gradient])
        assert found.norm() <= 1.001 * gradient.norm()  # β(F + κI)⁻¹ has eigenvalues between 0 and 1
        state = optimizer.state[parameters[0]]
        for axis in range(2):
            assert torch.linalg.matrix_norm(state[f"factor_{axis}"], 2) <= 1.001


def test_unusable_parameters_and_gradients() -> None:
    half = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    refuses("keep master weights in float32", NGD([half], lr=1.0).step, error=TypeError)
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    refuses("sparse=False", NGD(embedding.parameters(), lr=1.0).step, error=TypeError)


def test_every_step_looks_at_its_gradients(generator: torch.Generator) -> None:
    # After the first ten, one step of four updates; the others once moved the weights by NaN.
    parameters = zeros([(4, 3), (5,)])
    optimizer = NGD([{"params": [parameter]} for parameter in parameters], lr=1.0)
    for step in range(16):
        outputs(parameters, optimizer, [colored((4, 3), generator), colored((5,), generator)])
        if step >= 10:
            before = [parameter.detach().clone() for parameter in parameters]
            parameters[1].grad = torch.full((5,), torch.nan, dtype=torch.float64)
            refuses(r"gradient of shape \(5,\).*took no step", optimizer.step, error=DivergedError)
            assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))
            assert optimizer.state[parameters[0]]["step"] == step + 1


# Every axis has at least `rank` rows. (1, 8, 6) has an axis of size 1; two of each shape are batched; with rank 6
# the axes of 90, 60, 20 and 30 take two thin products, the others one with a (dim, dim) matrix.
SHAPES = [(6, 4, 3, 3), (10, 7), (1, 8, 6), (4, 9, 5), (6, 4, 3, 3), (10, 7)]


@pytest.mark.parametrize(
    ("shapes", "changed"),
    [
        (SHAPES, {}),
        (SHAPES, {"alpha": 0.01, "update_period": 1, "eta": 0.3}),
        (SHAPES, {"rescale": False, "update_period": 7}),
        (SHAPES, {"rank": 1, "delta": 0.05, "epsilon": 0.1}),
        ([(90, 60), (90, 60), (20, 30, 3)], {"rank": 6}),
        # More than goes through the buffers at once, with axes of one rank and several dimensions on both sides.
        ([(9, 30), (300, 250), (260, 6), (300, 250)], {"rank": 3}),
        # Kernels behind 16 input channels and more are taken at once: two axes, three, one; the last is too large.
        ([(5, 17, 3, 3), (4, 18, 2, 3, 2), (6, 16, 5), (6, 16, 5), (5, 16, 11, 12)], {}),
        ([(5, 17, 3, 3), (7, 20, 1, 1)], {"rescale": False, "rank": 1}),
    ],
)
def test_equals_the_recursion_step_by_step(
    shapes: list[tuple[int, ...]], changed: dict[str, float], generator: torch.Generator
) -> None:
    settings = SETTINGS | {"rank": None, "update_period": 4, "rescale": True} | changed
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    optimizer = NGD(parameters, lr=1.0, **settings)
    period = settings.pop("update_period")
    oracles = [Recursion(shape, period=period, **settings) for shape in shapes]
    for step in range(23):
        gradients = [(1 + step % 3) * colored(shape, generator) for shape in shapes]
        for oracle, gradient, found in zip(
            oracles, gradients, outputs(parameters, optimizer, gradients), strict=True
        ):
            expected = oracle(gradient.numpy())
            assert np.linalg.norm(found.numpy() - expected) <= 1e-6 * np.linalg.norm(expected)


SETTINGS = {"alpha": 4.0, "eta": 0.1, "epsilon": 1e-10, "delta": 5e-4}


class Axis:
    """One axis of one tensor, as in Povey, Zhang & Khudanpur (2015), with their K, L and Z."""

    def __init__(self, dim: int, rank: int, *, alpha: float, eta: float, epsilon: float, delta: float) -> None:
        self.dim, self.rank = dim, rank
        self.alpha, self.eta, self.epsilon, self.delta = alpha, eta, epsilon, delta
        self.rho, self.D = epsilon, np.full(rank, epsilon)
        R = np.zeros((rank, dim))
        for i in range(rank):
            for j in range(i, dim, rank):
                R[i, j] = 1.1 if j == i else 1.0
            R[i] /= np.sqrt((R[i] ** 2).sum())
        self.W = np.sqrt(self.E())[:, None] * R

    def beta(self) -> float:
        return self.rho * (1 + self.alpha) + self.alpha * self.D.sum() / self.dim

    def E(self) -> np.ndarray:
        return 1 / (self.beta() / self.D + 1)

    def output(self, X: np.ndarray) -> np.ndarray:
        return X - X @ self.W.T @ self.W

    def update(self, X: np.ndarray) -> None:
        N, d, r, eta = len(X), self.dim, self.rank, self.eta
        H = X @ self.W.T
        J = H.T @ X
        K, L = J @ J.T, H.T @ H
        root = np.diag(self.E() ** -0.5)
        old = np.diag(self.D + self.rho)
        cross = root @ L @ root @ old
        Z = (eta / N) ** 2 * root @ K @ root + (eta / N) * (1 - eta) * (cross + cross.T) + (1 - eta) ** 2 * old**2
        C, U = np.linalg.eigh(Z)
        C = np.maximum(C, (self.rho * (1 - eta)) ** 2)
        rho = (eta / N * (X**2).sum() + (1 - eta) * (d * self.rho + self.D.sum()) - np.sqrt(C).sum()) / (d - r)
        floor = max(self.epsilon, self.delta * np.sqrt(C).max())
        B = J + (1 - eta) / (eta / N) * old @ self.W
        self.D, self.rho = np.maximum(np.sqrt(C) - rho, floor), max(rho, floor)
        self.W = eta / N * np.diag(self.E() ** 0.5) @ np.diag(C**-0.5) @ U.T @ root @ B


class Recursion:
    """All axes of one tensor."""

    def __init__(
        self, shape: Sequence[int], *, rank: int | None, period: int, rescale: bool, **settings: float
    ) -> None:
        self.period, self.rescale, self.calls = period, rescale, 0
        default = {d: min((d + 1) // 2, 80) if rank is None else rank for d in shape}
        self.axes = {k: Axis(d, min(default[d], d - 1), **settings) for k, d in enumerate(shape) if d > 1}

    def __call__(self, gradient: np.ndarray) -> np.ndarray:
        x = gradient
        for k, axis in self.axes.items():
            moved = np.moveaxis(x, k, -1)
            X = moved.reshape(-1, axis.dim)
            for _ in range(3 if self.calls == 0 else 0):
                axis.update(X)
            Y = axis.output(X)
            if self.calls < 10 or self.calls % self.period == 0:
                axis.update(X)
            if self.rescale:
                Y = Y * np.linalg.norm(X) / np.linalg.norm(Y)
            x = np.moveaxis(Y.reshape(moved.shape), -1, k)
        self.calls += 1
        return x


def outputs(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]
) -> list[Tensor]:
    """Take one step of lr = 1 and return the displacements, negated."""
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()
    return [old - new.detach() for old, new in zip(before, parameters, strict=True)]


def colored(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a random gradient whose axes have covariances of their own."""
    x = torch.randn(tuple(shape), dtype=torch.float64, generator=generator)
    for axis, dim in enumerate(shape):
        scales = torch.linspace(0.2, 2, dim, dtype=torch.float64).roll(axis)
        x = x * scales.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    return x
