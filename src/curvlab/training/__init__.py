"""Training and evaluation of networks: one loop, with steps, schedules and orders of batches to choose from."""

from curvlab.training.batch_order import BatchOrder, shuffled_batches
from curvlab.training.ensemble import train_ensemble, weighted_gradient
from curvlab.training.ensemble_descent import Ensemble, EnsembleGradient, descend
from curvlab.training.ensemble_losses import EnsembleLosses
from curvlab.training.evaluate import Evaluation, evaluate
from curvlab.training.history import TrainingHistory
from curvlab.training.language import train_language_model
from curvlab.training.loop import TrainingDivergedError
from curvlab.training.minimize import Minimum, minimize
from curvlab.training.replay import Replay, ReplayedStep
from curvlab.training.schedules import cosine, cosine_after_warmup
from curvlab.training.steps import (
    Learner,
    MeanLoss,
    Step,
    StepInfo,
    TrainingBatch,
    closure_step,
    curvature_step,
    gradient_step,
    sampled_label_loss,
    shared_curvature_step,
)
from curvlab.training.train import train
from curvlab.training.training_run import RunLength, TrainingRun
from curvlab.training.update_rules import AdamRule, SGDRule, UpdateRule

__all__ = [
    "AdamRule",
    "BatchOrder",
    "Ensemble",
    "EnsembleGradient",
    "EnsembleLosses",
    "Evaluation",
    "Learner",
    "MeanLoss",
    "Minimum",
    "Replay",
    "ReplayedStep",
    "RunLength",
    "SGDRule",
    "Step",
    "StepInfo",
    "TrainingBatch",
    "TrainingDivergedError",
    "TrainingHistory",
    "TrainingRun",
    "UpdateRule",
    "closure_step",
    "cosine",
    "cosine_after_warmup",
    "curvature_step",
    "descend",
    "evaluate",
    "gradient_step",
    "minimize",
    "sampled_label_loss",
    "shared_curvature_step",
    "shuffled_batches",
    "train",
    "train_ensemble",
    "train_language_model",
    "weighted_gradient",
]
