"""Two-stage leave-one-out beside warm start and PBRF (Bae et al. 2022, App. D.2, Table 8).

make pbrf-tab8 PRESET=smoke|embedded|laptop|paper ARGS="seeds=[0] num_points=10"

Training for longer changes a network that has not converged whether a point is left out or not. Two-stage
leave-one-out subtracts that: the network moves by the difference of two warm-start retrainings in the same
batches, without the point and with it. Columns as in pbrf-tab6; the retrainings are those of pbrf-tab5, with
one more, in which nothing is left out. The table's warm-start and PBRF columns are Table 7's, so its influence
is that with the Hessian; here both curvatures stand, and the Hessian is judged.

Which correlation the paper means it does not say; see `experiments.pbrf.correlations`. Judged: for each
left-out point over the test examples, then the mean over the points; intervals are over seeds, which change the
initial weights, the batches and the points.
"""

from experiments.target import Target

TARGET = Target(
    __name__,
    title="Two-stage leave-one-out",
    paper={
        "num_points": "20, not stated here",
        "num_test": "not stated",
        "seeds": "1",
        "damping": 0.001,
        "bregman_lr_divisor": 10,
        "influence.hessian._target_": "LiSSA, depth 5000, 5 repeats",
    },
    draw="experiments.pbrf.correlation_plot:draw",
    after=("pbrf/tab5", "pbrf/tab7"),
)
