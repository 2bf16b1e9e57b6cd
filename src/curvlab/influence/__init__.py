"""Influence functions, and the retraining responses they stand for."""

from curvlab.influence.agreement import Agreement, agreement
from curvlab.influence.example_derivatives import directional_derivatives, per_example_gradients
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

__all__ = [
    "Agreement",
    "Influence",
    "ProximalBregmanObjective",
    "ProximalNewton",
    "ProximalSGD",
    "Response",
    "Similarities",
    "agreement",
    "cosines",
    "directional_derivatives",
    "influence",
    "influence_scores",
    "loss_response",
    "per_example_gradients",
    "proximal_bregman_response",
    "similarities",
]
