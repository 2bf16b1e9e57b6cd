"""Model, loss and data: opened, checked and moved, before anything is made of them."""

from curvlab.problem.batch import Pairs, stack
from curvlab.problem.data import Batches, Data
from curvlab.problem.losses import OutputLoss
from curvlab.problem.model_function import ModelFunction, NonFiniteOutputError
from curvlab.problem.own_losses import FunctionLoss, Loss, output_loss
from curvlab.problem.parameters import freeze, only_parameters
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
