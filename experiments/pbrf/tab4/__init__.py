"""The five gaps with the Hessian in the place of the Gauss-Newton matrix (Bae et al. 2022, Table 4).

make pbrf-tab4 PRESET=smoke|embedded|laptop|paper ARGS="num_points=5"

The first four gaps do not depend on the influence estimate: they are those of pbrf-tab5, from the same units of
work. The linearised response is the estimate with the Gauss-Newton matrix, so "solver" has the difference of
the two matrices in it.

The Hessian with damping is not definite at these θ^s: hundreds of eigenvalues below -λ and some next to it, so
that the estimate is the stationary point of a saddle. LiSSA diverges then. It is solved by its eigenvalues at
`smoke` and `embedded`, by minimum residuals at `laptop`; `paper` has LiSSA, as in the paper, and its rows are
out of reach where no scaling brings the residual to 0.1. The table has how many eigenvalues lie below -λ and the
smallest |μ + λ| (above 5,000 parameters only the smallest eigenvalue, by Lanczos).

Beside the table, `curvatures` has the solver error with either matrix on the same points, and, at up to 5,000
parameters, both at a damping of 2 |μ_min|, which makes the matrix definite: what is left of the difference there
is not the saddle's.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Five gaps, influence with the Hessian",
    paper={
        "num_points": 20,
        "seeds": "not stated",
        "damping": 0.001,
        "bregman_lr_divisor": 10,
        "table.csv:epochs": 1000,
        "influence.hessian._target_": "LiSSA, depth 5000, 5 repeats",
    },
    draw="experiments.pbrf.gap_plot:draw",
    after=("pbrf/tab5",),
)
