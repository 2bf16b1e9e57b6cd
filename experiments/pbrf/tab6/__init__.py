"""Does influence predict the change of test losses? With the gauss-newton matrix (Bae et al. 2022, Table 6).

make pbrf-tab6 PRESET=smoke|embedded|laptop|paper ARGS="seeds=[0] num_points=10"

For each left-out training point, the changes of the losses of random test examples that influence predicts to
first order (Eq. 20, with the Gauss-Newton matrix), against those met after cold-start retraining, warm-start
retraining, and minimising the proximal Bregman objective (PBRF). The retrainings are those of pbrf-tab5.

Which correlation the paper means it does not say; see `experiments.pbrf.correlations`. Judged: for each
left-out point over the test examples, then the mean over the points; intervals are over seeds, which change the
initial weights, the batches and the points; fewer than three decide nothing.

How the PBRF's row comes about is shown by the same objective carried on at the undivided learning rate, by its
minimum for a small weight, and by the test losses at the minimum of the linearised objective; points.csv says of
each point how near it came to a minimum. With a weight of 1/N there need not be one: see
`experiments.pbrf.carried_on` and `small_weight`.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Influence against cold start, warm start and PBRF",
    paper={
        "num_points": "20, not stated here",
        "num_test": "not stated",
        "seeds": "not stated",
        "networks.csv:epochs": 1000,
        "training.lr": "the best of 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001 by validation loss",
        "damping": 0.001,
        "bregman_lr_divisor": 10,
        "influence.gauss_newton._target_": "LiSSA, depth 5000, 5 repeats",
    },
    judge="experiments.pbrf.central_claim:judge",
    draw="experiments.pbrf.correlation_plot:draw",
    after=("pbrf/tab5",),
)
