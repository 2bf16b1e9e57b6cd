"""The Proposition on E‖D - H‖²_F, and what the slides say of D beside it (Semenov 2025).

make rank1-prop PRESET=smoke|embedded|laptop|paper ARGS="num_draws=10000 data=mushrooms"

The Proposition is printed as an equality, E‖D - H‖²_F = λmax² n (n - 1) + n δ² for D = S + δI. It is an upper
bound, and an equality only for multiples of the identity (without symmetrisation, for all H with H² = λ² I). λmax
must be the spectral norm: with the largest eigenvalue it fails for indefinite H. The exact value is
curvlab.optim.expected_squared_error. Here D, S and their errors are formed as dense matrices, draw by draw,
without any of these formulas: for spectra with spectral norm 1 in random bases, and for the Hessian of logistic
regression at x = 0.
"""

from curvlab.lab import Target

TARGET = Target(
    __name__,
    title="E‖D - H‖²: the Proposition",
    paper={
        "spectra": "any",
        "sizes": "any; 112 in its experiment",
        "num_draws": "expectation",
        "delta": "any",
    },
    digits={"table": 12},  # where the Proposition is an equality, six digits would put the ratio above 1
)
