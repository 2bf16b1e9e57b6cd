"""The five gaps with the Hessian in the place of the Gauss-Newton matrix (Bae et al. 2022, Table 4).

make pbrf-tab4 PRESET=smoke|embedded|laptop|paper ARGS="num_points=5"

The first four gaps do not depend on the influence estimate: they are those of pbrf-tab5, from the same units of
work. The linearised response is the estimate with the Gauss-Newton matrix, so "solver" has the difference of
the two matrices in it. The Hessian with damping need not be definite: minimum residuals solve it where the
paper has LiSSA, which diverges then. Beside the table, `curvatures` has the solver error with either matrix on
the same points.
"""

from experiments.target import Target

TARGET = Target(
    __name__,
    title="Five gaps, influence with the Hessian",
    paper={
        "num_points": 20,
        "seeds": "1",
        "damping": 0.001,
        "bregman_lr_divisor": 10,
        "table.csv:epochs": 1000,
        "influence.hessian._target_": "LiSSA, depth 5000, 5 repeats",
    },
    draw="experiments.pbrf.gap_plot:draw",
    after=("pbrf/tab5",),
)
