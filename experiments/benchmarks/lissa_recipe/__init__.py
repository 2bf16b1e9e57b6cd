"""LiSSA's recipe over models, data and damping: does C = 2 converge, does C measured, at what cost.

make bench-lissa-recipe PRESET=smoke|embedded|laptop|paper ARGS="damping_ratios=[0.01]"

Klochkov & Liu (2024), Corollary 1: step size 1 / (lambda_max + damping), |B| = C tr(G) / lambda_max, T = 2 /
(step size damping) steps, with C = 2 "for simplicity". Beside it `Lissa.auto`: C of condition C.1 measured, twice
that for |B|, four time constants, the last third averaged. Both are compared with exact solutions of the same
systems, whose right-hand sides are gradients of training points; the error of zero is 1. A case is a task with one
damping, absolute or relative to its lambda_max.
"""

from experiments.target import Target

TARGET = Target(
    __name__,
    title="LiSSA's recipe over models",
    paper={"dampings": "5 (Table 1, footnote)", "damping_ratios": "", "num_points": ""},
)
