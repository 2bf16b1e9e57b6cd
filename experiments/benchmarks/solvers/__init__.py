"""Solvers against cost, preconditioners from hard examples, and LiSSA's recipe, each beside exact solutions.

make bench-solvers PRESET=smoke|embedded|laptop|paper ARGS="parts=[solvers] solvers.rtol=1e-3"

A task says what it is `used_in`; what stands in the section of a part holds for that part.

**Solvers** (table.csv, timing.csv, summary.csv): error of the solution and correlation of influences, by products
and by seconds. Right-hand sides are gradients of test losses. Work is counted for each vector in products with the
matrix of the whole data, everything included: set-up, recomputed residuals, a batch by its share of the data.
LiSSA, Chebyshev iteration and CG, EK-FAC's too, treat every system by itself, so they are run on `max_independent`
of the systems at most (their work for each system is the same for more); block CG and Nyström share, and gain with
the number. The reference is block CG in double precision (in single where the config says so, `reference_dtype`),
to `reference_rtol`. Seconds are CPU seconds of this process.

**Preconditioners** (preconditioners.csv): in a fitted network few examples hold most of the curvature. Block CG,
for gradients of test losses, without a preconditioner, with Nyström ones, and with the rows of the examples that
have the largest traces or output curvatures (`curvlab.solvers.Rows`), each to residuals of 0.1, 0.01 and 0.001.
Products are counted for each system, those of the set-up included; for rows that is its passes over the data, in
products of 5 forwards. CG of curvlinops is a peer where it is installed, at a setting of its own, by the residual
it reaches. What is judged beside products is operations to the second (operations.csv), factors and products with
rows included: PyTorch counts them in a run of its own. Seconds (preconditioner_timing.csv) have no verdict.

The same fact for LiSSA (lissa.csv, lissa_steps.csv): step size 1 / (lambda_max + damping), |B| = 2 tr(G) /
lambda_max, once with batches drawn uniformly and once by importance. C of condition C.1 (Klochkov & Liu 2024) is
measured in the top eigenvector, in random directions and along a right-hand side, beside its certificate max
tr(G_i) / (N q_i tr(G)). The distance from the solution is compared with (1 - step_size damping)^T, what the exact
recursion leaves of the slowest component. And for Monte-Carlo estimates (estimates.csv) of tr(G) and of the
squared Frobenius norm (the sketches of lissa-tab3) from batches of 32: each draw is a row, with its deviation by
formula where there is one. The trace of a batch drawn by the traces does not vary at all, but a probe's form of it
does: what importance can save there is the batch's part.

**Recipes** (recipes.csv), over models, data and damping. Klochkov & Liu (2024), Corollary 1: step size 1 /
(lambda_max + damping), |B| = C tr(G) / lambda_max, T = 2 / (step size damping) steps, with C = 2 "for simplicity".
Beside it `Lissa.auto`: C of condition C.1 measured, twice that for |B|, four time constants, the last third
averaged. And `Lissa.auto` by importance, which is ours: examples (sequences of a language model) are drawn with
probability proportional to tr(G_i) and weighted to keep the mean, so that C is at most 1.01 by proof, and |B| that
of C = 2. All are compared with exact solutions of the same systems, whose right-hand sides are gradients of
training points; the error of zero is 1. A case is a task with one damping, absolute or relative to its lambda_max.

**Crossed** (crossed.csv): the recipe by importance differs from the paper's in three things. On a network that is
stopped early and on one that is fitted, each of the eight combinations (uniform or by importance, 2 or 4 time
constants, the last iterate or an average) with |B| of C = 2, for 20 sequences of batches.
"""

from __future__ import annotations

from curvlab.lab import Target
from experiments.benchmarks.parts import of_parts
from experiments.benchmarks.solvers import crossed, importance, operations, preconditioners, recipes, trajectories

TARGET = Target(
    __name__,
    title="Solvers, preconditioners and LiSSA's recipe against cost",
    paper={  # no paper compares the others
        "solvers.num_rhs": "",
        "solvers.damping": "",
        "solvers.damping_ratio": "",
        "solvers.rtol": "",
        "preconditioners.damping": "",
        "preconditioners.num_rhs": "",
        "preconditioners.rows": "",
        "preconditioners.nystrom_ranks": "",
        "recipes.dampings": "5 (Table 1, footnote)",
        "recipes.damping_ratios": "",
        "recipes.num_points": "",
        "crossed.num_sequences": "",
    },
    timings=("preconditioner_timing", "peer-*"),
)
PARTS = {"solvers": [trajectories], "preconditioners": [preconditioners, operations, importance]}
compute, judge, draw = of_parts(PARTS | {"recipes": [recipes], "crossed": [crossed]})
