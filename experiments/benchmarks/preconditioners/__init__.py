"""Fewer products: preconditioners from rows of hard examples, and LiSSA with importance sampling.

make bench-preconditioners PRESET=smoke|embedded|laptop|paper ARGS="num_rhs=5"

Two uses of one fact: in a fitted network few examples hold most of the curvature.

Block CG solves (G + damping I) X = B, B gradients of test losses, without a preconditioner, with Nyström ones,
and with the rows of the examples that have the largest traces or output curvatures (`curvlab.solvers.Rows`), each
to residuals of 0.1, 0.01 and 0.001. Products are counted for each system, those of the set-up included; for rows
that is its passes over the data, in products of 5 forwards. Seconds are CPU seconds of this process from the
set-up on. CG of curvlinops is a peer where it is installed, at a setting of its own, by the residual it reaches.

LiSSA runs with step size 1 / (lambda_max + damping) and |B| = 2 tr(G) / lambda_max, once with batches drawn
uniformly and once by importance. C of condition C.1 (Klochkov & Liu 2024) is measured in the top eigenvector, in
random directions and along a right-hand side, beside its certificate max tr(G_i) / (N q_i tr(G)). The distance
from the solution is compared with (1 - step_size damping)^T, what the exact recursion leaves of the slowest
component.

Monte-Carlo estimates of tr(G) and of the squared Frobenius norm (the sketches of lissa-tab3) from batches of 32,
drawn uniformly and by importance: each draw is a row of estimates.csv, with its deviation by formula where
there is one. The trace of a batch drawn by the traces does not vary at all, but a probe's form of it does: what
importance can save there is the batch's part.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Fewer products: rows of hard examples, importance sampling",
    judge=".claims:judge_claims",
    paper={"damping": "", "num_rhs": "", "rows": "", "nystrom_ranks": ""},  # no paper compares these
)
