"""The retrainings that influence functions stand for: their objectives, how they are minimised, their responses.

Of single points up-weighted by ε, however small (`ProximalBregmanObjective`, `proximal_bregman_response`), and of
groups left out (`LeftOut`), from retraining to influence, with the gaps between them.
"""

from curvlab.influence.retraining.explain import GapExplanation, explain_gap
from curvlab.influence.retraining.gaps import GAPS, LABELS, Gap, output_gaps
from curvlab.influence.retraining.minimise import (
    FullBatchLBFGS,
    Objective,
    ProximalNewton,
    ProximalSGD,
    Response,
    SharedBatches,
)
from curvlab.influence.retraining.objective import (
    MAX_WHOLE_GROUP,
    DownweightedCost,
    LeftOut,
    LinearisedProximalBregmanCost,
    ProximalBregmanCost,
    ProximalCost,
)
from curvlab.influence.retraining.points import ProximalBregmanObjective
from curvlab.influence.retraining.responses import (
    RETRAINED,
    cold_optimum,
    curvature_operator,
    influence_estimate,
    linearised_proximal_bregman_warm_optimum,
    loss_response,
    proximal_bregman_response,
    proximal_bregman_warm_optimum,
    proximal_warm_optimum,
    two_stage_optimum,
    warm_optimum,
)

__all__ = [
    "GAPS",
    "LABELS",
    "MAX_WHOLE_GROUP",
    "RETRAINED",
    "DownweightedCost",
    "FullBatchLBFGS",
    "Gap",
    "GapExplanation",
    "LeftOut",
    "LinearisedProximalBregmanCost",
    "Objective",
    "ProximalBregmanCost",
    "ProximalBregmanObjective",
    "ProximalCost",
    "ProximalNewton",
    "ProximalSGD",
    "Response",
    "SharedBatches",
    "cold_optimum",
    "curvature_operator",
    "explain_gap",
    "influence_estimate",
    "linearised_proximal_bregman_warm_optimum",
    "loss_response",
    "output_gaps",
    "proximal_bregman_response",
    "proximal_bregman_warm_optimum",
    "proximal_warm_optimum",
    "two_stage_optimum",
    "warm_optimum",
]
