"""Model, loss and data: opened, checked and moved, before anything is made of them."""

from curvlab.problem.data import Batches, Data, Pairs, stack
from curvlab.problem.freezing import freeze
from curvlab.problem.function_loss import FunctionLoss
from curvlab.problem.known_losses import Loss, output_loss
from curvlab.problem.losses import OutputLoss
from curvlab.problem.model_function import ModelFunction, NonFiniteOutputError
from curvlab.problem.parameter_subset import only_parameters
from curvlab.problem.problem import Problem, mean_gradient

__all__ = [
    "Batches",
    "Data",
    "FunctionLoss",
    "Loss",
    "ModelFunction",
    "NonFiniteOutputError",
    "OutputLoss",
    "Pairs",
    "Problem",
    "freeze",
    "mean_gradient",
    "only_parameters",
    "output_loss",
    "stack",
]
