"""Optimizers that use curvature, and what is known about their convergence."""

from curvlab.optim.cubic_newton import CubicNewton
from curvlab.optim.exact_ngd import ExactNGD, ExactNGDInfo
from curvlab.optim.fisher_newton import FisherNewton, FisherNewtonInfo, output_gradient_bound
from curvlab.optim.low_rank import LowRankMatrix
from curvlab.optim.ngd import NGD
from curvlab.optim.parameter_vector import DivergedError
from curvlab.optim.random_direction import (
    direction_estimate,
    expected_squared_error,
    stated_sigma,
    stated_squared_error,
    unit_directions,
)
from curvlab.optim.step_bounds import printed_steps_bound, steps_bound
from curvlab.optim.uniform_direction import UniformDirection, UniformDirectionInfo

__all__ = [
    "NGD",
    "CubicNewton",
    "DivergedError",
    "ExactNGD",
    "ExactNGDInfo",
    "FisherNewton",
    "FisherNewtonInfo",
    "LowRankMatrix",
    "UniformDirection",
    "UniformDirectionInfo",
    "direction_estimate",
    "expected_squared_error",
    "output_gradient_bound",
    "printed_steps_bound",
    "stated_sigma",
    "stated_squared_error",
    "steps_bound",
    "unit_directions",
]
