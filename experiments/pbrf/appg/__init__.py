"""Conjugate gradients, LiSSA and the s_test trick at equal cost (Bae et al. 2022, App. G).

make pbrf-appg PRESET=smoke|embedded|laptop|paper ARGS="damping=0.01 lissa.num_steps=500"

Right-hand sides are gradients of training points at θ^s of networks as in pbrf-tab5; matrices are G + damping
and, for some tasks, the Hessian with a damping that makes it positive definite. Every iterate is compared with a
tight reference: relative error, and correlation of the scores (over test examples) with the exact ones. Cost is
counted for each system in products with the matrix of the whole data, a batch as |B| / N of one, set-up included.
That is the same for all methods, but it is not time: a small batch takes longer than its share (step_time.csv).

CG is truncated and damped as in Eq. 47. LiSSA is Eq. 49 with the smallest scaling σ of Sec. C.2's list with which
no repeat is seen to diverge; smaller ones that were tried are not in its cost. A σ just below the limit of
stability, (λmax + damping) / 2, may pass; the claims name such seeds and leave them out. Its batch size is not
stated: here that of training in Sec. C.3, 128, or what the config says. Beside them stand block CG, curvlab's
default solver and `Lissa.auto`, whose C is measured.

Misprints: Eq. 48 and 49 must start at t = 0, else the limit lacks v / σ (for v a top eigenvector and σ its
eigenvalue, everything). With powers t of the matrix of one batch (r, t), Eq. 49 tends to the mean over batches of
(H_B + damping)⁻¹ v; what is meant, and run, is the product of matrices of t different batches. Both are exact
claims here (formulas.py). Where the recursion is begun at u = v / σ, it has the term t = 0; `Lissa` begins at 0,
one step earlier.

s_test (Eq. 50): scores of all training on all test points, by solving for one side or the other; each side's
systems by the same CG, in chunks of the same size. Seconds are CPU seconds of this process, and vary.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="CG, LiSSA and the s_test trick: accuracy against cost",
    paper={
        "seeds": "not stated",
        "num_points": "20 (Sec. C.2)",
        "num_test": "not stated",
        "damping": "0.001",
        "lissa.batch_size": "not stated",
        "lissa.num_steps": "5000 or 10000",
        "lissa.num_repeats": 5,
        "cg.max_steps": "truncated, no number",
        "table.csv:scale": "smallest of 10 to 500 that converges",
        "s_test.num_points": "the training set",
        "s_test.num_test": "much smaller",
    },
    after=("pbrf/tab5",),
)
