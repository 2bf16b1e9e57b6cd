"""Influence functions, and the retraining responses they stand for."""

from curvlab.influence.agreement import Agreement, agreement
from curvlab.influence.example_derivatives import directional_derivatives, per_example_gradients
from curvlab.influence.linear_datamodelling import (
    DatamodellingScore,
    ensemble_measurements,
    linear_datamodelling_score,
    random_halves,
    removal_weights,
    subset_weights,
)
from curvlab.influence.proximal_bregman import (
    ProximalBregmanObjective,
    ProximalNewton,
    ProximalSGD,
    Response,
    loss_response,
    proximal_bregman_response,
)
from curvlab.influence.scores import Influence, influence, influence_scores
from curvlab.influence.similarity import Similarities, cosines, similarities
from curvlab.influence.unrolled import SegmentResponse, UnrolledResponse, segment_response, unrolled_response

__all__ = [
    "Agreement",
    "DatamodellingScore",
    "Influence",
    "ProximalBregmanObjective",
    "ProximalNewton",
    "ProximalSGD",
    "Response",
    "SegmentResponse",
    "Similarities",
    "UnrolledResponse",
    "agreement",
    "cosines",
    "directional_derivatives",
    "ensemble_measurements",
    "influence",
    "influence_scores",
    "linear_datamodelling_score",
    "loss_response",
    "per_example_gradients",
    "proximal_bregman_response",
    "random_halves",
    "removal_weights",
    "segment_response",
    "similarities",
    "subset_weights",
    "unrolled_response",
]
