"""Responses to leaving training examples out, from retraining to influence, and the gaps between them."""

from curvlab.influence.responses.gaps import GAPS, Gap, output_gaps
from curvlab.influence.responses.left_out import LeftOut
from curvlab.influence.responses.minimizers import FullBatchLBFGS, SharedBatches
from curvlab.influence.responses.objectives import (
    DownweightedCost,
    LinearisedProximalBregmanCost,
    ProximalBregmanCost,
    ProximalCost,
)
from curvlab.influence.responses.response import (
    cold_optimum,
    curvature_operator,
    influence_estimate,
    linearised_proximal_bregman_warm_optimum,
    proximal_bregman_warm_optimum,
    proximal_warm_optimum,
    two_stage_optimum,
    warm_optimum,
)

__all__ = [
    "GAPS",
    "DownweightedCost",
    "FullBatchLBFGS",
    "Gap",
    "LeftOut",
    "LinearisedProximalBregmanCost",
    "ProximalBregmanCost",
    "ProximalCost",
    "SharedBatches",
    "cold_optimum",
    "curvature_operator",
    "influence_estimate",
    "linearised_proximal_bregman_warm_optimum",
    "output_gaps",
    "proximal_bregman_warm_optimum",
    "proximal_warm_optimum",
    "two_stage_optimum",
    "warm_optimum",
]
