"""Solvers against cost: error of the solution and correlation of influences, by products and by seconds.

make bench-solvers PRESET=smoke|embedded|laptop|paper ARGS="rtol=1e-3"

Right-hand sides are gradients of test losses. Work is counted for each vector in products with the matrix of the
whole data, everything included: set-up, recomputed residuals, a batch by its share of the data. LiSSA, Chebyshev
iteration and CG, EK-FAC's too, treat every system by itself, so they are run on `max_independent` of the systems
at most (their work for each system is the same for more); block CG and Nyström share, and gain with the number.

The reference is block CG in double precision (in single where the config says so, `reference_dtype`), to
`reference_rtol`. Seconds are CPU seconds of this process and stand in timing.csv.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Solvers against cost",
    # no paper compares these
    paper={"num_rhs": "", "num_points": "", "damping": "", "damping_ratio": "", "rtol": ""},
)
