"""Does influence predict the change of test losses? With the Gauss-Newton matrix (Bae et al. 2022, Table 6).

make pbrf-tab6 PRESET=smoke|embedded|laptop|paper ARGS="seeds=[0] num_points=10"

For each left-out training point, the changes of the losses of random test examples that influence predicts to
first order (Eq. 20, with the Gauss-Newton matrix), against those met after cold-start retraining, warm-start
retraining, and minimising the proximal Bregman objective (PBRF). The retrainings are those of pbrf-tab5.

The paper's influence is LiSSA of depth 5,000, its scaling σ tuned from a list: a descent of length 5,000/σ, cut
off. The PBRF is one, too, of length ηT (K/2 epochs at a tenth of the learning rate). One number, the length of
the retraining, decides what influence predicts: LiSSA at a scaling of like length, and the filter of the PBRF's
own length, with nothing tuned, predict it; the exact inverse, which no retraining of that length reaches, does
so less. All scalings stand beside the exact solve and that filter. At `laptop`, at the rates that the validation
loss chooses, the PBRF is far shorter on MNIST than on the tables: of the paper's 6,000 images the smallest rate
of its grid ends at the lowest validation loss, of 600 the last that was offered. A plain gradient, of length
zero, predicts the PBRF on MNIST better than the exact estimate and worse than the filter, badly on Concrete and
Energy (tried once on the same networks): neither end of the scale predicts it as its own length does. On MNIST no
scaling of the list is as short as the PBRF: the largest has a length of 10. At a larger rate, about as long as on
the tables, MNIST is fitted: there the filter predicts the linearised retraining exactly, and the PBRF less, since
that leaves its linearisation.

At `paper` the tables have 20 points in double precision, three seeds, and Concrete another rate than at `laptop`,
0.1 for 0.3, whose validation losses differ by a hundredth: its PBRF is three times shorter, so is LiSSA's best
descent; truncated influence predicts it as well, exact influence less. MNIST is laptop's very run: 128 hidden
units for the paper's 1,024, four points, five of its seven rates. The Krylov space that LiSSA's mean is taken in
had converged; LiSSA itself, run on one network of Concrete in batches of 128 with the paper's five repeats,
predicts as well as its mean, nearly. Squared errors are without 1/2, so λ and σ are twice those with it.

Which correlation the paper means it does not say; see `correlation_tables`. Judged: for each left-out point over
the test examples, then the mean over the points; intervals are over seeds, which change the initial weights, the
batches and the points; fewer than three decide nothing.

How the PBRF's row comes about is shown by the same objective carried on at the undivided learning rate, by its
minimum for a small weight, and by the test losses at the minimum of the linearised objective, all with the exact
estimate; points.csv says of each point how near it came to a minimum. With a weight of 1/N there need not be one:
see `experiments.pbrf.minima`.
"""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, Target
from experiments.pbrf.correlation_plot import draw  # noqa: F401  this target's
from experiments.pbrf.correlations import PAPER, correlation_tables
from experiments.pbrf.correlations import judge_central as judge  # noqa: F401  likewise

TARGET = Target(
    __name__, title="Influence against cold start, warm start and PBRF", paper=PAPER, after=("pbrf/tab5",)
)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `correlations`, `networks` and `points`, see `correlation_tables`."""
    return correlation_tables(run, cfg, printed={"gauss_newton": "Table 6"})
