"""Optimizers that use curvature, as torch.optim.Optimizer, and what is known about their convergence.

`NGD` (Kaldi's online natural gradient) takes the place of torch.optim.SGD as it stands. `Ginger` and `QNG` learn
their matrix from a second gradient, for labels that the model draws itself::

    import torch
    from torch import nn

    from curvlab.optim import Ginger, sampled_label_loss

    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(256, 20, generator=generator), torch.randint(10, (256,), generator=generator)
    model, loss = nn.Linear(20, 10), nn.CrossEntropyLoss()
    optimizer = Ginger(model.parameters(), lr=0.05, rank=8, decay=0.99, damping=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        sampled_label_loss(loss, model(inputs), targets, generator=generator).backward()
        optimizer.update_curvature()

        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

`ExactNGD`, `FisherNewton`, `CubicNewton` and `UniformDirection` take an operator of `curvlab.curvature` beside the
parameters: FisherNewton(model.parameters(), FisherOperator(model, loss, (inputs, targets))).

All of them keep state_dict, schedulers, copies and pickles as torch's own do; gradients that are not finite change
nothing (tests/optim/conformance.py lists them: a new optimizer joins with one line).
"""

from curvlab.optim.exact_ngd import ExactNGD, ExactNGDInfo
from curvlab.optim.fisher_newton import CubicNewton, FisherNewton, FisherNewtonInfo, output_gradient_bound
from curvlab.optim.flat import DivergedError
from curvlab.optim.ginger import PUBLISHED_GINGER, Ginger
from curvlab.optim.ngd import NGD
from curvlab.optim.qng import QNG
from curvlab.optim.uniform_direction import (
    LowRankMatrix,
    UniformDirection,
    UniformDirectionInfo,
    direction_estimate,
    expected_squared_error,
    printed_steps_bound,
    stated_sigma,
    stated_squared_error,
    steps_bound,
    unit_directions,
)
from curvlab.training import sampled_label_loss

__all__ = [
    "NGD",
    "PUBLISHED_GINGER",
    "QNG",
    "CubicNewton",
    "DivergedError",
    "ExactNGD",
    "ExactNGDInfo",
    "FisherNewton",
    "FisherNewtonInfo",
    "Ginger",
    "LowRankMatrix",
    "UniformDirection",
    "UniformDirectionInfo",
    "direction_estimate",
    "expected_squared_error",
    "output_gradient_bound",
    "printed_steps_bound",
    "sampled_label_loss",
    "stated_sigma",
    "stated_squared_error",
    "steps_bound",
    "unit_directions",
]
