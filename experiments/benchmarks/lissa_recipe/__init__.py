"""LiSSA's recipe over models, data and damping: C = 2, C measured, and C = 2 by importance; at what cost.

make bench-lissa-recipe PRESET=smoke|embedded|laptop|paper ARGS="damping_ratios=[0.01]"

Klochkov & Liu (2024), Corollary 1: step size 1 / (lambda_max + damping), |B| = C tr(G) / lambda_max, T = 2 /
(step size damping) steps, with C = 2 "for simplicity". Beside it `Lissa.auto`: C of condition C.1 measured, twice
that for |B|, four time constants, the last third averaged. And `Lissa.auto` by importance, which is ours: examples
(sequences of a language model) are drawn with probability proportional to tr(G_i) and weighted to keep the mean,
so that C is at most 1.01 by proof, and |B| that of C = 2. All are compared with exact solutions of the same
systems, whose right-hand sides are gradients of training points; the error of zero is 1. A case is a task with one
damping, absolute or relative to its lambda_max.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="LiSSA's recipe over models",
    paper={"dampings": "5 (Table 1, footnote)", "damping_ratios": "", "num_points": ""},
)
