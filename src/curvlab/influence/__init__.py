"""Influence functions, and the retraining responses they stand for."""

from curvlab.influence.bank import Bank, BankScore, lds, load_bank
from curvlab.influence.datamodelling import (
    DatamodellingScore,
    ensemble_measurements,
    linear_datamodelling_score,
    random_halves,
    removal_weights,
    subset_weights,
)
from curvlab.influence.derivatives import directional_derivatives, per_example_gradients
from curvlab.influence.lengths import Retraining
from curvlab.influence.mislabelled import (
    CorruptedLabels,
    DetectionCurve,
    confident_learning_scores,
    corrupt_labels,
    detection_curve,
    margins,
)
from curvlab.influence.preconditioned import adam_times, preconditioned_influence
from curvlab.influence.prepared import PreparedInfluence, prepare_influence
from curvlab.influence.retraining import (
    GapExplanation,
    ProximalBregmanObjective,
    ProximalNewton,
    ProximalSGD,
    Response,
    explain_gap,
    loss_response,
    proximal_bregman_response,
)
from curvlab.influence.scores import Agreement, Influence, agreement, influence, influence_scores, median_rms
from curvlab.influence.segments import SegmentResponse, segment_response
from curvlab.influence.self_influence import SelfInfluence, self_influence
from curvlab.influence.similarity import Similarities, cosines, similarities
from curvlab.influence.unrolled import UnrolledResponse, unrolled_response

__all__ = [
    "Agreement",
    "Bank",
    "BankScore",
    "CorruptedLabels",
    "DatamodellingScore",
    "DetectionCurve",
    "GapExplanation",
    "Influence",
    "PreparedInfluence",
    "ProximalBregmanObjective",
    "ProximalNewton",
    "ProximalSGD",
    "Response",
    "Retraining",
    "SegmentResponse",
    "SelfInfluence",
    "Similarities",
    "UnrolledResponse",
    "adam_times",
    "agreement",
    "confident_learning_scores",
    "corrupt_labels",
    "cosines",
    "detection_curve",
    "directional_derivatives",
    "ensemble_measurements",
    "explain_gap",
    "influence",
    "influence_scores",
    "lds",
    "linear_datamodelling_score",
    "load_bank",
    "loss_response",
    "margins",
    "median_rms",
    "per_example_gradients",
    "preconditioned_influence",
    "prepare_influence",
    "proximal_bregman_response",
    "random_halves",
    "removal_weights",
    "segment_response",
    "self_influence",
    "similarities",
    "subset_weights",
    "unrolled_response",
]
