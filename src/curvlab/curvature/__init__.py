"""Curvature matrices of neural networks as linear operators: Gauss-Newton, Hessian, Fisher."""

from curvlab.curvature.batches import Batches, Data
from curvlab.curvature.data_operator import DataOperator
from curvlab.curvature.example_importance import ExampleImportance, example_importance
from curvlab.curvature.example_traces import exact_traces, output_curvatures, sampled_traces
from curvlab.curvature.fisher import FisherOperator
from curvlab.curvature.function_loss import FunctionLoss
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.hessian import HessianOperator
from curvlab.curvature.importance import ImportanceOperator, certified_constant, importance_probabilities
from curvlab.curvature.known_losses import Loss, output_loss
from curvlab.curvature.losses import OutputLoss
from curvlab.curvature.mean_gradient import mean_gradient
from curvlab.curvature.model_function import ModelFunction, NonFiniteOutputError
from curvlab.curvature.weighted_operator import WeightedOperator

__all__ = [
    "Batches",
    "Data",
    "DataOperator",
    "ExampleImportance",
    "FisherOperator",
    "FunctionLoss",
    "GaussNewtonOperator",
    "HessianOperator",
    "ImportanceOperator",
    "Loss",
    "ModelFunction",
    "NonFiniteOutputError",
    "OutputLoss",
    "WeightedOperator",
    "certified_constant",
    "exact_traces",
    "example_importance",
    "importance_probabilities",
    "mean_gradient",
    "output_curvatures",
    "output_loss",
    "sampled_traces",
]
