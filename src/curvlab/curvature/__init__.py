"""Curvature matrices of neural networks as linear operators: Gauss-Newton, Hessian, Fisher."""

from curvlab.curvature.examples import exact_traces, has_exact_traces, output_curvatures, sampled_traces
from curvlab.curvature.fisher import FisherOperator
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.hessian import HessianOperator
from curvlab.curvature.importance import (
    ExampleImportance,
    ImportanceOperator,
    certified_constant,
    example_importance,
    importance_probabilities,
)
from curvlab.curvature.operator import DataOperator

__all__ = [
    "DataOperator",
    "ExampleImportance",
    "FisherOperator",
    "GaussNewtonOperator",
    "HessianOperator",
    "ImportanceOperator",
    "certified_constant",
    "exact_traces",
    "example_importance",
    "has_exact_traces",
    "importance_probabilities",
    "output_curvatures",
    "sampled_traces",
]
