"""NGD against the recursion of Povey, Zhang & Khudanpur (2015) in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from online_natural_gradient import SETTINGS, Recursion, colored, outputs
from torch import nn

from curvlab.optim import NGD

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
