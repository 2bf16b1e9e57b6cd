"""Optimizers that use curvature, and what is known about their convergence."""

from curvlab.optim.cubic_newton import CubicNewton
from curvlab.optim.exact_ngd import ExactNGD, ExactNGDInfo
from curvlab.optim.fisher_newton import FisherNewton, FisherNewtonInfo, output_gradient_bound
from curvlab.optim.ginger import PUBLISHED_GINGER, Ginger
from curvlab.optim.low_rank import LowRankMatrix
from curvlab.optim.ngd import NGD
from curvlab.optim.parameter_vector import DivergedError
from curvlab.optim.qng import QNG
from curvlab.optim.random_direction import (
    direction_estimate,
    expected_squared_error,
    stated_sigma,
    stated_squared_error,
    unit_directions,
)
from curvlab.optim.sampled_labels import sampled_label_loss
from curvlab.optim.step_bounds import printed_steps_bound, steps_bound
from curvlab.optim.uniform_direction import UniformDirection, UniformDirectionInfo

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
