"""Training and evaluation of networks: one loop, with steps, schedules and orders of batches to choose from."""

from curvlab.training.batch_order import shuffled_batches
from curvlab.training.checkpoint import Checkpoint, fingerprint
from curvlab.training.ensemble import Ensemble, train_ensemble
from curvlab.training.ensemble_losses import EnsembleLosses
from curvlab.training.evaluate import Evaluation, evaluate
from curvlab.training.history import TrainingHistory
from curvlab.training.language import evaluate_language_model, train_language_model
from curvlab.training.loop import TrainingDivergedError
from curvlab.training.mean_loss import MeanLoss
from curvlab.training.minimize import Minimum, minimize
from curvlab.training.sampled_labels import sampled_label_loss
from curvlab.training.schedules import cosine, cosine_after_warmup
from curvlab.training.steps import (
    Learner,
    Step,
    StepInfo,
    TrainingBatch,
    closure_step,
    curvature_step,
    gradient_step,
)
from curvlab.training.train import train

__all__ = [
    "Checkpoint",
    "Ensemble",
    "EnsembleLosses",
    "Evaluation",
    "Learner",
    "MeanLoss",
    "Minimum",
    "Step",
    "StepInfo",
    "TrainingBatch",
    "TrainingDivergedError",
    "TrainingHistory",
    "closure_step",
    "cosine",
    "cosine_after_warmup",
    "curvature_step",
    "evaluate",
    "evaluate_language_model",
    "fingerprint",
    "gradient_step",
    "minimize",
    "sampled_label_loss",
    "shuffled_batches",
    "train",
    "train_ensemble",
    "train_language_model",
]
