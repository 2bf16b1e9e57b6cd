"""Convergence of LiSSA with different batch sizes (Klochkov & Liu 2024, Fig. 2, Sec. 4).

make lissa-fig2 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits_early num_steps=2000"

LiSSA runs 1,000 steps with twice the recommended batch size, the recommended one (C = 2), and a tenth of it,
averaged over ten runs, which see as much data where ten divides the batch size (embedded: 10 x 1 examples against
13, which the claims say). Test influences are correlated between steps, as in the paper, and
at each step with those of the exact solution. The paper shows one training image (it does not say which) and one
run; here every number is a mean over several points and seeds. A run that overflows is shown as such: no number
stands for its correlation, and the claims take it for -1, the least that one can be.

One panel goes beyond the paper: an overfitted network with small damping, where the recipe with C = 2 diverges and
the one with C measured (`Lissa.auto`) does not; nor does C = 2 with examples drawn by importance, ours. Its
exact solutions are computed in double precision.

The iteration is the rescaled form after Eq. 8 of the paper, whose limit does not depend on the step size. The
damping is 5/270 of lambda_max, as for the paper's ResNet-18, where it is not given.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Convergence of LiSSA with different batch sizes",
    paper={
        "tasks": ["ResNet-18 on ImageNet"],
        "num_points": "one, not said which",
        "num_test": 500,
        "num_seeds": 1,
        "summary.csv:batch sizes": "200 100 10x10",
        "num_steps": 1000,
        "summary.csv:damping": 5.0,
    },
)
