"""Does influence predict the change of test losses? With the Hessian (Bae et al. 2022, Table 7).

make pbrf-tab7 PRESET=smoke|embedded|laptop|paper ARGS="seeds=[0] num_points=10"

For each left-out training point, the changes of the losses of random test examples that influence predicts to
first order (Eq. 20, with the Hessian), against those met after cold-start retraining, warm-start
retraining, and minimising the proximal Bregman objective (PBRF). The retrainings are those of pbrf-tab5.

Columns, estimates and what is judged are those of pbrf-tab6.

H + λI is not definite at a network that has not converged: solved exactly, influence with it is no minimum of the
PBRF, linearised or not (Eq. 46 holds for G alone), and where an eigenvalue of H lies near -λ, its direction
dominates. LiSSA predicts the PBRF there only at scalings so large that its steps end before such directions grow.
networks.csv counts the eigenvalues below -λ.

At `laptop` the PBRF on MNIST, at the rate that the validation loss chooses, is far shorter than on the tables
(its length: networks.csv): linearised it goes a tenth of the way to the exact estimate with the Gauss-Newton
matrix (pbrf-tab5), and no negative direction grows in it. There the filter of its length, the closed form of
that descent, is nearly the PBRF itself, by either matrix: an agreement that says less of influence than those on
the tables.

"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, Target
from experiments.pbrf.correlation_plot import draw  # noqa: F401  this target's
from experiments.pbrf.correlations import PAPER, correlation_tables
from experiments.pbrf.correlations import judge_central as judge  # noqa: F401  likewise

TARGET = Target(__name__, title="The same with the Hessian", paper=PAPER, after=("pbrf/tab5", "pbrf/tab6"))


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `correlations`, `networks` and `points`, see `correlation_tables`."""
    return correlation_tables(run, cfg, printed={"hessian": "Table 7"})
