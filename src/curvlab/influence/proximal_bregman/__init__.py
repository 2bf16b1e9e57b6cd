"""Proximal Bregman response functions (Bae et al. 2022): the retraining that influence functions approximate."""

from curvlab.influence.proximal_bregman.newton import ProximalNewton
from curvlab.influence.proximal_bregman.objective import ProximalBregmanObjective
from curvlab.influence.proximal_bregman.response import Response, loss_response, proximal_bregman_response
from curvlab.influence.proximal_bregman.sgd import ProximalSGD

__all__ = [
    "ProximalBregmanObjective",
    "ProximalNewton",
    "ProximalSGD",
    "Response",
    "loss_response",
    "proximal_bregman_response",
]
