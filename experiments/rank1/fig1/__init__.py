"""Uniform directions on a 1-D function with f'' > 0 (Semenov 2025, first experiment).

make rank1-fig1 PRESET=smoke|embedded|laptop|paper ARGS="num_steps=100"

The slides do not name their function; here it is f(x) = sqrt(1 + x²), on which Newton's method diverges from
|x| > 1. For n = 1 the direction is u = 1 or -1, so D = f'' for every draw: nothing is random, and the method is
Newton's with the shift 2 δ + sqrt(M |f'| / 2) (δ counts twice: in D, and in σ = δ). Beside it gradient descent
with step 1/λ and Newton's method itself.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="Uniform directions on a 1-D function",
    paper={
        "summary.csv:objective": "1-D, f'' > 0, not named",
        "starts": "not stated",
        "deltas": "not stated",
        "num_steps": "not stated",
    },
)
