"""Plain training and evaluation of networks."""

from curvlab.training.evaluate import Evaluation, evaluate
from curvlab.training.language import evaluate_language_model, train_language_model
from curvlab.training.train import TrainingDivergedError, TrainingHistory, train

__all__ = [
    "Evaluation",
    "TrainingDivergedError",
    "TrainingHistory",
    "evaluate",
    "evaluate_language_model",
    "train",
    "train_language_model",
]
