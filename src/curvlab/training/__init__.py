"""Training and evaluation of networks: one loop, with steps, schedules and orders of batches to choose from."""

from curvlab.training.descent import (
    DescentState,
    Ensemble,
    EnsembleGradient,
    EnsembleOptimizer,
    MinimisationState,
    Minimum,
    descend,
    minimize,
)
from curvlab.training.ensemble import EnsembleLosses, train_ensemble, weighted_gradient
from curvlab.training.evaluate import Evaluation, evaluate
from curvlab.training.history import AdamRule, RunLength, SGDRule, TrainingHistory, TrainingRun, UpdateRule
from curvlab.training.language import train_language_model
from curvlab.training.replay import Replay, ReplayedStep
from curvlab.training.schedules import BatchOrder, cosine, cosine_after_warmup, shuffled_batches
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
from curvlab.training.train import TrainingDivergedError, TrainingState, train

__all__ = [
    "AdamRule",
    "BatchOrder",
    "DescentState",
    "Ensemble",
    "EnsembleGradient",
    "EnsembleLosses",
    "EnsembleOptimizer",
    "Evaluation",
    "Learner",
    "MeanLoss",
    "MinimisationState",
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
    "TrainingState",
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
