"""Plain training and evaluation of networks."""

from curvlab.training.evaluate import Evaluation, evaluate
from curvlab.training.train import TrainingDivergedError, TrainingHistory, train

__all__ = ["Evaluation", "TrainingDivergedError", "TrainingHistory", "evaluate", "train"]
