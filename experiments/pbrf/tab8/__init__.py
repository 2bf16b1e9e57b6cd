"""Two-stage leave-one-out beside warm start and PBRF (Bae et al. 2022, App. D.2, Table 8).

make pbrf-tab8 PRESET=smoke|embedded|laptop|paper ARGS="seeds=[0] num_points=10"

Training for longer changes a network that has not converged whether a point is left out or not. Two-stage
leave-one-out subtracts that: the network moves by the difference of two warm-start retrainings in the same
batches, without the point and with it. Columns as in pbrf-tab6; the retrainings are those of pbrf-tab5, with
one more, in which nothing is left out. The table's warm-start and PBRF columns are Table 7's, so its influence
is that with the Hessian; here both curvatures stand, and the Hessian is judged.

Which correlation the paper means it does not say; see `experiments.pbrf.correlations`. Judged: for each
left-out point over the test examples, then the mean over the points; intervals are over seeds, which change the
initial weights, the batches and the points; fewer than three decide nothing.

H + λI is not definite at a network that has not converged: influence with it is no minimum of the PBRF, linearised
or not (Eq. 46 holds for G alone), and where an eigenvalue of H lies near -λ, its direction dominates. networks.csv
counts the eigenvalues below -λ.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Two-stage leave-one-out",
    paper={
        "num_points": "20, not stated here",
        "num_test": "not stated",
        "seeds": "not stated",
        "networks.csv:epochs": 1000,
        "training.lr": "the best of 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001 by validation loss",
        "damping": 0.001,
        "bregman_lr_divisor": 10,
        "influence.hessian._target_": "LiSSA, depth 5000, 5 repeats",
    },
    draw="experiments.pbrf.correlation_plot:draw",
    after=("pbrf/tab5", "pbrf/tab7"),
)
